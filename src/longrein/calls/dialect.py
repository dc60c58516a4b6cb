"""The seam between the gateway and a wire format. One module per dialect, each with one class of this shape.

A dialect reads a request body into an ``Ask`` and writes replies, stream events and errors. It knows nothing of tokens,
sessions or sampling.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from longrein.calls.conversation import Conversation, Message, ToolCall
from longrein.errors import CallError


@dataclass(frozen=True, slots=True)
class Target:
    """What a request says outside its body.

    Attributes:
        model: the model's name, where the path holds it.
        stream: whether to stream, where the path says so.
        query: the query parameters.
        headers: names in lower case.
    """

    model: str = ""
    stream: bool = False
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ask:
    """What a request asks for, beyond the sampling that the configuration pins.

    Attributes:
        model: the name the harness used, echoed in the reply.
        text: a bare text, or its token ids, that is to be continued instead of the conversation.
        max_tokens: most tokens the harness wants, None for no wish.
        stop: texts at which the reply ends.
        include_usage: whether a stream is to end with its usage.
        logprobs: whether the reply is to carry the sampled tokens' log-probabilities.
        token_ids: whether the reply is to carry the ids of prompt and completion.
        previous: id of an earlier reply whose conversation this one goes on from.
        instructions: a system message of this request alone: a later one that names its reply as ``previous`` does not
            inherit it.
        dropped: what was left out of the request because no model here can honour it, in words.
        notes: what the dialect wants to know again when it writes the reply.
    """

    conversation: Conversation
    model: str
    text: str | tuple[int, ...] | None = None
    stream: bool = False
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    include_usage: bool = False
    logprobs: bool = False
    token_ids: bool = False
    previous: str | None = None
    instructions: str | None = None
    dropped: tuple[str, ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Delta:
    """Text and calls that a growing reply has gained; ``first_call`` is the place of the first of ``calls``."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    first_call: int = 0


@dataclass(frozen=True, slots=True)
class Reply:
    """A finished reply.

    Attributes:
        finish_reason: ``stop``, ``length`` or ``tool_calls``.
        stop: the text of ``Ask.stop`` that ended it, if one did.
        tokens: each sampled token's text and log-probability, where the ask wants them.
        prompt_ids, completion_ids: what the model saw and sampled, where the ask wants them.
    """

    message: Message
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    stop: str | None = None
    tokens: tuple[tuple[str, float], ...] | None = None
    prompt_ids: tuple[int, ...] | None = None
    completion_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Header:
    """What every object of one reply repeats; ``created`` is in whole seconds."""

    reply_id: str
    created: int
    model: str


class Stream(Protocol):
    """One reply on its way to one client. What it writes depends on nothing but what it was told, so that two clients
    of one reply are sent the same.
    """

    content_type: str

    def begin(self) -> bytes:
        """First events, sent before anything is sampled."""
        ...

    def alive(self) -> bytes:
        """A sign of life that clients skip."""
        ...

    def delta(self, delta: Delta) -> bytes: ...

    def end(self, reply: Reply) -> bytes:
        """Last events. All of the reply has been told in deltas."""
        ...

    def error(self, error: CallError) -> bytes:
        """Last events where the reply failed after the stream had begun."""
        ...


class Dialect(Protocol):
    """One wire format.

    Attributes:
        name: stands in the ledger with each call.
        overflow_in_stream: whether a prompt that is too long is told inside a stream, where one was asked for: some
            clients look for it only there.
    """

    name: str
    overflow_in_stream: bool

    def reply_id(self) -> str: ...

    def read(self, body: Mapping[str, Any], target: Target) -> Ask:
        """Understand a request.

        Raises:
            InvalidRequest: names the field that is wrong or cannot be honoured.
        """
        ...

    def reply(self, header: Header, ask: Ask, reply: Reply) -> dict[str, Any]:
        """The whole reply as one JSON object."""
        ...

    def stream(self, header: Header, ask: Ask) -> Stream: ...

    def error(self, error: CallError) -> tuple[int, dict[str, Any]]:
        """HTTP status and body of an error."""
        ...


class CountingDialect(Dialect, Protocol):
    """A wire format that can ask how long a prompt is."""

    def read_count(self, body: Mapping[str, Any], target: Target) -> Conversation:
        """Understand a request for a count.

        Raises:
            InvalidRequest: as for ``read``.
        """
        ...

    def count(self, tokens: int) -> dict[str, Any]:
        """The answer."""
        ...


def event(data: bytes, name: str | None = None) -> bytes:
    """One server-sent event."""
    return (b"" if name is None else b"event: " + name.encode() + b"\n") + b"data: " + data + b"\n\n"
