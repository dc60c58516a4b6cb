"""Checkpoints: one directory per step, whole or not there.

A checkpoint is written aside, flushed to disk and renamed. Whatever goes wrong before the rename leaves the older ones
as they were, and ``latest`` sees only what was renamed.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from longrein.errors import LearnerError

PREFIX = "step-"
PARTIAL = ".partial"
CURSOR = "cursor.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint.

    Attributes:
        path: its directory.
        cursor: where training stood, as passed to ``save``.
    """

    path: Path
    cursor: Mapping[str, Any]


def save(directory: Path, step: int, write: Callable[[Path], None], cursor: Mapping[str, Any]) -> Path:
    """Write the checkpoint of a step, replacing one of the same step.

    Args:
        directory: holds all checkpoints; made if absent.
        step: how many steps were made.
        write: fills an empty directory.
        cursor: anything JSON holds.

    Raises:
        LearnerError: the disk is full or refuses; older checkpoints are untouched.
    """
    target = directory / f"{PREFIX}{step:06d}"
    aside = target.with_name(target.name + PARTIAL)
    try:
        _remove(aside)
        aside.mkdir(parents=True)
        write(aside)
        (aside / CURSOR).write_text(json.dumps(dict(cursor)) + "\n", encoding="utf-8")
        for path in (*aside.rglob("*"), aside):
            _flush(path)
        _remove(target)
        aside.rename(target)
        _flush(directory)
    except (OSError, RuntimeError, SafetensorError) as error:
        # torch and safetensors have errors of their own for a disk that is full.
        shutil.rmtree(aside, ignore_errors=True)
        raise LearnerError(
            f"checkpoint {target} could not be written: {error}. Older checkpoints are untouched; free some disk and "
            "run the same command again."
        ) from error
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return target


def latest(directory: Path) -> Checkpoint | None:
    """The whole checkpoint with the highest step, if there is one."""
    found = whole(directory)
    return found[-1] if found else None


def prune(directory: Path, keep: int) -> None:
    """Remove all but the last ``keep`` checkpoints, and what was left half-written."""
    for checkpoint in whole(directory)[:-keep]:
        # Renamed first: a removal that is interrupted must not leave something that looks whole.
        aside = checkpoint.path.with_name(checkpoint.path.name + PARTIAL)
        _remove(aside)
        checkpoint.path.rename(aside)
    for aside in directory.glob(f"{PREFIX}*{PARTIAL}"):
        shutil.rmtree(aside, ignore_errors=True)


def whole(directory: Path) -> list[Checkpoint]:
    """All that are whole, in order of their steps; other directories are somebody else's."""
    found = []
    for path in directory.glob(f"{PREFIX}*"):
        step = path.name.removeprefix(PREFIX)
        if step.isdecimal() and (path / CURSOR).is_file():
            found.append((int(step), path))
    return [Checkpoint(path, _cursor(path / CURSOR)) for _, path in sorted(found)]


def _cursor(file: Path) -> Mapping[str, Any]:
    try:
        cursor = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        cursor = None
    if not isinstance(cursor, dict) or not isinstance(cursor.get("step"), int):
        raise LearnerError(
            f"{file}: is damaged. Remove {file.parent} to go on from the checkpoint before it, or put it back."
        )
    return cursor


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)


def _flush(path: Path) -> None:
    """Make the system write a file or a directory to disk now."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
