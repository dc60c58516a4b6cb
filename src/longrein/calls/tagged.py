"""Tool calls whose values stand between tags: a text stays what it is, anything else is JSON.

The library's readers for chat templates do not know the tools, so to them a text that is no JSON is a fault, and one
that happens to be JSON (``5``, ``true``) is no text. Here the declared types decide.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from longrein.calls.conversation import Tool

# Reader of the library → how it writes a value; ``{key}`` is the argument's name.
VALUES: Mapping[str, str] = {
    "qwen3.5": r"<parameter={key}>\n?(.*?)\n?</parameter>",
    "glm": r"<arg_key>\s*{key}\s*</arg_key>\s*<arg_value>(.*?)</arg_value>",
}


def typed(parsed: Any, parser: str, tools: Sequence[Tool]) -> Any:
    """A ``ParsedResponse`` with each argument in the type that its tool declares."""
    declared = {tool.name: (tool.parameters or {}).get("properties") or {} for tool in tools}
    calls = [_typed_call(call, VALUES[parser], declared.get(call.name, {})) for call in parsed.tool_calls]
    return replace(parsed, tool_calls=calls)


def _typed_call(call: Any, pattern: str, properties: Mapping[str, Any]) -> Any:
    if not isinstance(call.arguments, dict) or call.status not in ("ok", "invalid_json"):
        return call
    arguments, sound = {}, True
    for key, value in call.arguments.items():
        found = re.search(pattern.replace("{key}", re.escape(key)), call.raw, re.DOTALL)
        kinds = _kinds(properties.get(key))
        text = found[1].strip() if found else None
        arguments[key] = text if kinds == {"string"} and text is not None else value
        if text is not None and not _is_json(text):
            sound = sound and (not kinds or "string" in kinds)
    status = type(call.status)("ok" if sound else "invalid_json")
    return replace(call, arguments=arguments, status=status)


def _kinds(schema: Any) -> set[str]:
    """The JSON types a schema allows; empty where it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    given = schema.get("type")
    kinds = {given} if isinstance(given, str) else set(given) if isinstance(given, list) else set()
    branches = [branch for name in ("anyOf", "oneOf") for branch in schema.get(name) or ()]
    return kinds.union(*(_kinds(branch) for branch in branches))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
