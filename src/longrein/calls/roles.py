# ruff: noqa: RUF001 (DeepSeek writes its tokens with a full-width bar)
"""Which sampled tokens say which tool is called, which say the values of its arguments, and which say neither.

The parser has found the calls; here the same names and values are found where the model wrote them, as characters of
the completion's text, and each token is laid over the characters it decodes to. Nothing is tokenised again. A place
counts only if the parser reads it: without the name's tokens the call must be gone from the reply. So a call that is
quoted, thought of or malformed has no role, and what cannot be placed beyond doubt is not guessed.

The action is the tool's name. An argument is a value as it was written: a string without its quotes, any other JSON
value with all its punctuation. All else (text, thinking, tags, argument names, JSON between values) is other. A token
over several roles takes the one that holds most bytes of its characters; of equals one that is not other (``=b`` of
``<function=bash>`` decides which tool it is), then the first.
"""

import functools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longrein.calls.conversation import Tool, ToolCall
from longrein.calls.hermes import arguments_text
from longrein.calls.package import MISFITS
from longrein.calls.rendering import Renderer
from longrein.records import Role, RoleArray

Span = tuple[int, int]
"""Characters of a text, end excluded."""

Spans = tuple[NDArray[np.int64], NDArray[np.int64]]
"""The characters of each token: (C,) where they start and (C,) where they end."""

# A call is one JSON object that holds name and arguments (Hermes, Llama 3, Inkling), or a head that names the tool and
# arguments behind it. What stands before and behind the name in a head:
HEADS = (
    (r"<function=", r">"),  # Qwen3.5, Nemotron
    (r"<tool_call>\s*", r"\s*(?=<arg_key>|</tool_call>)"),  # GLM, Laguna
    (r'<(?:｜DSML｜)?invoke name="', r'">'),  # DeepSeek V4, MiniMax
    (r"\bto=functions\.", r"(?=[\s<])(?:(?!<\|message\|>).){0,99}?<\|message\|>"),  # gpt-oss
    (r"<\|tool_call_begin\|>\s*(?:[^.:<\s]*\.)?", r"(?::\d+)?\s*<\|tool_call_argument_begin\|>"),  # Kimi
    (r"<｜tool▁sep｜>\s*", r"\s*\n\s*(?:```(?:json)?)?"),  # DeepSeek V3
)

# Behind a head, arguments are one JSON value, or pairs in tags. How a pair opens, and how it closes:
PAIRS = (
    (re.compile(r"\s*<parameter=([^>]+)>"), "</parameter>"),
    (re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>", re.DOTALL), "</arg_value>"),
    (re.compile(r'\s*<parameter name="(.*?)">', re.DOTALL), "</parameter>"),
    (re.compile(r'\s*<｜DSML｜parameter name="(.*?)" string="(?:true|false)">', re.DOTALL), "</｜DSML｜parameter>"),
)

# Under which name an object holds its arguments.
ARGUMENTS = ("arguments", "parameters", "args")

OBJECT = re.compile(r'\{\s*"')
SPACE = re.compile(r"\s*")
DECODER = json.JSONDecoder()

# What stands for a piece of a character in a decoded text.
LOST = "\ufffd"

# Tokens that one character may be in pieces of; a run of more is no text.
MOST_PIECES = 64

# Places that may read like the reply's calls before they are given up as too many to try.
MOST_PLACES = 32


@dataclass(frozen=True, slots=True)
class Reading:
    """The roles of a completion's tokens.

    Attributes:
        roles: (C,) uint8, a ``Role`` for each token.
        unknown: why the roles are not known, all of them OTHER then; empty where they are.
    """

    roles: RoleArray
    unknown: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a call is written in a text: all of it, its name, and each value of its arguments."""

    call: ToolCall
    whole: Span
    name: Span
    values: tuple[Span, ...]


class _Unknown(Exception):
    """Roles cannot be told; the message says why."""


class RoleReader:
    """Reads roles for one renderer. It remembers how tokens decode, so that a token costs one look-up.

    Args:
        renderer: whose replies are read; only its text of tokens and its parser are used.
    """

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        # Some tokenizers begin a text otherwise than they go on with it.
        self._anchor = renderer.encode("a", begin=False).tolist()[-1:]
        self._anchor_text = renderer.decode(self._anchor)
        self._pieces: dict[int, str] = {}

    def read(
        self, ids: Sequence[int], prompt_ids: list[int], tools: Sequence[Tool], calls: Sequence[ToolCall]
    ) -> Reading:
        """The roles of a completion.

        Args:
            ids: the C tokens that were sampled, the stop token included.
            prompt_ids: what they were sampled behind.
            tools: what the model was offered.
            calls: the tool calls of the reply that the renderer read out of ``ids``.
        """
        none = np.full(len(ids), Role.OTHER, np.uint8)
        if not calls:
            return Reading(none)

        def called(other: list[int]) -> Sequence[ToolCall]:
            return self._renderer.parse(other, prompt_ids, tools).tool_calls

        try:
            text = self._said(ids)
            spans = self._spans(ids, text)
            found = _found(text, calls, _Trial(called, ids, spans))
        except _Unknown as why:
            return Reading(none, str(why))
        except RecursionError:
            return Reading(none, f"arguments are nested too deep: {_named(calls)}")
        return Reading(_laid_over(text, spans, found))

    def _said(self, ids: Sequence[int]) -> str:
        """What tokens add to a text."""
        return self._renderer.decode([*self._anchor, *ids]).removeprefix(self._anchor_text)

    def _piece(self, token: int) -> str:
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._said([token])
        return piece

    def _spans(self, ids: Sequence[int], text: str) -> Spans:
        pieces = [self._piece(token) for token in ids]
        if "".join(pieces) == text:
            lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))
            ends = np.cumsum(lengths)
            return ends - lengths, ends
        spans = np.asarray(list(self._pieced(ids, pieces, text)), np.int64).reshape(-1, 2)
        return spans[:, 0], spans[:, 1]

    def _pieced(self, ids: Sequence[int], pieces: Sequence[str], text: str) -> Iterator[Span]:
        """Where each token stands; those that hold pieces of one character stand over all of it."""
        at = first = 0
        while first < len(ids):
            said, after = pieces[first], first + 1
            inner: list[int] = []
            while said.endswith(LOST) and after < min(len(ids), first + MOST_PIECES) and pieces[after].startswith(LOST):
                inner.append(at + len(said.rstrip(LOST)))
                after += 1
                said = self._said(ids[first:after])
            if not text.startswith(said, at):
                raise _Unknown(f"what the tokens {list(ids[first:after])} say depends on those around them")
            yield from zip([at, *inner], [*(start + 1 for start in inner), at + len(said)], strict=True)
            at, first = at + len(said), after


class _Trial:
    """A completion read again without the name of a call, to see whether the parser reads it there.

    Args:
        read: the calls in tokens.
    """

    def __init__(self, read: Callable[[list[int]], Sequence[ToolCall]], ids: Sequence[int], spans: Spans) -> None:
        self._read = read
        self._ids = ids
        self._starts, self._ends = spans

    @functools.cached_property
    def usual(self) -> Sequence[ToolCall]:
        """The calls as they are."""
        return self._read(list(self._ids))

    def stays(self, places: Sequence[Place]) -> bool:
        """Whether any of the calls at ``places`` is still read without their names."""
        said = {_key(place.call) for place in places}
        return any(_key(call) in said for call in self._nameless(places))

    def counts(self, place: Place) -> bool:
        """Whether other calls are read without the name at ``place``."""
        return not _same(self._nameless([place]), self.usual)

    def _nameless(self, places: Sequence[Place]) -> Sequence[ToolCall]:
        ids = list(self._ids)
        for place in reversed(places):
            start, end = place.name
            first = int(np.searchsorted(self._ends, start, "right"))
            after = int(np.searchsorted(self._starts, end, "left"))
            del ids[first:after]
        try:
            return self._read(ids)
        except MISFITS as error:
            raise _Unknown(f"the parser fails where a call has no name: {error!r}") from None


def _found(text: str, calls: Sequence[ToolCall], trial: _Trial) -> list[Place]:
    # A reply that was cut at a stop text may have fewer calls than its tokens.
    if not _same(trial.usual[: len(calls)], calls):
        raise _Unknown(f"the tokens do not say the reply's calls: {_named(calls)}")
    places = _places(text, calls)
    if _same([place.call for place in places], calls) and not trial.stays(places):
        return places
    if len(places) > MOST_PLACES:
        raise _Unknown(f"{len(places)} places read like the reply's calls: {_named(calls)}")
    places = [place for place in places if trial.counts(place)][: len(calls)]
    if not _same([place.call for place in places], calls):
        raise _Unknown(f"the reply's calls are not written in a known form: {_named(calls)}")
    return places


def _key(call: ToolCall) -> tuple[str, str]:
    return call.name, call.arguments


def _same(one: Sequence[ToolCall], other: Sequence[ToolCall]) -> bool:
    return [_key(call) for call in one] == [_key(call) for call in other]


def _named(calls: Sequence[ToolCall]) -> str:
    return ", ".join(call.name for call in calls)


# ---- calls in a text


def _places(text: str, calls: Sequence[ToolCall]) -> list[Place]:
    """Every place where one of ``calls`` is written, in the text's order; of nested ones the outermost."""
    objects = list(_objects(text))
    places: list[Place] = []
    for call in {_key(call): call for call in calls}.values():
        places += _in_objects(text, objects, call)
        places += _behind_heads(text, call)
    apart: list[Place] = []
    for place in sorted(places, key=lambda place: (place.whole[0], -place.whole[1])):
        if not apart or place.whole[0] >= apart[-1].whole[1]:
            apart.append(place)
    return apart


def _objects(text: str) -> Iterator[tuple[dict[str, Any], int]]:
    """Every JSON object with its place, those inside another one left out."""
    at = 0
    while (found := OBJECT.search(text, at)) is not None:
        value, end = _json(text, found.start())
        if end >= 0:
            yield value, found.start()
        at = end if end >= 0 else found.start() + 1


def _json(text: str, at: int) -> tuple[Any, int]:
    """The JSON value at ``at`` and its end, which is -1 where there is none."""
    try:
        return DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, -1


def _in_objects(text: str, objects: Sequence[tuple[dict[str, Any], int]], call: ToolCall) -> Iterator[Place]:
    for value, start in objects:
        if value.get("name") != call.name:
            continue
        key = next((key for key in ARGUMENTS if key in value and arguments_text(value[key]) == call.arguments), None)
        if key is None and (call.arguments != "{}" or not value.keys().isdisjoint(ARGUMENTS)):
            continue
        members, end = _members(text, start)
        values = () if key is None else _values(text, value[key], members[key])
        yield Place(call, (start, end), _inner(text, members["name"]), values)


def _members(text: str, at: int) -> tuple[dict[str, Span], int]:
    """Where the members of the valid JSON object at ``at`` stand, and the object's end; of equal names the last."""
    members: dict[str, Span] = {}
    at = _skip(text, at + 1)
    while text[at] != "}":
        key, at = DECODER.raw_decode(text, at)
        start = _skip(text, _skip(text, at) + 1)
        _, end = DECODER.raw_decode(text, start)
        members[key] = (start, end)
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return members, at + 1


def _values(text: str, arguments: Any, span: Span) -> tuple[Span, ...]:
    """Each value of the JSON arguments at ``span``; arguments that are no object are one value."""
    if not isinstance(arguments, dict):
        return (_inner(text, span),)
    members, _ = _members(text, span[0])
    return tuple(_inner(text, member) for member in members.values())


def _inner(text: str, span: Span) -> Span:
    """A string without its quotes."""
    start, end = span
    return (start + 1, end - 1) if text[start] == '"' else span


def _skip(text: str, at: int) -> int:
    found = SPACE.match(text, at)
    return at if found is None else found.end()


def _behind_heads(text: str, call: ToolCall) -> Iterator[Place]:
    for head in _heads(call.name):
        for found in head.finditer(text):
            read = _json_arguments(text, found.end(), call) or _tagged_arguments(text, found.end(), call)
            if read is not None:
                values, end = read
                yield Place(call, (found.start(), end), found.span(1), values)


@functools.lru_cache(maxsize=256)
def _heads(name: str) -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(f"{before}({re.escape(name)}){behind}", re.DOTALL) for before, behind in HEADS)


def _json_arguments(text: str, at: int, call: ToolCall) -> tuple[tuple[Span, ...], int] | None:
    start = _skip(text, at)
    value, end = _json(text, start)
    if end < 0 or arguments_text(value) != call.arguments:
        return None
    return _values(text, value, (start, end)), end


def _tagged_arguments(text: str, at: int, call: ToolCall) -> tuple[tuple[Span, ...], int] | None:
    try:
        known = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return None
    if not isinstance(known, dict):
        return None
    read: dict[str, Any] = {}
    spans: dict[str, Span] = {}
    while (opened := _opened(text, at)) is not None:
        key, start, close = opened
        found = _tagged_value(text, start, close, known.get(key))
        if found is None:
            return None
        read[key], spans[key], at = found
    return (tuple(spans.values()), at) if arguments_text(read) == call.arguments else None


def _opened(text: str, at: int) -> tuple[str, int, str] | None:
    """The name of the pair that opens at ``at``, where its value begins, and what closes it."""
    for tag, close in PAIRS:
        if (found := tag.match(text, at)) is not None:
            return found[1].strip(), found.end(), close
    return None


def _tagged_value(text: str, at: int, close: str, known: Any) -> tuple[Any, Span, int] | None:
    """A value in tags, where it stands, and where its pair ends; None where it does not close."""
    if isinstance(known, str):
        for start in (at, _skip(text, at)):
            end = start + len(known)
            closing = _skip(text, end)
            if text.startswith(known, start) and text.startswith(close, closing):
                return known, (start, end), closing + len(close)
    closing = text.find(close, at)
    if closing < 0:
        return None
    raw = text[at:closing]
    start = at + len(raw) - len(raw.lstrip())
    written = (start, start + len(raw.strip()))
    value, _ = _json(raw.strip(), 0)
    # A string of the JSON kind is written in quotes; what is no JSON can only be an earlier value of the same name.
    return value, _inner(text, written) if isinstance(value, str) else written, closing + len(close)


# ---- characters to tokens


def _laid_over(text: str, spans: Spans, places: Sequence[Place]) -> RoleArray:
    """(C,) uint8, the role of each token."""
    starts, ends = spans
    told = np.full(len(text) + 1, Role.OTHER, np.uint8)
    for place in places:
        told[slice(*place.name)] = Role.ACTION
        for value in place.values:
            told[slice(*value)] = Role.ARGUMENTS
    changes = np.concatenate([[0], np.cumsum(told[1:] != told[:-1])])
    roles = np.where(ends > starts, told[starts], np.uint8(Role.OTHER))
    for mixed in np.flatnonzero(changes[np.maximum(ends - 1, starts)] != changes[starts]).tolist():
        start, end = int(starts[mixed]), int(ends[mixed])
        roles[mixed] = _most(text[start:end], told[start:end])
    return roles


def _most(text: str, told: RoleArray) -> int:
    held: dict[int, int] = {}
    for character, role in zip(text, told.tolist(), strict=True):
        held[role] = held.get(role, 0) + len(character.encode("utf-8", "surrogatepass"))
    return max(held, key=lambda role: (held[role], role != Role.OTHER))
