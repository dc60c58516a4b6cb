"""The seam between the gateway and a wire format. One module per dialect, each with one class of this shape.

A dialect reads a request body into an ``Ask`` and writes replies, stream events and errors. It knows nothing of tokens,
sessions or sampling.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from longrein.calls.conversation import Conversation, Message, ToolCall
from longrein.errors import CallError


@dataclass(frozen=True, slots=True)
class Ask:
    """What a request asks for, beyond the sampling that the configuration pins.

    Attributes:
        model: the name the harness used, echoed in the reply.
        max_tokens: most tokens the harness wants, None for no wish.
        stop: texts at which the reply ends.
        include_usage: whether a stream is to end with its usage.
        logprobs: whether the reply is to carry the sampled tokens' log-probabilities.
    """

    conversation: Conversation
    model: str
    stream: bool = False
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    include_usage: bool = False
    logprobs: bool = False


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
        tokens: each sampled token's text and log-probability, where the ask wants them.
    """

    message: Message
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    tokens: tuple[tuple[str, float], ...] | None = None


@dataclass(frozen=True, slots=True)
class Header:
    """What every object of one reply repeats; ``created`` is in whole seconds."""

    reply_id: str
    created: int
    model: str


class Dialect(Protocol):
    """One wire format."""

    name: str
    keepalive: bytes
    """A stream event that clients skip."""

    def reply_id(self) -> str: ...

    def read(self, body: Mapping[str, Any]) -> Ask:
        """Understand a request body.

        Raises:
            InvalidRequest: names the field that is wrong or cannot be honoured.
        """
        ...

    def reply(self, header: Header, reply: Reply) -> dict[str, Any]:
        """The whole reply as one JSON object."""
        ...

    def begin(self, header: Header) -> bytes:
        """First event of a stream."""
        ...

    def delta(self, header: Header, delta: Delta) -> bytes: ...

    def end(self, header: Header, reply: Reply, *, usage: bool) -> bytes:
        """Last events of a stream."""
        ...

    def error(self, error: CallError) -> dict[str, Any]: ...

    def error_event(self, error: CallError) -> bytes:
        """The error inside a stream that has begun."""
        ...
