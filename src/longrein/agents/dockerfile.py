"""The part of a task's ``environment/Dockerfile`` that needs no image: WORKDIR, ENV, COPY and RUN.

FROM is accepted and has no effect: the sandbox shows the host's own programs. Any other instruction is an error that
names its line, because a task that silently lacks a part of its environment gives wrong rewards.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from longrein.agents.place import BASE_ENV
from longrein.errors import TaskError

VARIABLE = re.compile(r"\\\$|\$\{(\w+)\}|\$(\w+)")


@dataclass(frozen=True, slots=True)
class Directory:
    """WORKDIR: make it, and start later commands there."""

    path: str


@dataclass(frozen=True, slots=True)
class Copy:
    """COPY of one file: ``source`` on the host to ``path`` in the sandbox; ``mode`` None keeps the file's own."""

    source: Path
    path: str
    mode: int


@dataclass(frozen=True, slots=True)
class Command:
    """RUN, with the directory and variables it starts with."""

    line: str
    argv: tuple[str, ...]
    cwd: str
    env: Mapping[str, str]


Step = Directory | Copy | Command


@dataclass(slots=True)
class Environment:
    """What a Dockerfile comes to: ``steps`` in order, and the variables later phases start with."""

    steps: list[Step] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_environment(directory: Path, workdir: str) -> Environment:
    """Interpret ``directory/Dockerfile``; without one, the whole directory is copied to ``workdir``.

    Raises:
        TaskError: names file and line, the instruction, and what is understood.
    """
    reading = _Reading(directory, workdir)
    file = directory / "Dockerfile"
    if file.is_file():
        for line, keyword, rest in _instructions(file):
            reading.where = f"{file}:{line}"
            reading.step(keyword, rest)
    elif directory.is_dir():
        reading.where = str(directory)
        reading.copy_tree(directory, workdir)
    return reading.result


def _instructions(file: Path) -> Iterator[tuple[int, str, str]]:
    """Line number, keyword in capitals, and the rest with continuation lines joined."""
    start, joined = 0, ""
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if line.lstrip().startswith("#") or not (line.strip() or joined):
            continue
        start = start if joined else number
        joined += line.strip()
        if joined.endswith("\\"):
            joined = joined[:-1] + " "
            continue
        keyword, _, rest = joined.partition(" ")
        yield start, keyword.upper(), rest.strip()
        joined = ""
    if joined:
        raise TaskError(f"{file}:{start}: the last line ends in a backslash, so the instruction is incomplete.")


class _Reading:
    def __init__(self, directory: Path, workdir: str) -> None:
        self.directory = directory
        self.cwd = "/"
        self.directories = {"/", workdir}
        self.where = ""
        self.result = Environment()

    def step(self, keyword: str, rest: str) -> None:
        known = {"FROM": self._from, "WORKDIR": self._workdir, "ENV": self._env, "COPY": self._copy, "RUN": self._run}
        if keyword not in known:
            raise TaskError(
                f"{self.where}: {keyword} is not understood by the process runner, which knows {', '.join(known)}. "
                "Write the task without it."
            )
        known[keyword](rest)

    def _from(self, rest: str) -> None:
        self.result.notes.append(f"{self.where}: FROM {rest} has no effect here; the host's own programs are used")

    def _workdir(self, rest: str) -> None:
        self.cwd = self._absolute(self._expand(rest))
        self.directories.add(self.cwd)
        self.result.steps.append(Directory(self.cwd))

    def _env(self, rest: str) -> None:
        if re.match(r"\w+\s", rest):
            name, _, value = rest.partition(" ")
            self.result.env[name] = self._expand(value.strip())
            return
        for word in self._words(rest):
            name, equals, value = word.partition("=")
            if not equals:
                raise TaskError(f"{self.where}: ENV {rest}: expected NAME=value.")
            self.result.env[name] = self._expand(value)

    def _run(self, rest: str) -> None:
        if "<<" in rest and re.search(r"<<-?\s*['\"]?\w+['\"]?\s*$", rest):
            raise TaskError(f"{self.where}: RUN with a here-document is not understood. Put the script into a file.")
        argv = tuple(json.loads(rest)) if rest.startswith("[") else ("/bin/sh", "-c", rest)
        self.result.steps.append(Command(f"{self.where}: RUN {rest}", argv, self.cwd, dict(self.result.env)))

    def _copy(self, rest: str) -> None:
        words = list(json.loads(rest)) if rest.startswith("[") else self._words(rest)
        mode = None
        while words and words[0].startswith("--"):
            flag, _, value = words.pop(0).partition("=")
            if flag == "--chmod":
                mode = int(value, 8)
            elif flag == "--chown":
                self.result.notes.append(f"{self.where}: --chown has no effect; one user owns everything")
            else:
                raise TaskError(f"{self.where}: COPY {flag} is not understood; --chmod is.")
        if len(words) < 2:
            raise TaskError(f"{self.where}: COPY {rest}: expected sources and a destination.")
        *patterns, destination = map(self._expand, words)
        sources = [source for pattern in patterns for source in self._sources(pattern)]
        target = self._absolute(destination)
        into = destination.endswith(("/", "/.")) or destination == "." or target in self.directories or len(sources) > 1
        for source in sources:
            if source.is_dir():
                self.copy_tree(source, target, mode)
            else:
                self._copy_file(source, f"{target.rstrip('/')}/{source.name}" if into else target, mode)

    def _sources(self, pattern: str) -> list[Path]:
        relative = pattern.lstrip("/") or "."
        found = sorted(self.directory.glob(relative)) if re.search(r"[*?\[]", relative) else [self.directory / relative]
        top = self.directory.resolve()
        if not found or not all(path.exists() and path.resolve().is_relative_to(top) for path in found):
            raise TaskError(f"{self.where}: COPY {pattern}: no such file in {self.directory}.")
        return found

    def copy_tree(self, top: Path, target: str, mode: int | None = None) -> None:
        """Copy what is below ``top`` into the directory ``target``."""
        self.directories.add(target)
        self.result.steps.append(Directory(target))
        for path in sorted(top.rglob("*")):
            inner = f"{target.rstrip('/')}/{path.relative_to(top).as_posix()}"
            if path.is_dir() and not path.is_symlink():
                self.result.steps.append(Directory(inner))
            else:
                self._copy_file(path, inner, mode)

    def _copy_file(self, source: Path, target: str, mode: int | None) -> None:
        if source.is_symlink() or not source.is_file():
            raise TaskError(f"{self.where}: {source} is not a regular file. Replace it with one.")
        self.result.steps.append(Copy(source, target, source.stat().st_mode & 0o777 if mode is None else mode))

    def _absolute(self, path: str) -> str:
        return re.sub(r"(?<=.)/$", "", str(PurePosixPath(self.cwd) / path))

    def _words(self, text: str) -> list[str]:
        try:
            return shlex.split(text)
        except ValueError as error:
            raise TaskError(f"{self.where}: {text}: {error}.") from None

    def _expand(self, text: str) -> str:
        def value(match: re.Match[str]) -> str:
            name = match[1] or match[2]
            return "$" if name is None else self.result.env.get(name, BASE_ENV.get(name, ""))

        return VARIABLE.sub(value, text)
