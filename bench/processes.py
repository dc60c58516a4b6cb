"""Processes of a benchmark: started with a pipe or as a command, measured, and ended."""

import multiprocessing
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

START_S = 120.0
"""Longest time until a process answers."""


def receive(pipe: Connection, seconds: float) -> Any:
    """What comes over a pipe.

    Raises:
        TimeoutError: nothing came in time.
        EOFError: the process at its other end has died.
    """
    if not pipe.poll(seconds):
        raise TimeoutError(f"nothing came from the other process in {seconds:g} s")
    return pipe.recv()


@contextmanager
def process(target: Callable[..., None], *given: Any) -> Iterator[tuple[int, Connection]]:
    """A process of its own with a pipe to it; sending None (done here too) ends it."""
    spawn = multiprocessing.get_context("spawn")
    mine, theirs = spawn.Pipe()
    child = spawn.Process(target=target, args=(theirs, *given), daemon=True)
    child.start()
    theirs.close()
    try:
        assert child.pid is not None
        yield child.pid, mine
    finally:
        with suppress(OSError):
            mine.send(None)
        child.join(20)
        child.kill()
        child.join()


@contextmanager
def command(arguments: Sequence[str], folder: Path, port: int, **environment: str) -> Iterator[int]:
    """A server's process, once it listens on ``port``.

    Raises:
        RuntimeError: it ended, or did not listen in time; says what it wrote last.
    """
    written = folder / "server.log"
    with written.open("w") as log:
        server = subprocess.Popen(
            arguments, cwd=folder, env={**os.environ, **environment}, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + START_S
        while not _listens(port):
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{arguments[0]} does not listen: {written.read_text()[-2000:]}")
            time.sleep(0.5)
        yield server.pid
    finally:
        server.terminate()
        try:
            server.wait(15)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
        return True
    return False


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def tree(pid: int) -> Iterator[int]:
    """A process and its descendants."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in children.read_text().split():
                yield from tree(int(child))


def resident_kib(pid: int) -> float:
    pages = 0
    for each in tree(pid):
        with suppress(OSError):
            pages += int(Path(f"/proc/{each}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024


def cpu_s(pid: int) -> float:
    ticks = 0
    for each in tree(pid):
        with suppress(OSError):
            after_name = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            ticks += int(after_name[11]) + int(after_name[12])
    return ticks / os.sysconf("SC_CLK_TCK")
