"""No sandbox: one temporary directory per trial, for code you trust.

What holds: the harness runs in a directory of its own with a clean environment; memory and file size of each process
are limited; when it ends, every process that still carries the trial's environment is killed; the directory goes.
What does not: it sees and may change everything its user may, and it has the host's network.

The task's absolute paths cannot exist here. ``/app`` becomes ``$LONGREIN_ROOT/app``, and so on; words of the command
line and variables that are such paths are rewritten, text is not. A ``tests/test.sh`` that runs in both kinds of place
says ``${LONGREIN_ROOT:-}/logs/verifier/reward.txt``.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from longrein.agents.mounts import regular_files
from longrein.agents.output import keep_files
from longrein.agents.place import BASE_ENV, Phase, ending
from longrein.agents.rewards import FILES
from longrein.agents.runner import Preload
from longrein.config import RunnerSection
from longrein.errors import HarnessError

PREFIX = "longrein-trial-"
MARK = "LONGREIN_TRIAL"
MOST_FILES = 64
LIMITED = 'ulimit -c 0; ulimit -d "$1" && ulimit -f "$2" || exit 70; shift 2; exec "$@"'


class PlainPlace:
    """One directory: a ``Place``."""

    def __init__(self, section: RunnerSection, paths: Sequence[str]) -> None:
        """``paths`` are the task's own absolute paths, which ``map`` rewrites."""
        self._section = section
        self._mark = uuid.uuid4().hex
        self._root = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        self._paths = (*paths, "/logs", "/tests")
        for name in ("root", "tmp", "logs/agent", "logs/artifacts", "logs/verifier"):
            (self._root / name).mkdir(parents=True)

    def env(self, phase: Phase) -> Mapping[str, str]:
        home = self._root / ("root" if phase != "verifier" else "verifier-home")
        home.mkdir(exist_ok=True)
        path = os.environ.get("PATH", BASE_ENV["PATH"])
        return {
            **BASE_ENV,
            "PATH": path,
            "HOME": str(home),
            "TMPDIR": str(self._root / "tmp"),
            MARK: self._mark,
            "LONGREIN_ROOT": str(self._root),
        }

    def map(self, text: str) -> str:
        inside = any(text == path or text.startswith(f"{path.rstrip('/')}/") for path in self._paths)
        return str(self._host(text)) if inside else text

    def _host(self, path: str) -> Path:
        return self._root / path.lstrip("/")

    async def make(self, path: str) -> None:
        self._host(path).mkdir(parents=True, exist_ok=True)

    async def put(self, path: str, content: bytes | Path, mode: int = 0o644) -> None:
        target = self._host(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content if isinstance(content, bytes) else content.read_bytes())
        target.chmod(mode)

    async def start(self, phase: Phase, port: int | None) -> socket.socket | None:
        """The gateway is reached directly: there is no port of one's own."""
        if phase == "verifier":
            for name in ("logs/verifier", "tests"):
                _remove(self._root / name)
                (self._root / name).mkdir()
        return None

    async def run(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        stdout: int,
        stderr: int,
        preload: Preload | None = None,
    ) -> str:
        program = shutil.which(argv[0], path=env.get("PATH"))
        if program is None:
            raise HarnessError(f"cannot be started: {argv[0]} is not a program")
        directory = self._host(cwd)
        if not (directory.is_dir() and os.access(directory, os.X_OK)):
            # The harness removed it, and is judged all the same.
            directory = self._root
        kilobytes = (self._section.memory_mb * 1024, self._section.disk_mb * 2048)
        process = await asyncio.create_subprocess_exec(
            "/bin/sh",
            "-c",
            LIMITED,
            "sh",
            *map(str, kilobytes),
            program,
            *argv[1:],
            env=dict(env),
            cwd=directory,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            code = await process.wait()
        except asyncio.CancelledError:
            _kill(process.pid)
            await process.wait()
            raise
        return ending(code)

    async def watch(self, workdir: str) -> None:
        """Trusted code is not watched."""

    async def tampered(self, env: Mapping[str, str]) -> list[str]:
        return []

    async def survivors(self) -> list[str]:
        return []

    async def stop(self) -> None:
        """Kill what carries the trial's mark until none is left (a process may fork meanwhile)."""
        for _ in range(100):
            if not (alive := _marked(self._mark)):
                return
            for pid in alive:
                _kill(pid)
            await asyncio.sleep(0.02)

    async def fetch(self, name: str, to: Path) -> None:
        found = list(regular_files(self._root / "logs" / name, MOST_FILES, first=FILES))
        await asyncio.to_thread(keep_files, found, to)

    async def close(self) -> None:
        await self.stop()
        await asyncio.to_thread(_remove, self._root)


def reap() -> None:
    """Remove the directories of runners that no longer exist."""
    for directory in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        owner = directory.name.removeprefix(PREFIX).partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            _remove(directory)


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path, ignore_errors=True)


def _marked(mark: str) -> list[int]:
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
