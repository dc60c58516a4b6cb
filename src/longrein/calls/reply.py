"""What a completion says, read out of its tokens, once it is whole or while it grows.

A tool call that cannot be read is text as the model wrote it: nothing is repaired, and nothing is sampled again. What
was sent of a growing reply is what the finished reply begins with.
"""

import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from longrein.calls.conversation import Message, Tool, ToolCall
from longrein.calls.dialect import Delta
from longrein.calls.hermes import arguments_text

if TYPE_CHECKING:
    from longrein.calls.rendering import Renderer

# A tag that may still be growing at the end of a text is no longer than this.
LONGEST_TAG = 32

# A token that is more than text (a tag, a call, an end, a piece of a character) shows one of these.
MARKUP = frozenset("<>[]{}|\ufffd")


def reply_message(
    parsed: Any, ids: Sequence[int], decode: Callable[[Sequence[int]], str], *, offered: bool, final: bool
) -> Message:
    """An assistant turn from the library's ``ParsedResponse``; ``offered`` says whether there were tools to call."""
    calls, malformed = [], []
    for call in parsed.tool_calls:
        if offered and call.name and isinstance(call.name, str) and call.status in ("ok", "unknown_tool"):
            calls.append(ToolCall("", call.name, arguments_text({} if call.arguments is None else call.arguments)))
        elif final:
            malformed.append(call.raw if call.token_span is None else decode(ids[slice(*call.token_span)]))
    content = parsed.content.rstrip("\n") if parsed.tool_calls else parsed.content
    content = "\n".join(part for part in (content, *malformed) if part)
    reasoning = (parsed.reasoning_content or "").strip() or None
    return Message("assistant", content, tuple(calls), reasoning=reasoning, broken_calls=len(malformed))


class GrowingReply:
    """A completion as it is sampled.

    Attributes:
        cut: whether a stop text has appeared.
        stopped_by: the stop text that ended the reply's content, once it is finished.

    Args:
        live: whether deltas are wanted; without, the reply is read once, when it is whole.
        plain: whether the completion is a text that goes on: there are no calls and no thinking in it.
        stop: texts that end the reply.
        pace_s: least seconds between two deltas; no harness reads faster.
    """

    def __init__(
        self,
        renderer: "Renderer",
        prompt_ids: list[int],
        tools: Sequence[Tool],
        stop: Sequence[str],
        *,
        live: bool,
        plain: bool = False,
        pace_s: float = 0.02,
    ) -> None:
        self._renderer = renderer
        self._prompt_ids = prompt_ids
        self._tools = tools
        self._stop = tuple(stop)
        self._live = live and (plain or renderer.incremental)
        self._plain = plain
        self._ids: list[int] = []
        self._read = 0
        self._read_at = -math.inf
        self._pace_s = pace_s
        self._sent = Message("assistant", "", reasoning="")
        self._open: Message | None = None
        self.cut = False
        self.stopped_by: str | None = None

    def grow(self, ids: Sequence[int]) -> Delta | None:
        """Take newly sampled tokens; what can be told of the reply beyond doubt, if that is more than before.

        Sets ``cut`` when a stop text has appeared.
        """
        for i in ids:
            self._ids.append(i)
            self.cut = bool(self._stop) and self._has_stop()
            if self.cut:
                break
        if not self._live or self.cut or not self._due():
            return None
        message = self._lengthened() or self._parse(final=False)
        self._open = message if message is self._open or self._is_open(message) else None
        self._read, self._read_at = len(self._ids), time.monotonic()
        doubtless = message.content.rstrip("\ufffd") if message.tool_calls else self._beyond_doubt(message.content)
        message = replace(message, content=doubtless)
        if not (message.content or message.tool_calls):
            message = replace(message, reasoning=_settled(message.reasoning or ""))
        return self._delta(message)

    def finish(self) -> tuple[Message, Delta | None]:
        """The whole reply, and what of it was not told yet."""
        message = self._parse(final=True)
        if self.cut:
            message = self._cut_at_stop(message)
        known = self._sent.tool_calls
        fresh = [replace(call, call_id=f"call_{secrets.token_hex(12)}") for call in message.tool_calls[len(known) :]]
        message = replace(message, tool_calls=(*known, *fresh))
        if not message.content.startswith(self._sent.content):
            message = replace(message, content=self._sent.content)
        if not (message.reasoning or "").startswith(self._sent.reasoning or ""):
            message = replace(message, reasoning=self._sent.reasoning)
        return message, self._delta(message)

    def _due(self) -> bool:
        # Reading the whole text each time would cost the square of its length; a 32nd more at a time costs little.
        enough = len(self._ids) - self._read >= max(1, len(self._ids) // 32)
        return enough and time.monotonic() - self._read_at >= self._pace_s

    def _lengthened(self) -> Message | None:
        """The last reading with the text that has come since, where reading all of it again would give no more."""
        if self._open is None:
            return None
        # Behind the last token read, for some tokenizers begin a text otherwise than they go on with it.
        before = self._renderer.decode(self._ids[self._read - 1 : self._read])
        text = self._renderer.decode(self._ids[self._read - 1 :])
        added = text[len(before) :]
        if not text.startswith(before) or not MARKUP.isdisjoint(added):
            return None
        self._open = replace(self._open, content=self._open.content + added)
        return self._open

    def _is_open(self, message: Message) -> bool:
        """Whether its content is all that was said, apart from thinking: plain text can then only lengthen it."""
        if self._plain or message.tool_calls or not message.content:
            return False
        said = self._renderer.decode(self._ids)
        if message.reasoning is not None:
            said = said.partition("</think>")[2]
        return said.lstrip() == message.content.lstrip()

    def _parse(self, *, final: bool) -> Message:
        if self._plain:
            return self._as_text()
        try:
            return self._renderer.parse(self._ids, self._prompt_ids, self._tools, final=final)
        except (RecursionError, ValueError):
            # A call nested without end, or a number of thousands of digits, as a model that repeats itself writes them,
            # cannot be read.
            return self._as_text()

    def _as_text(self) -> Message:
        return Message("assistant", self._renderer.decode(self._ids[:-1] if self._ended() else self._ids))

    def _ended(self) -> bool:
        return bool(self._ids) and self._ids[-1] in self._renderer.stop_ids

    def _delta(self, message: Message) -> Delta | None:
        sent = self._sent
        content = message.content.removeprefix(sent.content) if message.content.startswith(sent.content) else ""
        thought = message.reasoning or ""
        told = sent.reasoning or ""
        reasoning = thought[len(told) :] if thought.startswith(told) else ""
        first = len(sent.tool_calls)
        calls = tuple(
            call if call.call_id else replace(call, call_id=f"call_{secrets.token_hex(12)}")
            for call in message.tool_calls[first:]
        )
        if not (content or reasoning or calls):
            return None
        self._sent = Message(
            "assistant", sent.content + content, (*sent.tool_calls, *calls), reasoning=told + reasoning
        )
        return Delta(content, reasoning, calls, first)

    def _has_stop(self) -> bool:
        # The token that ends every reply is no text of it, though some harnesses name it among their stop texts.
        if self._ended():
            return False
        # Every token but a piece of a character adds at least one, so this many reach back far enough.
        window = self._ids[-(1 + max(len(text.encode()) for text in self._stop) + 4) :]
        shown = self._renderer.decode(window)
        return any(text in shown for text in self._stop)

    def _cut_at_stop(self, message: Message) -> Message:
        found = [(place, text) for text in self._stop if (place := message.content.find(text)) >= 0]
        if not found:
            return message
        first, self.stopped_by = min(found)
        return replace(message, content=message.content[:first])

    def _beyond_doubt(self, content: str) -> str:
        content = _settled(content)
        for text in self._stop:
            for size in range(min(len(text) - 1, len(content)), 0, -1):
                if content.endswith(text[:size]):
                    content = content[:-size]
                    break
        return content


def _settled(text: str) -> str:
    """Without an unfinished character or tag at the end, nor white space that may turn out to be dropped."""
    text = text.rstrip("\ufffd")
    opened = text.rfind("<", max(0, len(text) - LONGEST_TAG))
    if opened >= 0 and ">" not in text[opened:]:
        text = text[:opened]
    return text.rstrip()
