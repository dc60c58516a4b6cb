"""Imports a Python harness once, then forks into a sandbox for each rollout.

Run by the harness's own interpreter: ``python preload_server.py ENTRY IMPORT... FD``. It never runs harness code in
this process beyond the imports, holds no key of any rollout, and does not fork once an import has started a thread.
Standard library only and Python 3.9 at least.
"""

import atexit
import gc
import importlib
import importlib.util
import os
import random
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def main() -> None:
    # This file's directory holds modules of ours whose names a harness may use for its own.
    del sys.path[0]
    entering, packets = _beside("entering"), _beside("packets")
    entry, *imports, descriptor = sys.argv[1:]
    end = socket.socket(fileno=int(descriptor))
    end.set_inheritable(False)
    before = _open_descriptors()
    began = time.monotonic()
    try:
        function = _import(entry, imports)
        _single_thread()
    except Exception as error:
        packets.send(end, {"id": 0, "error": f"{type(error).__name__}: {error}", "errno": 0})
        return
    gc.collect()
    gc.freeze()
    kept = sorted(_open_descriptors() - before)
    packets.send(end, {"id": 0, "paths": _paths(), "seconds": time.monotonic() - began})
    Server(end, function, kept, entering, packets).serve()


def _beside(name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(f"_longrein_{name}", Path(__file__).with_name(f"{name}.py"))
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[module.__name__] = module
    specification.loader.exec_module(module)
    return module


def _open_descriptors() -> "set[int]":
    numbers = [int(path.name) for path in Path("/proc/self/fd").iterdir()]
    # The listing itself was one of them.
    return {number for number in numbers if Path(f"/proc/self/fd/{number}").is_symlink()}


def _import(entry: str, imports: "list[str]") -> "Callable[[], Any]":
    for name in imports:
        importlib.import_module(name)
    module, _, path = entry.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found  # type: ignore[no-any-return]


def _single_thread() -> None:
    count = len(list(Path("/proc/self/task").iterdir()))
    if count > 1:
        names = ", ".join(thread.name for thread in threading.enumerate()[1:]) or "native threads"
        raise RuntimeError(f"importing the harness started {count - 1} threads ({names}); a fork would lose them")


def _paths() -> "list[str]":
    """Directories that later imports may read."""
    found = {sys.prefix, sys.base_prefix, *(path for path in sys.path if Path(path).is_dir())}
    return sorted(str(Path(path).absolute()) for path in found)


class Server:
    """Obeys one socket: each order is a rollout's command line; its reply comes when that process has ended."""

    def __init__(
        self, end: socket.socket, function: "Callable[[], Any]", kept: "list[int]", entering: Any, packets: Any
    ) -> None:
        self.end = end
        self.function = function
        self.kept = kept
        self.entering = entering
        self.packets = packets
        self.jobs: dict[int, int] = {}

    def serve(self) -> None:
        """Until the other end is gone."""
        ended, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        poll = select.poll()
        poll.register(self.end, select.POLLIN)
        poll.register(ended, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if ended in ready:
                os.read(ended, 4096)
                self.reap()
            if self.end.fileno() in ready:
                packet = self.packets.receive(self.end)
                if packet is None:
                    return
                self.obey(*packet)

    def reap(self) -> None:
        for pid in list(self.jobs):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self.packets.send(self.end, {"id": self.jobs.pop(pid), "status": status})

    def obey(self, message: "dict[str, Any]", descriptors: "list[int]") -> None:
        order = self.entering.Order.parse(message["order"])
        stdio, namespaces = descriptors[:3], dict(zip(message["namespaces"], descriptors[3:]))  # noqa: B905
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            pid = self.entering.spawn(namespaces, order, stdio, lambda: run(self.function, order), self.kept)
            self.jobs[pid] = message["id"]
        except OSError as error:
            self.packets.send(self.end, {"id": message["id"], "error": str(error.strerror), "errno": error.errno})
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


def run(function: "Callable[[], Any]", order: Any) -> int:
    """Call ``function`` as a console script would; returns the exit code."""
    os.environ.clear()
    os.environ.update(order.env)
    sys.argv = list(order.argv)
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    time.tzset()
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
    try:
        code = _exit_code(function())
    except SystemExit as ending:
        code = _exit_code(ending.code)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or 120
    return code


def _exit_code(value: object) -> int:
    if value is None:
        return 0
    if isinstance(value, int):
        return value
    print(value, file=sys.stderr)
    return 1


if __name__ == "__main__":
    main()
