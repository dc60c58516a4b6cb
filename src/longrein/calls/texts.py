"""Sessions of bare text: a completion that goes on from an earlier one's text goes on from its tokens."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from longrein.calls.conversation import Conversation, Message
from longrein.calls.fields import refused
from longrein.calls.rendering import Prompt, Renderer, TextMark
from longrein.calls.sessions import Opening
from longrein.records import Cause, IntArray


@dataclass(frozen=True, slots=True)
class _Point:
    """A call's text, prompt and reply, and its tokens.

    Attributes:
        whole: False where the call has tokens that the text lacks: a stop token, or what came after a stop text.
    """

    call_id: str
    parent_id: str | None
    mark: TextMark
    ids: IntArray
    whole: bool


class Texts:
    """The sessions of one rollout's completions."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._points: dict[str, _Point] = {}
        # Some tokenizers put a space in front of every text: what they make of a rest does not go on from anything.
        letters = [renderer.encode(letter, begin=False) for letter in "ab"]
        self._joins = renderer.decode(np.concatenate(letters).tolist()) == "ab"

    def open(self, given: str | tuple[int, ...]) -> Opening:
        """The prompt for a text, or for token ids, which are taken as they are.

        Raises:
            InvalidRequest: an id that is no token of the model.
        """
        if isinstance(given, str):
            text, ids, point = given, *self._continued(given)
        else:
            ids = self._checked(given)
            text = self._renderer.decode(given)
            point = max(self._begun_by(ids), key=lambda point: len(point.ids), default=None)
        told = Conversation((Message("user", text),))
        return Opening(told, b"", b"", Prompt(ids, TextMark.of(text)), *self._parent(point))

    def add(self, call_id: str, opening: Opening, said: str, completion_ids: IntArray, *, whole: bool) -> None:
        """Make a delivered call one that later ones may continue; ``whole`` as for ``Recorded``."""
        text = opening.conversation.messages[0].content
        ids = opening.prompt.ids
        stopped = len(completion_ids) > 0 and int(completion_ids[-1]) in self._renderer.stop_ids
        if whole:
            text, ids = text + said, np.concatenate([ids, completion_ids[:-1] if stopped else completion_ids])
        point = _Point(call_id, opening.parent_id, TextMark.of(text), ids, whole and not stopped)
        self._points[call_id] = point

    def forget(self, call_id: str) -> None:
        """Take back ``add``: the reply did not reach the harness."""
        self._points.pop(call_id, None)

    def _continued(self, text: str) -> tuple[IntArray, _Point | None]:
        begun = (point for point in self._known() if point.mark.begins(text))
        point = max(begun, key=lambda point: point.mark.length, default=None)
        if point is None:
            return self._renderer.encode(text, begin=True), None
        if not self._joins:
            return self._renderer.encode(text, begin=True), replace(point, whole=False)
        rest = self._renderer.encode(text[point.mark.length :], begin=False)
        return np.concatenate([point.ids, rest]), point

    def _begun_by(self, ids: IntArray) -> Iterator[_Point]:
        return (point for point in self._known() if np.array_equal(ids[: len(point.ids)], point.ids))

    def _parent(self, point: _Point | None) -> tuple[Cause, str | None, int]:
        if point is None:
            return Cause.NEW_SESSION, None, 0
        if not point.whole:
            return Cause.TEXT_CHANGED, None, 0
        gone_on = any(other.parent_id == point.call_id for other in self._known())
        return Cause.HISTORY_REWRITTEN if gone_on else Cause.EXTENDED, point.call_id, len(point.ids)

    def _known(self) -> tuple[_Point, ...]:
        # A copy: a large request is opened beside the loop, where calls are added meanwhile.
        return tuple(self._points.values())

    def _checked(self, given: tuple[int, ...]) -> IntArray:
        size = self._renderer.vocabulary
        for i in given:
            if not 0 <= i < size:
                raise refused("prompt", i, f"expected token ids of the model, 0 to {size - 1}")
        return np.asarray(given, dtype=np.int32)
