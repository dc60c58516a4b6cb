"""Harness profiles are data: what to install, how to start it, how to point it at the gateway.

A harness lives in an environment of its own in the user's cache, as its makers publish it; longrein's own environment
and the harness's never mix. A profile plus the configuration's ``harness`` section plus a task give a ``Launch``.
"""

import difflib
import fcntl
import importlib.resources
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from longrein.agents.runner import Launch, Preload
from longrein.config import HarnessSection
from longrein.errors import HarnessError
from longrein.records import Task

COMPLETE = "longrein.json"
PROGRAMS = Path(__file__).with_name("programs")
NEWEST = (3, 13)
"""Newest Python looked for where the one that runs this is too old."""
NPM_QUIET = ("--no-audit", "--no-fund", "--loglevel=error")
# The sandbox shows these by itself.
SYSTEM = tuple(Path(path) for path in ("/usr", "/etc", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"))
FIELD = re.compile(r"\{([a-z_]+)\}")


@dataclass(frozen=True, slots=True)
class Profile:
    """How one harness is installed and started.

    Attributes:
        version: pinned version; None where there is nothing to install.
        pip: requirements of its Python environment.
        npm: packages of its Node environment, Node itself among them.
        python: lowest Python its environment takes, such as ``3.12``; None where the one that runs this will do.
        needs: programs it calls that neither pip nor npm brings; they are named as their packages are.
        command: argument list with ``{fields}``; empty where the configuration must give one.
        env: environment variables, with the same fields.
        files: path in the sandbox → text written there before the start, with the same fields.
        dialect: what it speaks to the gateway.
        imports, entry: for preloading (see ``runner.Preload``); ``entry`` is None where it cannot be preloaded.
    """

    name: str
    version: str | None = None
    pip: tuple[str, ...] = ()
    npm: tuple[str, ...] = ()
    python: str | None = None
    needs: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    dialect: str = "chat"
    imports: tuple[str, ...] = ()
    entry: str | None = None

    def as_tree(self) -> dict[str, Any]:
        """As it stands in ``harnesses.yaml``, without what is empty."""
        preload = {"imports": list(self.imports), "entry": self.entry} if self.entry else None
        tree = {
            "version": self.version,
            **self.pins,
            "python": self.python,
            "needs": list(self.needs),
            "command": list(self.command),
            "env": dict(self.env),
            "files": dict(self.files),
            "dialect": self.dialect,
            "preload": preload,
        }
        return {key: value for key, value in tree.items() if value}

    @property
    def pins(self) -> dict[str, list[str]]:
        """What is installed, by installer; empty for a profile that installs nothing."""
        return {name: list(wanted) for name, wanted in (("pip", self.pip), ("npm", self.npm)) if wanted}


@cache
def profiles() -> Mapping[str, Profile]:
    """All profiles, by name."""
    text = importlib.resources.files("longrein.agents").joinpath("harnesses.yaml").read_text(encoding="utf-8")
    return MappingProxyType({name: _profile(name, tree) for name, tree in yaml.safe_load(text).items()})


def profile(name: str) -> Profile:
    """The profile of that name.

    Raises:
        HarnessError: there is none; names near misses.
    """
    if name in profiles():
        return profiles()[name]
    close = difflib.get_close_matches(name, profiles(), n=1)
    hint = f"Did you mean {close[0]!r}?" if close else f"There are: {', '.join(profiles())}."
    raise HarnessError(f"harness.name was given {name!r}, which is no profile. {hint}")


def _profile(name: str, tree: Mapping[str, Any]) -> Profile:
    preload = tree.get("preload", {})
    return Profile(
        name=name,
        version=tree.get("version"),
        pip=tuple(tree.get("pip", ())),
        npm=tuple(tree.get("npm", ())),
        python=tree.get("python"),
        needs=tuple(tree.get("needs", ())),
        command=tuple(tree.get("command", ())),
        env=tree.get("env", {}),
        files=tree.get("files", {}),
        dialect=tree["dialect"],
        imports=tuple(preload.get("imports", ())),
        entry=preload.get("entry"),
    )


def directory(profile: Profile) -> Path:
    """Where the profile's environment is, or will be."""
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache_home / "longrein" / "harnesses" / f"{profile.name}-{profile.version}"


def installed(profile: Profile) -> Path | None:
    """The profile's environment, if it is there and complete. None for a profile that installs nothing."""
    place = directory(profile)
    try:
        pins = json.loads((place / COMPLETE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    # The interpreter is a link to the one that made the environment, which may be gone by now.
    usable = not profile.pip or (place / "bin" / "python").exists()
    return place if pins == profile.pins and usable else None


def install(profile: Profile) -> Path:
    """Make the profile's environment, unless it is there; returns its directory. May take minutes.

    A Python environment is made with the interpreter that runs this, or with another where that is too old. An
    environment cannot be moved once made, so a file written last tells a complete one; an incomplete one is made again.

    Raises:
        HarnessError: nothing to install, a program or a Python that it needs is missing, or the installation failed;
            ends with the installer's last lines.
    """
    if not profile.pins:
        raise HarnessError(f"Harness {profile.name!r} has nothing to install; its program is named by harness.command.")
    check_needs(profile)
    place = directory(profile)
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.with_name(f".{place.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if installed(profile) is None:
            interpreter = _interpreter(profile) if profile.pip else ""
            if place.exists():
                shutil.rmtree(place)
            place.mkdir()
            if profile.pip:
                _run(profile, [interpreter, "-m", "venv", str(place)])
                pip = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
                _run(profile, [*pip, *profile.pip])
            if profile.npm:
                _run(profile, [_npm(profile), "install", "--prefix", str(place), *NPM_QUIET, *profile.npm])
            (place / COMPLETE).write_text(json.dumps(profile.pins), encoding="utf-8")
    return place


def check_needs(profile: Profile) -> None:
    """Raises HarnessError where a program that the harness calls is missing; names the package to install."""
    for program in profile.needs:
        if shutil.which(program) is None:
            raise HarnessError(
                f"Harness {profile.name!r} needs the program {program}, which was not found. Install the package "
                f"{program} (Debian and Ubuntu: apt-get install {program})."
            )


def _interpreter(profile: Profile) -> str:
    """A Python that is new enough: the one that runs this, else the newest found on the PATH or among pyenv's.

    Raises:
        HarnessError: there is none.
    """
    if profile.python is None:
        return sys.executable
    lowest = tuple(map(int, profile.python.split(".")))
    if sys.version_info >= lowest:
        return sys.executable
    versions = Path(os.environ.get("PYENV_ROOT") or "~/.pyenv").expanduser() / "versions"
    for minor in range(NEWEST[1], lowest[1] - 1, -1):
        for candidate in _named(f"python{NEWEST[0]}.{minor}", versions):
            # pyenv puts a program of that name on the PATH that refuses to run; Debian's may lack what venv needs.
            if subprocess.run([candidate, "-c", "import ensurepip, venv"], capture_output=True).returncode == 0:
                return candidate
    ours = ".".join(map(str, sys.version_info[:2]))
    raise HarnessError(
        f"Harness {profile.name!r} needs Python {profile.python} or newer; longrein runs with {ours}, and no newer one "
        f"with the modules venv and ensurepip was found on the PATH or under {versions}. Install one (Debian and "
        f"Ubuntu: apt-get install python{profile.python} python{profile.python}-venv; or pyenv install "
        f"{profile.python})."
    )


def _named(name: str, versions: Path) -> list[str]:
    """Programs of that name: the one on the PATH, and one in the ``bin`` of each directory in ``versions``."""
    on_path = shutil.which(name)
    return ([] if on_path is None else [on_path]) + [str(path) for path in versions.glob(f"*/bin/{name}")]


def _npm(profile: Profile) -> str:
    found = shutil.which("npm")
    if found is None:
        raise HarnessError(f"Harness {profile.name!r} is installed with npm, which was not found. Install Node.js.")
    return found


def _run(profile: Profile, command: list[str]) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-10:])
        raise HarnessError(
            f"Harness {profile.name!r} could not be installed: {' '.join(command)} ended with {done.returncode}:\n"
            f"{said}"
        )


def launch(section: HarnessSection, task: Task, *, base_url: str, key: str, model: str) -> Launch:
    """Fill in the command line of ``section``'s harness for one rollout of ``task``.

    Args:
        base_url: the gateway as the sandbox sees it, without ``/v1``.
        key: the rollout's own key.
        model: name of the model to ask for.

    Raises:
        HarnessError: unknown profile, harness not installed, program or file missing, misspelt ``{field}``.
    """
    chosen = profile(section.name)
    check_needs(chosen)
    place = installed(chosen)
    if chosen.pins and place is None:
        raise HarnessError(
            f"Harness {chosen.name} {chosen.version} is not installed. Run: longrein harness install {chosen.name}"
        )
    fill = _filler(
        {
            "instruction": task.instruction,
            "base_url": base_url,
            "key": key,
            "model": model,
            "workdir": task.workdir,
            "python": sys.executable,
            "prefix": "" if place is None else str(place),
            "programs": str(PROGRAMS),
        }
    )
    words = list(section.command or chosen.command) + section.arguments
    program, *arguments = words
    found = _program(fill("harness.command", program), place, section.files)
    argv = (found, *(fill("harness.command", argument) for argument in arguments))
    own = section.command is None and section.preload and chosen.entry is not None
    return Launch(
        argv=argv,
        env={name: fill(f"harness.env.{name}", value) for name, value in {**chosen.env, **section.env}.items()},
        files={
            **{target: fill(f"{chosen.name}: {target}", text).encode() for target, text in chosen.files.items()},
            **{target: _content(target, file) for target, file in section.files.items()},
        },
        preload=Preload(place / "bin" / "python", chosen.imports, chosen.entry, _fixed({**chosen.env, **section.env}))
        if own and place and chosen.entry
        else None,
        readable=_readable(
            place,
            None if found in section.files else Path(found),
            PROGRAMS if any("{programs}" in word for word in words) else None,
        ),
    )


def _fixed(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that are the same in every rollout: a harness may read them when it is imported."""
    return {name: value for name, value in env.items() if not FIELD.search(value)}


def _filler(values: Mapping[str, str]) -> Callable[[str, str], str]:
    """A function that replaces each ``{field}`` once, in one pass: braces in what is filled in stay as they are.

    Other braces stay too (shell and JSON are full of them), unless they look like a misspelt field.
    """

    def fill(where: str, text: str) -> str:
        def replace(match: re.Match[str]) -> str:
            if match[1] in values:
                return values[match[1]]
            close = difflib.get_close_matches(match[1], values, n=1, cutoff=0.8)
            if close:
                raise HarnessError(f"{where}: unknown field {match[0]}. Did you mean {{{close[0]}}}?")
            return match[0]

        return FIELD.sub(replace, text)

    return fill


def _program(name: str, place: Path | None, files: Iterable[str]) -> str:
    """Absolute path of a program: in the harness's environment, on this machine, or among the files put in."""
    if name in files:
        return name
    if place is not None and "/" not in name:
        for folder in (place / "bin", place / "node_modules" / ".bin"):
            if os.access(folder / name, os.X_OK):
                return str(folder / name)
    found = shutil.which(name)
    if found is None:
        what = "is not an executable file" if Path(name).exists() else "was not found"
        raise HarnessError(
            f"harness.command: the program {name!r} {what}. Give a path beside the configuration (./agent), an "
            "absolute path, or a program on the PATH; {python} is the interpreter that runs longrein."
        )
    return str(Path(found).absolute())


def _content(target: str, file: Path) -> bytes:
    if not target.startswith("/"):
        raise HarnessError(
            f"harness.files: {target!r} is not an absolute path in the sandbox, such as '/app/agent.py'."
        )
    try:
        return file.read_bytes()
    except OSError as error:
        raise HarnessError(f"harness.files[{target!r}]: {file} cannot be read ({error.strerror}).") from None


def _readable(place: Path | None, program: Path | None, programs: Path | None) -> tuple[Path, ...]:
    """What of the host the program needs: its installation, never more (tasks and ledgers may lie beside it)."""
    needed: list[Path] = [place] if place is not None and (place / "node_modules").is_dir() else []
    needed += [programs] if programs is not None else []
    for path in (place and place / "bin" / "python", program):
        while path is not None:
            needed.append(_installation(path))
            path = path.parent / path.readlink() if path.is_symlink() else None
    kept: list[Path] = []
    for path in (Path(os.path.normpath(path)) for path in needed):
        if not any(path.is_relative_to(parent) for parent in (*SYSTEM, *kept)):
            kept = [*(other for other in kept if not other.is_relative_to(path)), path]
    return tuple(kept)


def _installation(program: Path) -> Path:
    """The prefix of an installed program (``PREFIX/bin/program`` beside ``PREFIX/lib``); else the file alone."""
    prefix = program.parent.parent
    home = Path.home()
    if program.parent.name == "bin" and (prefix / "lib").is_dir() and not home.is_relative_to(prefix):
        return prefix
    return program
