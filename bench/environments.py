"""Environments of other packages that benchmarks run beside longrein, under the user's cache directory."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parents[1] / "constraints.txt"


def environment(
    name: str, installs: Sequence[Sequence[str]], *, python: tuple[int, int] = (3, 10), constrained: bool = False
) -> Path:
    """The programs of a virtual environment, made when absent.

    Args:
        name: with the versions of what is in it.
        installs: arguments of ``pip install``, one after the other.
        python: the lowest that the packages take.
        constrained: to the versions in ``constraints.txt``.

    Raises:
        RuntimeError: no Python is new enough.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "longrein" / "bench" / name
    done = folder / ".installed"
    if not done.exists():
        print(f"Installing {name} into {folder}", file=sys.stderr, flush=True)
        constraints = ["--constraint", str(CONSTRAINTS)] if constrained else []
        subprocess.run([interpreter(python), "-m", "venv", "--clear", str(folder)], check=True)
        for install in (["--upgrade", "pip"], *installs):
            pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
            subprocess.run([*pip, *constraints, *install], check=True, timeout=1800)
        done.touch()
    return folder / "bin"


def interpreter(lowest: tuple[int, int]) -> str:
    """A Python that is new enough: the one that runs this, else one from the PATH or of pyenv.

    Raises:
        RuntimeError: there is none.
    """
    if sys.version_info >= lowest:
        return sys.executable
    versions = Path(os.environ.get("PYENV_ROOT") or "~/.pyenv").expanduser() / "versions"
    for minor in range(lowest[1], lowest[1] + 3):
        named = [shutil.which(f"python3.{minor}"), *map(str, versions.glob(f"3.{minor}.*/bin/python"))]
        for candidate in filter(None, named):
            if subprocess.run([candidate, "-c", "import ensurepip, venv"], capture_output=True).returncode == 0:
                return candidate
    raise RuntimeError(f"Python {lowest[0]}.{lowest[1]} or newer was not found on the PATH or under {versions}.")
