"""A catalog pins tasks: for each its id, revision, directory, digest and reward profile.

Invariant: a task whose files are not what was pinned is refused, never used.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from longrein.agents.tasks import Network, load_task
from longrein.config import RewardSection
from longrein.errors import DigestMismatch, TaskError
from longrein.records import RewardProfile, Task


class Entry(BaseModel):
    """One pinned task. ``path`` is relative to the catalog file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    id: str = Field(min_length=1)
    revision: str | None = None
    path: str = Field(min_length=1)
    digest: str = Field(pattern=r"^sha256:[0-9a-f]{64}$")
    reward: RewardSection | None = None


def load_catalog(path: Path, profile: RewardProfile, network: Network = "gateway") -> tuple[Task, ...]:
    """The tasks of a catalog file, verified, or of a directory of task directories, pinned on the spot by name.

    Args:
        profile: reward profile of tasks whose entry has none.
        network: what the runner gives (``runner.network``).

    Raises:
        TaskError: nothing there, no tasks, an id given twice, or a task that cannot be used.
        DigestMismatch: a task is not what the catalog pinned.
    """
    if path.is_dir():
        tasks = _load_directory(path, profile, network)
    elif path.exists():
        tasks = tuple(_load_entry(path, entry, profile, network) for entry in _read_entries(path))
    else:
        raise TaskError(f"{path}: does not exist. Give a directory of task directories, or a catalog file.")
    if not tasks:
        raise TaskError(f"{path}: holds no tasks. Give a directory of task directories, or a catalog file.")
    seen: set[str] = set()
    for task in tasks:
        if task.task_id in seen:
            raise TaskError(f"{path}: the id {task.task_id!r} is given twice. Ids must be unique within a catalog.")
        seen.add(task.task_id)
    return tasks


def write_catalog(tasks: Sequence[Task], file: Path) -> None:
    """Write a catalog that pins ``tasks`` as they were loaded. The file appears whole or not at all.

    Directories below the file's own are written relative to it, so that both can be moved together.
    """
    tree = {"tasks": [_entry(task, file.absolute().parent) for task in tasks]}
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    aside.write_text(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True), encoding="utf-8")
    aside.replace(file)


def _load_directory(path: Path, profile: RewardProfile, network: Network) -> tuple[Task, ...]:
    if (path / "task.toml").exists():
        raise TaskError(f"{path}: is itself a task. Give the directory that holds the task directories.")
    folders = sorted(folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith("."))
    return tuple(load_task(folder, profile, network) for folder in folders)


def _load_entry(file: Path, entry: Entry, profile: RewardProfile, network: Network) -> Task:
    if entry.reward is not None:
        low, high = entry.reward.raw_range
        profile = RewardProfile(entry.reward.key, entry.reward.scale, entry.reward.offset, (low, high))
    task = load_task(Path(os.path.normpath(file.absolute().parent / entry.path)), profile, network)
    if task.digest != entry.digest:
        raise DigestMismatch(
            f"{file}: task {entry.id!r} has changed since it was pinned. Pinned: {entry.digest}; found in {task.path}: "
            f"{task.digest}. Restore the task's files, or, if the change is meant, write the digest that was found "
            "into the catalog."
        )
    return replace(task, task_id=entry.id, revision=entry.revision)


def _read_entries(file: Path) -> tuple[Entry, ...]:
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise TaskError(f"{file}: cannot be read ({error.strerror}).") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise TaskError(f"{file}: is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict) or list(tree) != ["tasks"] or not isinstance(tree["tasks"], list):
        raise TaskError(f"{file}: is not a catalog; expected one key 'tasks' with a list of {{id, path, digest}}.")
    return tuple(_parse_entry(file, number, item) for number, item in enumerate(tree["tasks"]))


def _parse_entry(file: Path, number: int, item: object) -> Entry:
    try:
        return Entry.model_validate(item)
    except ValidationError as error:
        detail = error.errors()[0]
        key = ".".join(["tasks", str(number), *map(str, detail["loc"])])
        raise TaskError(f"{file}: key {key!r} was given {detail['input']!r}: {detail['msg']}.") from None


def _entry(task: Task, base: Path) -> dict[str, Any]:
    within = task.path.is_relative_to(base)
    profile = task.profile
    return {
        "id": task.task_id,
        **({"revision": task.revision} if task.revision is not None else {}),
        "path": task.path.relative_to(base).as_posix() if within else str(task.path),
        "digest": task.digest,
        "reward": {
            "key": profile.key,
            "scale": profile.scale,
            "offset": profile.offset,
            "raw_range": list(profile.raw_range),
        },
    }
