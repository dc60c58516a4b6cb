"""The seam between the process runner and the two kinds of place a trial can happen in: a sandbox, or none."""

import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

from longrein.agents.runner import Preload

Phase = Literal["build", "agent", "verifier"]

BASE_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
}


def ending(code: int) -> str:
    """``exited 3`` or ``killed by SIGSEGV``; ``code`` as ``subprocess`` gives it, a signal being negative."""
    return f"exited {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


class Place(Protocol):
    """Where one trial happens. Paths are absolute and mean the task's own file system.

    Every method may raise SandboxError, which is never the harness's or the verifier's fault.
    """

    def env(self, phase: Phase) -> Mapping[str, str]:
        """The clean set of variables every program of this phase gets."""
        ...

    def map(self, text: str) -> str:
        """A command-line word or variable, where paths must be spelt differently here."""
        ...

    async def make(self, path: str) -> None:
        """Make a directory, with those above it."""
        ...

    async def put(self, path: str, content: bytes | Path, mode: int = 0o644) -> None:
        """Write a file, replacing what is there."""
        ...

    async def start(self, phase: Phase, port: int | None) -> socket.socket | None:
        """Begin a phase; with ``port``, a listener on that port of its loopback is handed back (ours to close)."""
        ...

    async def run(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        stdout: int,
        stderr: int,
        preload: Preload | None = None,
    ) -> str:
        """Run a program to its end, in the current phase; how it ended. Raises HarnessError if it cannot start."""
        ...

    async def watch(self, workdir: str) -> None:
        """Remember how things stand, just before the harness starts."""
        ...

    async def tampered(self, env: Mapping[str, str]) -> list[str]:
        """What the harness left since that may sway a verifier with these variables, a line each; ask in its phase."""
        ...

    async def survivors(self) -> list[str]:
        """Which programs of the phase still run, a line each."""
        ...

    async def stop(self) -> None:
        """End the phase: when this returns, none of its processes is left."""
        ...

    async def fetch(self, name: str, to: Path) -> None:
        """Copy the regular files below ``/logs/<name>`` into the host directory ``to``; links are not followed."""
        ...

    async def close(self) -> None:
        """Remove everything."""
        ...
