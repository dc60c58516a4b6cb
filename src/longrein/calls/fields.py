"""Reading fields of a request body: each either is what it must be, or is refused by name."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from longrein.errors import InvalidRequest


def refused(field: str, given: object, why: str) -> InvalidRequest:
    """The error for one field: what was given, and what is expected or supported."""
    try:
        text = repr(given)
    except RecursionError:
        text = type(given).__name__
    return InvalidRequest(f"{field}: {text if len(text) <= 80 else text[:77] + '...'} was given; {why}.", param=field)


def name_of(where: str, field: str) -> str:
    """``where.field``, or the field alone at the top of the body."""
    return f"{where}.{field}" if where else field


def flag(body: Mapping[str, Any], field: str, where: str = "") -> bool:
    """A boolean; absent and null are False."""
    value = body.get(field)
    if value is not None and not isinstance(value, bool):
        raise refused(name_of(where, field), value, "expected true or false")
    return bool(value)


def text(body: Mapping[str, Any], field: str, where: str = "") -> str | None:
    """A text, or None where it is absent or null."""
    value = body.get(field)
    if value is not None and not isinstance(value, str):
        raise refused(name_of(where, field), value, "expected a text")
    return value


def required_text(body: Mapping[str, Any], field: str, where: str = "") -> str:
    """A text that is there and not empty."""
    value = body.get(field)
    if not isinstance(value, str) or not value:
        raise refused(name_of(where, field), value, "expected a text that is not empty")
    return value


def count(body: Mapping[str, Any], field: str, where: str = "") -> int | None:
    """A whole number of at least 1, or None where it is absent or null."""
    value = body.get(field)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise refused(name_of(where, field), value, "expected a whole number of at least 1")
    return value


def mapping(body: Mapping[str, Any], field: str, where: str = "") -> Mapping[str, Any]:
    """An object; absent and null are an empty one."""
    value = body.get(field)
    if value is not None and not isinstance(value, Mapping):
        raise refused(name_of(where, field), value, "expected an object")
    return value or {}


def listed(body: Mapping[str, Any], field: str, where: str = "") -> list[Any]:
    """A list; absent and null are an empty one."""
    value = body.get(field)
    if value is not None and not isinstance(value, list):
        raise refused(name_of(where, field), value, "expected a list")
    return value or []


def texts(given: object, field: str, most: int = 16) -> tuple[str, ...]:
    """Stop texts: one, or a list of them; null is none."""
    found = [given] if isinstance(given, str) else [] if given is None else given
    if not isinstance(found, list) or len(found) > most or not all(isinstance(one, str) and one for one in found):
        raise refused(field, given, f"expected a text, or a list of up to {most} texts, none of them empty")
    return tuple(found)


def folded(parts: Sequence[str]) -> str:
    """Blocks of text as one text: the same whichever way a harness cuts it from one turn to the next."""
    return "\n".join(parts)


def as_json(value: object) -> bytes:
    """Plain ASCII: some clients end a line of a stream at U+2028 or U+0085 inside a text, and UTF-8 cannot hold the
    half of a character that a model may write."""
    return json.dumps(value).encode()
