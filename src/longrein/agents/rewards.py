"""The verifier's number, read as evidence: one finite number in range, with the bytes it came from, or an error.

The files were written by a program that may have been led astray by the harness it judges, so nothing about them is
trusted: not their kind, not their size, not their syntax.
"""

import errno
import hashlib
import json
import math
import os
import re
import stat
from pathlib import Path
from typing import Any, NoReturn

from longrein.errors import RewardError
from longrein.records import Receipt, RewardProfile

FILES = ("reward.json", "reward.txt")
LARGEST = 64 * 1024
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


def read_reward(verifier_dir: Path, profile: RewardProfile) -> Receipt:
    """Read ``reward.json`` (a flat map of numbers, of which ``profile.key`` counts) or ``reward.txt`` (one number).

    Where both are there they must agree, and ``reward.json`` is the receipt.

    Raises:
        RewardError: no file; not a regular file of at most 64 KiB; not one finite number in ``profile.raw_range``;
            or two files that disagree.
    """
    in_json = _read(verifier_dir / "reward.json")
    in_text = _read(verifier_dir / "reward.txt")
    if in_json is None and in_text is None:
        raise RewardError(
            f"reward missing: neither reward.json nor reward.txt is in {verifier_dir}. tests/test.sh must write one "
            "to /logs/verifier, whatever happens in it."
        )
    raws = {}
    if in_json is not None:
        raws["reward.json"] = _from_json(verifier_dir / "reward.json", in_json, profile.key)
    if in_text is not None:
        raws["reward.txt"] = _from_text(verifier_dir / "reward.txt", in_text)
    if len(set(raws.values())) > 1:
        raise RewardError(
            f"{verifier_dir}: reward.json says {raws['reward.json']:g} and reward.txt says {raws['reward.txt']:g}. "
            "Write one of them, or the same number to both."
        )
    name, raw = next(iter(raws.items()))
    content = in_json if in_json is not None else in_text
    assert content is not None
    return Receipt(
        file=name,
        content=content.decode(),
        sha256=hashlib.sha256(content).hexdigest(),
        raw=raw,
        reward=_scaled(verifier_dir / name, raw, profile),
    )


def _read(file: Path) -> bytes | None:
    """The bytes of a small regular file; None if there is none. Opening never blocks and never follows a link."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise RewardError(f"{file}: is a symbolic link; a reward must be a regular file.") from None
        raise RewardError(f"{file}: cannot be read ({error.strerror}).") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise RewardError(f"{file}: is not a regular file.")
        # Below the limit one read is enough for a regular file; what comes beyond it is refused anyway.
        content = os.read(descriptor, LARGEST + 1)
    finally:
        os.close(descriptor)
    if len(content) > LARGEST:
        raise RewardError(f"{file}: is larger than {LARGEST // 1024} KiB; a reward is one small file.")
    return content


def _from_json(file: Path, content: bytes, key: str) -> float:
    try:
        tree = json.loads(_text(file, content), object_pairs_hook=_unique, parse_constant=_no_constant)
    except RewardError as error:
        raise RewardError(f"{file}: {error}") from None
    except RecursionError:
        raise RewardError(f"{file}: is nested too deeply; expected a flat map such as {{{key!r}: 0.5}}.") from None
    except ValueError as error:
        raise RewardError(
            f"{file}: is not valid JSON ({error}); expected a flat map such as {{{key!r}: 0.5}}."
        ) from None
    if not isinstance(tree, dict):
        raise RewardError(f"{file}: holds {_short(tree)}; expected a flat map such as {{{key!r}: 0.5}}.")
    numbers = {name: _number(f"{file}: key {name!r}", value) for name, value in tree.items()}
    if key not in numbers:
        raise RewardError(
            f"{file}: has no key {key!r}, only {', '.join(map(repr, numbers)) or 'none at all'}. "
            "Write it, or name another in tasks.reward.key."
        )
    return numbers[key]


def _from_text(file: Path, content: bytes) -> float:
    text = _text(file, content).strip()
    if not NUMBER.fullmatch(text):
        raise RewardError(f"{file}: holds {_short(text)}; expected one number such as 0.5.")
    return _number(str(file), float(text))


def _text(file: Path, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise RewardError(f"{file}: is not UTF-8 text.") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise RewardError(f"key {twice!r} is given twice.")
    return tree


def _no_constant(name: str) -> NoReturn:
    raise RewardError(f"holds {name}; a reward must be a finite number.")


def _number(where: str, value: object) -> float:
    """``value`` as a finite float; booleans are not numbers here, though Python counts them as such."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RewardError(f"{where} holds {_short(value)}; expected a number.")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RewardError(f"{where} holds a number too large to be finite.")
    return number


def _scaled(file: Path, raw: float, profile: RewardProfile) -> float:
    low, high = profile.raw_range
    if not low <= raw <= high:
        raise RewardError(
            f"{file}: the reward {raw:g} is outside {low:g} to {high:g}. Correct tests/test.sh, or widen "
            "tasks.reward.raw_range."
        )
    reward = profile.scale * raw + profile.offset
    if not math.isfinite(reward):
        raise RewardError(f"{file}: {profile.scale:g} · {raw:g} + {profile.offset:g} is not finite; mend tasks.reward.")
    return reward


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
