"""Wishes about a reply's form that sampling does not enforce: they are told to the model, and to the harness that they
were only told.

Forcing a token would record a sample that the policy never made. A reply that misses the form is the harness's to find,
and the reward's to judge.
"""

import json
from collections.abc import Mapping
from typing import Any

from longrein.calls.conversation import Conversation, Message
from longrein.calls.fields import refused


def in_json(schema: Mapping[str, Any] | None = None) -> str:
    """What the model is told of a form: any JSON object, or what fits the schema."""
    if not schema:
        return "Answer with one JSON object and nothing else."
    told = json.dumps(schema, ensure_ascii=False)
    return f"Answer with JSON that is valid against this schema, and nothing else:\n{told}"


def json_schema(form: object, where: str) -> str:
    """What OpenAI's ``json_object`` or ``json_schema`` forms, and Anthropic's, come to.

    Raises:
        InvalidRequest: another form.
    """
    kind = form.get("type") if isinstance(form, Mapping) else None
    if isinstance(form, Mapping) and kind == "json_object":
        return in_json()
    if isinstance(form, Mapping) and kind == "json_schema":
        # Chat completions nest what the others say at once.
        inner = form.get("json_schema", form)
        schema = inner.get("schema") if isinstance(inner, Mapping) else None
        if isinstance(inner, Mapping) and (schema is None or isinstance(schema, Mapping)):
            return in_json(schema)
    raise refused(where, form, "expected type text, json_object, or json_schema with a schema")


def told(conversation: Conversation, form: str) -> Conversation:
    """With the form as the last of the system messages at the beginning."""
    return conversation.after_system([Message("system", form)])


def form_note(where: str) -> str:
    """What the harness is told of a form."""
    return f"{where}: told to the model in words, not enforced"


def choice_note(where: str) -> str:
    """What the harness is told where it forces a tool call."""
    return f"{where}: not enforced, the model chooses freely among the tools"
