"""A task is a Harbor-format directory, read strictly: what this runner cannot honour is refused, never ignored.

``task.toml``, ``instruction.md``, ``environment/Dockerfile`` (its steps are carried out by the sandbox; here only its
WORKDIR matters) and ``tests/test.sh``. Harbor's schema is written out below as a table: each key is honoured, accepted
as information, or refused with the reason.
"""

import difflib
import hashlib
import math
import os
import posixpath
import re
import stat
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from longrein.errors import TaskError
from longrein.records import RewardProfile, Task

Network = Literal["gateway", "host"]

DEFAULT_WORKDIR = "/app"
DEFAULT_VERIFIER_TIMEOUT_S = 600.0

# Keys that change nothing about how a rollout runs here. Sizes (cpus, memory_mb, …) are requests to a scheduler; the
# limits of a sandbox are the runner's own.
INFORMATION = {
    "": {"schema_version", "source", "task", "metadata", "version"},
    "environment": {"build_timeout_sec", "cpus", "memory_mb", "storage_mb"},
    "solution": {"env"},
}
HONOURED = {
    "": {"agent", "verifier", "environment", "solution"},
    "agent": {"timeout_sec"},
    "verifier": {"timeout_sec"},
    "environment": {"env", "workdir"},
    "solution": set[str](),
}
ONE_CONTAINER = "a task runs in one sandbox made from environment/Dockerfile"
# Key → (values that ask for nothing, why anything else is refused).
REFUSED: dict[str, dict[str, tuple[tuple[object, ...], str]]] = {
    "": {
        "steps": (([],), "tasks of several steps are not supported"),
        "multi_step_reward_strategy": ((), "tasks of several steps are not supported"),
        "artifacts": (([],), "files are not collected; let tests/test.sh copy what matters to /logs/verifier"),
    },
    "agent": {
        "user": (("root", 0), "harnesses run as the sandbox's own root user"),
        "network_mode": (("no-network",), "the network belongs to runner.network"),
        "allowed_hosts": (([],), "single hosts cannot be opened"),
    },
    "verifier": {
        "env": (({},), "set the variables in tests/test.sh"),
        "user": (("root", 0), "verifiers run as the sandbox's own root user"),
        "environment_mode": (("shared",), "the verifier runs in the task's own sandbox, with all its processes killed"),
        "environment": ((), "the verifier runs in the task's own sandbox, with all its processes killed"),
        "collect": (([],), "call the command in tests/test.sh"),
    },
    "environment": {
        "docker_image": ((), ONE_CONTAINER),
        "os": (("linux",), "only Linux is there"),
        "gpus": ((0,), "sandboxes see no GPU"),
        "gpu_types": (([],), "sandboxes see no GPU"),
        "network_mode": (("no-network",), "the sandbox reaches nothing but the model endpoint"),
        "allowed_hosts": (([],), "single hosts cannot be opened"),
        "skills_dir": ((), "skills are the harness's own; give them to it with harness.files"),
        "mcp_servers": (([],), "MCP servers are not started"),
        "healthcheck": ((), "nothing in the sandbox is started before the harness"),
    },
    "solution": {},
}
COMPOSE_FILES = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")


def load_task(directory: Path, profile: RewardProfile, network: Network = "gateway") -> Task:
    """Read one task directory; its name is the task's id.

    Args:
        profile: how the verifier's number becomes the reward.
        network: what the runner gives (``runner.network``); a task that asks for more is refused.

    Raises:
        TaskError: names the file, the key and what to do.
    """
    directory = directory.absolute()
    if not directory.is_dir():
        raise TaskError(f"{directory}: is not a directory. A task is a directory with task.toml and instruction.md.")
    digest = task_digest(directory)
    file = directory / "task.toml"
    tree = _read_toml(file)
    _check_keys(file, tree, network)
    _check_layout(directory)
    metadata = tree.get("metadata", {})
    if not isinstance(metadata, dict):
        raise TaskError(f"{file}: key 'metadata' was given {metadata!r}; expected a table.")
    if not isinstance(metadata.get("canary", False), bool):
        raise TaskError(f"{file}: key 'metadata.canary' was given {metadata['canary']!r}; expected true or false.")
    environment = tree.get("environment", {})
    return Task(
        task_id=directory.name,
        path=directory,
        digest=digest,
        instruction=_instruction(directory / "instruction.md"),
        agent_timeout_s=_seconds(file, tree, "agent"),
        verifier_timeout_s=_seconds(file, tree, "verifier") or DEFAULT_VERIFIER_TIMEOUT_S,
        workdir=_workdir(file, environment.get("workdir"), directory / "environment" / "Dockerfile"),
        env=_environment(file, environment.get("env", {})),
        profile=profile,
        metadata=metadata,
    )


def task_digest(directory: Path) -> str:
    """``sha256:<hex>`` over every file's relative path, mode, length and bytes, in the order of the paths.

    The mode is what version control keeps of it, executable or not, so that a checkout under another umask has the
    same digest. Empty directories do not count.

    Raises:
        TaskError: a symbolic link or a special file is in the directory, or a file cannot be read.
    """
    total = hashlib.sha256()
    for name, file in sorted(_files(directory)):
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as handle:
                mode = os.fstat(handle.fileno()).st_mode
                content = handle.read()
        except OSError as error:
            raise TaskError(
                f"{file}: cannot be read ({error.strerror}). A task's files must all be readable."
            ) from None
        kind = b"100755" if mode & stat.S_IXUSR else b"100644"
        total.update(b"%s\0%s\0%d\0" % (name, kind, len(content)))
        total.update(content)
    return f"sha256:{total.hexdigest()}"


def _files(directory: Path) -> Iterator[tuple[bytes, Path]]:
    """(relative path with slashes, file) of every regular file."""

    def refuse(error: OSError) -> None:
        raise TaskError(f"{error.filename}: cannot be read ({error.strerror}).") from None

    for parent, folders, names in os.walk(directory, onerror=refuse):
        for name in (*folders, *names):
            path = Path(parent, name)
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode):
                raise TaskError(
                    f"{path}: is a symbolic link. What it points to is not pinned by the task's digest; "
                    "put a copy in its place."
                )
            if stat.S_ISREG(mode):
                yield os.fsencode(path.relative_to(directory).as_posix()), path
            elif not stat.S_ISDIR(mode):
                raise TaskError(f"{path}: is neither a file nor a directory. Remove it from the task.")


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise TaskError(
            f"{file}: is missing. A task needs task.toml, instruction.md, environment/Dockerfile and tests/test.sh."
        ) from None
    except OSError as error:
        raise TaskError(f"{file}: cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError:
        raise TaskError(f"{file}: is not UTF-8 text. Save it as UTF-8.") from None


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(_read_text(file))
    except tomllib.TOMLDecodeError as error:
        raise TaskError(f"{file}: is not valid TOML: {error}.") from None


def _check_keys(file: Path, tree: Mapping[str, Any], network: Network) -> None:
    version = tree.get("schema_version", "1.4")
    if not isinstance(version, str) or not version.startswith("1."):
        raise TaskError(f"{file}: key 'schema_version' was given {version!r}; version 1.x is understood.")
    for section in ("", "agent", "verifier", "environment", "solution"):
        table = tree if section == "" else tree.get(section, {})
        if not isinstance(table, dict):
            raise TaskError(f"{file}: key {section!r} was given {table!r}; expected a table.")
        for key, value in table.items():
            _check_key(file, section, key, value, network)


def _check_key(file: Path, section: str, key: str, value: object, network: Network) -> None:
    name = f"{section}.{key}" if section else key
    if key in HONOURED[section] or key in INFORMATION.get(section, ()):
        return
    if key not in REFUSED[section]:
        known = [*HONOURED[section], *INFORMATION.get(section, ()), *REFUSED[section]]
        close = difflib.get_close_matches(key, known, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else "Facts of your own belong in [metadata]."
        raise TaskError(f"{file}: unknown key {name!r} (given {value!r}). {hint}")
    harmless, reason = REFUSED[section][key]
    if key == "network_mode" and value == "public":
        if network == "host":
            return
        reason += "; leave the key out to run without, or set runner.network: host"
    if not any(value == allowed and type(value) is type(allowed) for allowed in harmless):
        raise TaskError(f"{file}: key {name!r} was given {value!r}, which cannot be honoured: {reason}.")


def _check_layout(directory: Path) -> None:
    for name in COMPOSE_FILES:
        if (directory / "environment" / name).exists():
            raise TaskError(f"{directory}/environment/{name}: compose files are not supported: {ONE_CONTAINER}.")
    if (directory / "steps").exists():
        raise TaskError(f"{directory}/steps: tasks of several steps are not supported. Make each step a task.")
    _read_text(directory / "tests" / "test.sh")


def _instruction(file: Path) -> str:
    """The text for the harness, without the comment lines at its top that mark it as test data."""
    lines = _read_text(file).splitlines(keepends=True)
    while lines and _is_canary(lines[0]):
        lines.pop(0)
    text = "".join(lines).strip()
    if not text:
        raise TaskError(f"{file}: holds no instruction. Write what the agent shall do.")
    if "\0" in text:
        raise TaskError(f"{file}: holds a NUL character, which no command line can carry. Remove it.")
    return text


def _is_canary(line: str) -> bool:
    line = line.strip()
    return not line or (line.startswith(("#", "<!--")) and "canary" in line.lower())


def _seconds(file: Path, tree: Mapping[str, Any], section: str) -> float | None:
    value = tree.get(section, {}).get("timeout_sec")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not (0 < value < math.inf):
        raise TaskError(f"{file}: key '{section}.timeout_sec' was given {value!r}; expected seconds above 0.")
    return float(value)


def _workdir(file: Path, given: object, dockerfile: Path) -> str:
    if given is not None:
        if not isinstance(given, str) or not given.startswith("/"):
            raise TaskError(f"{file}: key 'environment.workdir' was given {given!r}; expected an absolute path.")
        return posixpath.normpath(given)
    workdir = "/"
    found = False
    for line in re.sub(r"\\[ \t]*\n", " ", _read_text(dockerfile)).splitlines():
        word, _, rest = line.strip().partition(" ")
        if word.upper() != "WORKDIR":
            continue
        path = rest.strip().strip("\"'")
        if not path or "$" in path:
            raise TaskError(f"{dockerfile}: WORKDIR was given {rest.strip()!r}; spell the directory out.")
        workdir, found = posixpath.normpath(posixpath.join(workdir, path)), True
    return workdir if found else DEFAULT_WORKDIR


VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")


def _environment(file: Path, given: object) -> dict[str, str]:
    """``${VAR}`` and ``${VAR:-default}`` are filled in from this process's environment, as in Harbor."""
    if not isinstance(given, dict):
        raise TaskError(f"{file}: key 'environment.env' was given {given!r}; expected a table of strings.")
    filled: dict[str, str] = {}
    for name, value in given.items():
        if not isinstance(value, str) or "\0" in value:
            raise TaskError(f"{file}: key 'environment.env.{name}' was given {value!r}; expected a string.")
        filled[name] = VARIABLE.sub(_lookup(file, name), value)
    return filled


def _lookup(file: Path, name: str) -> Callable[[re.Match[str]], str]:
    def value(match: re.Match[str]) -> str:
        found = os.environ.get(match[1]) or match[2]
        if found is None:
            raise TaskError(
                f"{file}: key 'environment.env.{name}' asks for the variable {match[1]}, which is not set. "
                f"Export it, or give a default: ${{{match[1]}:-…}}."
            )
        return found

    return value
