"""What makes a run that run: the digests that a resumed run must find unchanged."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from longrein.config import Config
from longrein.records import Task

# These may change between a run and its resumption: they move work around or extend it, never alter what is learned.
FREE_TRAINING_KEYS = {
    "steps",
    "eval_every",
    "save_every",
    "keep_checkpoints",
    "collect_s",
    "straggler_s",
    "update_s",
    "publish_s",
    "mismatch",
    "nothing_learned",
}

FREE_LEARNER_KEYS = {"kind", "ranks", "micro_batch_tokens", "forest", "activation_checkpointing", "threads"}

RENDERER_KEYS = ("renderer", "tool_format", "keep_thinking")


def identity(config: Config, model: Path, tasks: Sequence[Task], held_out: Sequence[Task]) -> dict[str, str]:
    """Name → digest or value, each named so that a difference can be explained."""
    sections = config.model_dump(mode="json")
    training = {key: value for key, value in sections["training"].items() if key not in FREE_TRAINING_KEYS}
    learner = {key: value for key, value in sections["learner"].items() if key not in FREE_LEARNER_KEYS}
    demonstrations = config.model.demonstrations
    return {
        "model": directory_digest(model),
        "model.demonstrations": file_digest(demonstrations) if demonstrations else "none",
        "model.renderer": _digest({key: sections["model"][key] for key in RENDERER_KEYS}),
        "tasks.train": _digest([(task.task_id, task.digest) for task in tasks]),
        "tasks.evaluate": _digest([(task.task_id, task.digest) for task in held_out]),
        "tasks.reward": _digest(sections["tasks"]["reward"]),
        "harness": _digest(sections["harness"]),
        "harness.files": _digest([file_digest(file) for _, file in sorted(config.harness.files.items())]),
        "sampling": _digest(sections["sampling"]),
        "algorithm": _digest(sections["algorithm"]),
        "learner": _digest(learner),
        "training": _digest(training),
        "training.seed": str(config.training.seed),
    }


def explained(different: Sequence[str], recorded: Mapping[str, Any], config: Config) -> list[str]:
    """Each difference between two identities: the keys that changed, with both values, or what it is that changed.

    Args:
        different: names of ``identity``.
        recorded: the earlier configuration, as it was written; whatever of it could be read.
    """
    was, now = flat(recorded), flat(config.model_dump(mode="json"))
    changed = [key for key in sorted(was | now) if was.get(key) != now.get(key)]
    lines = []
    for name in different:
        keys = [key for key in changed if _belongs(key, name)]
        lines += [f"{key} was {was.get(key)!r}, now {now.get(key)!r}" for key in keys] or [
            f"{name}: its files have changed"
        ]
    return list(dict.fromkeys(lines))


def _belongs(key: str, name: str) -> bool:
    """Whether a configuration key has a part in what ``name`` identifies."""
    section, _, rest = key.partition(".")
    part = rest.split(".")[0]
    if name == "model":
        return section == "model" and part in ("path", "revision")
    if name == "model.renderer":
        return section == "model" and part in RENDERER_KEYS
    if name == "training":
        return section == "training" and part not in FREE_TRAINING_KEYS
    if name == "learner":
        return section == "learner" and part not in FREE_LEARNER_KEYS
    return name in (section, f"{section}.{part}")


def flat(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Every value under its dotted key."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{above}{key}"
        found |= flat(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return found


def file_digest(file: Path) -> str:
    """sha256 of a file's bytes."""
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def directory_digest(directory: Path) -> str:
    """sha256 over the names and contents of a model directory's files."""
    total = hashlib.sha256()
    for file in sorted(path for path in directory.iterdir() if path.is_file()):
        total.update(f"{file.name}\0{file_digest(file)}\n".encode())
    return total.hexdigest()


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
