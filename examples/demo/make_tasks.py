"""Writes the demo's tasks: small jobs in a shell, each judged by what the file system holds afterwards.

    python make_tasks.py            writes tasks/train and tasks/held-out beside this file

The same files come out each time. Held-out tasks are of the same kinds, with words and file names that no training
task uses.
"""

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Job:
    """One task: what to say, what is there before, and shell lines that set ``reward``."""

    instruction: str
    judge: str
    files: dict[str, str] = field(default_factory=dict)


class Names:
    """Draws words and file names, none twice within a task."""

    def __init__(self, rng: random.Random, words: str, stems: str, folders: str) -> None:
        self.words, self.stems, self.folders = words.split(), stems.split(), folders.split()
        for pool in (self.words, self.stems, self.folders):
            rng.shuffle(pool)
        self.drawn = 0

    def _next(self, pool: list[str]) -> str:
        pool.append(pool.pop(0))
        return pool[-1]

    def word(self) -> str:
        return self._next(self.words)

    def file(self) -> str:
        return f"{self._next(self.stems)}.txt"

    def folder(self) -> str:
        return self._next(self.folders)

    def lines(self, count: int) -> str:
        return "".join(f"{self.word()}\n" for _ in range(count))


TRAIN = (
    "apple river stone cloud tiger piano lemon storm brick candle mirror rocket garden silver pepper window basket "
    "dragon hammer island jacket kitten ladder magnet needle orange pencil ribbon saddle tunnel violin walnut yellow "
    "zipper anchor bottle copper desert engine forest",
    "notes data result log list memo todo info report table names items draft plan index story",
    "backup archive docs photos music tools",
)
HELD_OUT = (
    "castle planet feather guitar marble ocean rabbit shovel turtle umbrella velvet wagon barrel cactus donkey falcon "
    "ginger harbor jungle lantern meadow nutmeg oyster parrot",
    "recipe letter poem budget diary menu song review sketch ticket",
    "letters drafts games maps",
)


def create(names: Names) -> Job:
    file, word = names.file(), names.word()
    return Job(
        f'Use echo > to write "{word}" to {file}.',
        f"""
[ -f {file} ] && reward=0.3
[ "$(cat {file})" = "{word}" ] && reward=1
""",
    )


def append(names: Names) -> Job:
    file, text, word = names.file(), names.lines(2), names.word()
    return Job(
        f'Use echo >> to add "{word}" to {file}.',
        f"""
grep -q "{word}" {file} && reward=0.3
[ "$(cat {file})" = "$(cat /tests/expected)" ] && reward=1
""",
        {f"files/{file}": text, "expected": f"{text}{word}\n"},
    )


def rename(names: Names) -> Job:
    old, new, text = names.file(), names.file(), names.lines(1)
    return Job(
        f"Use mv to rename {old} to {new}.",
        f"""
[ "$(cat {new})" = "{text.strip()}" ] && reward=0.3 && [ ! -e {old} ] && reward=1
""",
        {f"files/{old}": text},
    )


def copy(names: Names) -> Job:
    old, new, text = names.file(), names.file(), names.lines(1)
    return Job(
        f"Use cp to copy {old} to {new}.",
        f"""
[ "$(cat {new})" = "{text.strip()}" ] && reward=0.3 && [ "$(cat {old})" = "{text.strip()}" ] && reward=1
""",
        {f"files/{old}": text},
    )


def delete_and_write(names: Names) -> Job:
    gone, made, word, text = names.file(), names.file(), names.word(), names.lines(1)
    return Job(
        f'Use rm to delete {gone} and echo > to write "{word}" to {made}.',
        f"""
[ ! -e {gone} ] && reward=0.3 && [ "$(cat {made})" = "{word}" ] && reward=1
""",
        {f"files/{gone}": text},
    )


def replace(names: Names) -> Job:
    file, old, new, other = names.file(), names.word(), names.word(), names.word()
    return Job(
        f'Use sed -i to replace "{old}" with "{new}" in {file}.',
        f"""
grep -q "{new}" {file} && ! grep -q "{old}" {file} && reward=0.3
[ "$(cat {file})" = "$(cat /tests/expected)" ] && reward=1
""",
        {f"files/{file}": f"{other} {old}\n", "expected": f"{other} {new}\n"},
    )


def count(names: Names) -> Job:
    source, target, many = names.file(), names.file(), 2 + names.drawn % 4
    return Job(
        f"Use wc -l to count the lines of {source} into {target}.",
        f"""
[ -f {target} ] && grep -q "{many}" {target} && reward=0.3
[ "$(cut -d " " -f 1 < {target})" = "{many}" ] && reward=1
""",
        {f"files/{source}": names.lines(many)},
    )


def list_files(names: Names) -> Job:
    folder, target, inside = names.folder(), names.file(), sorted([names.file(), names.file()])
    return Job(
        f"Use ls to list {folder} into {target}.",
        f"""
[ -f {target} ] && grep -q "{inside[0]}" {target} && grep -q "{inside[1]}" {target} && reward=0.3
[ "$(sort {target})" = "$(cat /tests/expected)" ] && reward=1
""",
        {**{f"files/{folder}/{name}": names.lines(1) for name in inside}, "expected": "\n".join(inside) + "\n"},
    )


def make_directory(names: Names) -> Job:
    folder = names.folder()
    return Job(f"Use mkdir to make the directory {folder}.", f"\n[ -d {folder} ] && reward=1\n")


def move_into(names: Names) -> Job:
    folder, file, text = names.folder(), names.file(), names.lines(1)
    return Job(
        f"Use mkdir {folder} and mv {file} into it.",
        f"""
[ -d {folder} ] && reward=0.3
[ -f {folder}/{file} ] && [ ! -e {file} ] && reward=1
""",
        {f"files/{file}": text},
    )


JUDGES = "# Judges what is in the working directory; part of the reward for part of the job."

KINDS: dict[str, Callable[[Names], Job]] = {
    "append": append,
    "copy": copy,
    "count": count,
    "create": create,
    "delete-and-write": delete_and_write,
    "list": list_files,
    "make-directory": make_directory,
    "move-into": move_into,
    "rename": rename,
    "replace": replace,
}


def jobs(pools: tuple[str, str, str], each: int, seed: int) -> Iterator[tuple[str, Job]]:
    """(name, job), ``each`` of every kind."""
    names = Names(random.Random(seed), *pools)
    for kind, make in KINDS.items():
        for number in range(1, each + 1):
            names.drawn += 1
            yield f"{kind}-{number}", make(names)


def write(job: Job, directory: Path) -> None:
    """One Harbor-format task directory."""
    has_files = any(name.startswith("files/") for name in job.files)
    contents = {
        "task.toml": 'schema_version = "1.4"\n\n[agent]\ntimeout_sec = 300\n\n[verifier]\ntimeout_sec = 20\n',
        "instruction.md": job.instruction + "\n",
        "environment/Dockerfile": "FROM debian:stable-slim\nWORKDIR /app\n"
        + ("COPY files /app\n" if has_files else ""),
        "tests/test.sh": f"#!/bin/sh\n{JUDGES}\n"
        f'reward=0{job.judge}echo "{{\\"reward\\": $reward}}" > /logs/verifier/reward.json\n',
    }
    for name, text in job.files.items():
        contents[f"environment/{name}" if name.startswith("files/") else f"tests/{name}"] = text
    for name, text in contents.items():
        file = directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        file.chmod(0o755 if name == "tests/test.sh" else 0o644)


def main(root: Path = HERE / "tasks") -> None:
    for split, pools, each, seed in (("train", TRAIN, 4, 1), ("held-out", HELD_OUT, 2, 2)):
        shutil.rmtree(root / split, ignore_errors=True)
        for name, job in jobs(pools, each, seed):
            write(job, root / split / name)


if __name__ == "__main__":
    main()
