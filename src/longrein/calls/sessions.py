"""Token-exact sessions: a call goes on from the recorded tokens of the call it continues.

Among a rollout's delivered calls, the longest whose conversation and reply begin the new conversation is continued from
its own tokens, never from a re-tokenised echo. Where it cannot be, the prompt is rendered afresh; every call records
why its tokens start where they do.
"""

from dataclasses import dataclass

import numpy as np

from longrein.calls.conversation import Conversation, Message, chain, digest_tools, link, same_reasoning
from longrein.calls.rendering import Prompt, Recorded, Renderer
from longrein.records import Cause, IntArray


@dataclass(frozen=True, slots=True)
class Opening:
    """Where a call's tokens start.

    Attributes:
        conversation: what the prompt shows: recorded turns as they were recorded, new turns as the harness sent them.
        digest: identifies the conversation's messages.
        beginning: identifies them up to the first user message: what differs there is another task.
        parent_id: the call whose tokens the prompt begins with, if any.
        inherited: how many of the prompt's tokens are that call's prompt and completion; 0 without one.
    """

    conversation: Conversation
    digest: bytes
    beginning: bytes
    prompt: Prompt
    cause: Cause
    parent_id: str | None = None
    inherited: int = 0


@dataclass(frozen=True, slots=True)
class _Point:
    """A delivered call, by the digest of its conversation and reply."""

    call_id: str
    parent_id: str | None
    digest: bytes
    tools: bytes
    recorded: Recorded

    @property
    def tokens(self) -> int:
        """Of the prompt and the completion."""
        return len(self.recorded.prompt.ids) + len(self.recorded.completion_ids)


class Sessions:
    """The sessions of one rollout."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._points: dict[str, _Point] = {}
        self._by_digest: dict[bytes, list[_Point]] = {}
        self._beginnings: set[bytes] = set()
        self._last: tuple[tuple[Message, ...], list[bytes]] = ((), chain(()))

    def open(self, conversation: Conversation) -> Opening:
        """The prompt for ``conversation``, continuing a recorded call where that is possible.

        Raises:
            InvalidRequest: the model's template cannot show this conversation.
        """
        digests = self._chain(conversation.messages)
        beginning = _beginning(conversation, digests)
        point, longest = self._longest(conversation, digests, digest_tools(conversation.tools))
        if point is None:
            cause = Cause.HISTORY_REWRITTEN if beginning in self._beginnings else Cause.NEW_SESSION
            if longest is not None:
                cause = Cause.TOOLS_CHANGED
            return Opening(conversation, digests[-1], beginning, self._renderer.render(conversation), cause)
        known = point.recorded.conversation
        shown = known.followed_by(conversation.messages[len(known.messages) :])
        extended = self._renderer.extend(point.recorded, shown)
        parent = self._cause(point, longest), point.call_id, point.tokens
        if not isinstance(extended, Cause):
            return Opening(shown, digests[-1], beginning, extended, *parent)
        prompt = self._renderer.render(conversation)
        if _begins(prompt, point.recorded):
            return Opening(conversation, digests[-1], beginning, prompt, *parent)
        return Opening(conversation, digests[-1], beginning, prompt, extended)

    def add(self, call_id: str, opening: Opening, reply: Message, completion_ids: IntArray, *, whole: bool) -> None:
        """Make a delivered call one that later calls may continue."""
        recorded = Recorded(opening.conversation.followed_by([reply]), opening.prompt, completion_ids, whole)
        tools = digest_tools(opening.conversation.tools)
        point = _Point(call_id, opening.parent_id, link(opening.digest, reply), tools, recorded)
        self._points[call_id] = point
        self._by_digest.setdefault(point.digest, []).append(point)
        self._beginnings.add(opening.beginning)

    def messages_of(self, call_id: str) -> tuple[Message, ...] | None:
        """The conversation of a delivered call, its reply included; None for any other."""
        point = self._points.get(call_id)
        return None if point is None else point.recorded.conversation.messages

    def forget(self, call_id: str) -> None:
        """Take back ``add``: the reply did not reach the harness."""
        point = self._points.pop(call_id, None)
        if point is not None:
            self._by_digest[point.digest].remove(point)

    def _chain(self, messages: tuple[Message, ...]) -> list[bytes]:
        """``chain(messages)``, digesting only what the conversation before did not begin with."""
        before, known = self._last
        pairs = enumerate(zip(before, messages, strict=False))
        same = next((i for i, (old, new) in pairs if old != new), min(len(before), len(messages)))
        digests = chain(messages, known[: same + 1])
        self._last = messages, digests
        return digests

    def _longest(
        self, conversation: Conversation, digests: list[bytes], tools: bytes
    ) -> tuple[_Point | None, _Point | None]:
        """The longest point with the same tools, and the longest with any."""
        longest: _Point | None = None
        for digest in reversed(digests[1:]):
            for point in reversed(self._by_digest.get(digest, ())):
                if not same_reasoning(point.recorded.conversation.messages, conversation.messages):
                    continue
                longest = longest or point
                if point.tools == tools:
                    return point, longest
        return None, longest

    def _cause(self, point: _Point, longest: _Point | None) -> Cause:
        if longest is not point:
            return Cause.TOOLS_CHANGED
        # A copy: a large request is opened beside the loop, where calls are added meanwhile.
        gone_on = any(other.parent_id == point.call_id for other in tuple(self._points.values()))
        return Cause.HISTORY_REWRITTEN if gone_on else Cause.EXTENDED


def _beginning(conversation: Conversation, digests: list[bytes]) -> bytes:
    first = next((i for i, message in enumerate(conversation.messages) if message.role == "user"), -1)
    return digests[first + 1] if first >= 0 else digests[-1]


def _begins(prompt: Prompt, recorded: Recorded) -> bool:
    """Whether a fresh rendering happens to give the recorded tokens."""
    told = np.concatenate([recorded.prompt.ids, recorded.completion_ids])
    return recorded.whole and np.array_equal(prompt.ids[: len(told)], told)
