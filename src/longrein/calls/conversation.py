"""One canonical conversation, whatever dialect it came in.

Two conversations are the same when a model would be told the same: ids, cache marks, key order and the spacing of tool
arguments say nothing. Reasoning counts only where both sides have it, since many harnesses do not play it back.
Comparing a long history with an earlier one costs one hash per message.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]

NOTHING_SAID = b""
"""The digest of an empty history."""

# How a tool's result begins that says it failed.
FAILED = re.compile(r"\s*(error\b|<tool_use_error>)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call the model made.

    Attributes:
        call_id: unique within the conversation; never compared.
        arguments: JSON text, as whoever wrote it wrote it (it may be malformed in a harness's playback).
    """

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn.

    Attributes:
        tool_call_id: for role ``tool``, the call it answers.
        reasoning: thinking that came before ``content``; None where the sender did not say.
        broken_calls: of a sampled reply, how many tool calls in it could not be read and stayed text.
    """

    role: Role
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None
    broken_calls: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call; ``parameters`` is its JSON schema, None where none was given."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None

    def as_function(self) -> dict[str, Any]:
        """The form chat templates expect."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        if self.parameters is not None:
            function["parameters"] = dict(self.parameters)
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a call asks the model to continue."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = field(default=())

    def followed_by(self, messages: Sequence[Message]) -> "Conversation":
        return replace(self, messages=(*self.messages, *messages))

    def after_system(self, turns: Sequence[Message]) -> "Conversation":
        """Put turns behind the leading system messages."""
        if not turns:
            return self
        at = next((i for i, message in enumerate(self.messages) if message.role != "system"), len(self.messages))
        return replace(self, messages=(*self.messages[:at], *turns, *self.messages[at:]))

    def without_reasoning(self) -> "Conversation":
        if not any(message.reasoning for message in self.messages):
            return self
        return replace(self, messages=tuple(replace(message, reasoning=None) for message in self.messages))


def parsed_arguments(text: str, parse_float: Callable[[str], Any] | None = None) -> Any:
    """Tool arguments as JSON, or the text itself where it is none."""
    if not text.strip():
        return {}
    try:
        return json.loads(text, parse_float=parse_float)
    except (ValueError, RecursionError):
        return text


def _compared(arguments: str) -> str:
    """Arguments in one spelling; as they are where they are nested too deep to be spelt anew."""
    try:
        return json.dumps(parsed_arguments(arguments, _number), sort_keys=True)
    except RecursionError:
        return arguments


def _number(text: str) -> int | float:
    """1.0 is 1: harnesses in JavaScript make no difference."""
    value = float(text)
    return int(value) if value.is_integer() else value


def calls_are_valid(reply: Message, tools: Sequence[Tool]) -> bool | None:
    """Whether all tool calls of a reply are well-formed and of declared tools; None where it has none."""
    if not (reply.tool_calls or reply.broken_calls):
        return None
    declared = {tool.name for tool in tools}
    sound = [call.name in declared and isinstance(parsed_arguments(call.arguments), dict) for call in reply.tool_calls]
    return not reply.broken_calls and all(sound)


def results_failed(messages: Sequence[Message]) -> bool | None:
    """Whether one of the tool results behind the last reply says that the tool failed; None where there are none.

    It says so by how it begins: dialects with a flag for it have it written there.
    """
    last = max((index for index, message in enumerate(messages) if message.role == "assistant"), default=-1)
    results = [message for message in messages[last + 1 :] if message.role == "tool"]
    return any(FAILED.match(result.content) for result in results) if results else None


def digest_message(message: Message) -> bytes:
    """Equal for messages that say the same (reasoning aside; see ``same_reasoning``)."""
    name = None if message.role == "tool" else message.name
    calls = [(call.name, _compared(call.arguments)) for call in message.tool_calls]
    head = json.dumps([message.role, name, len(message.content), calls])
    return blake2b(head.encode() + message.content.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def digest_tools(tools: Sequence[Tool]) -> bytes:
    """Equal for the same tools in the same order."""
    functions = json.dumps([tool.as_function() for tool in tools], sort_keys=True)
    return blake2b(functions.encode(), digest_size=16).digest()


def link(before: bytes, message: Message) -> bytes:
    """The digest of a history that goes on with ``message``."""
    return blake2b(before + digest_message(message), digest_size=16).digest()


def chain(messages: Sequence[Message], begun: Sequence[bytes] = (NOTHING_SAID,)) -> list[bytes]:
    """``chain(m)[i]`` identifies the first ``i`` messages; len(m) + 1 digests, of which ``begun`` are known."""
    digests = list(begun)
    for message in messages[len(begun) - 1 :]:
        digests.append(link(digests[-1], message))
    return digests


def same_reasoning(one: Sequence[Message], other: Sequence[Message]) -> bool:
    """Whether two histories that say the same also thought the same, where both tell (outer white space aside)."""
    return all(
        a.reasoning.strip() == b.reasoning.strip()
        for a, b in zip(one, other, strict=False)
        if a.reasoning is not None and b.reasoning is not None
    )


def same_message(one: Message, other: Message) -> bool:
    """Whether two messages say the same, reasoning included (absent and empty reasoning are the same here)."""
    return (
        digest_message(one) == digest_message(other)
        and (one.reasoning or "").strip() == (other.reasoning or "").strip()
    )
