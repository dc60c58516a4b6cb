"""A bubblewrap sandbox for one trial, seen from the trainer.

Nothing of a sandbox is on disk: its files are in memory, in mounts that only its keeper holds, and the keeper ends
when its socket to us closes, however we end. So there is nothing to reap after a crash.

What holds inside, as root and as an ordinary user alike: own user (root there, nobody in particular outside), mount,
pid, network, ipc and host-name namespaces; no capabilities and no way to new ones; the host's system directories
read-only and nothing else of the host but the harness's own directories; limits on memory and file size of each
process, on processes, and on everything written.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from longrein.agents import packets
from longrein.agents.entering import Limits
from longrein.agents.keeper import OWN_PROCESSES
from longrein.agents.output import keep_files
from longrein.agents.peer import Peer, Refused, Reply
from longrein.agents.place import BASE_ENV, Phase, ending
from longrein.agents.preload import PreloadServers
from longrein.agents.rewards import FILES
from longrein.agents.runner import Launch, Preload
from longrein.config import RunnerSection
from longrein.errors import HarnessError, SandboxError, SandboxUnavailable

START_S = 60.0
STARTS = 3
"""How often the warden is started where it is killed before it is ready."""

MEGABYTE = 1 << 20
OWN = "/run/verifier"


class Warden:
    """The process that forks keepers and preload servers; see ``warden.py``."""

    def __init__(self, process: "subprocess.Popen[bytes]", peer: Peer) -> None:
        self._process = process
        self._peer = peer

    @classmethod
    async def start(cls) -> "Warden":
        """Raises SandboxUnavailable where this machine does not let us make namespaces."""
        bubblewrap()
        for _ in range(STARTS):
            here, there = packets.pair()
            process = await asyncio.to_thread(_start_warden, there)
            there.close()
            warden = cls(process, Peer(here, "sandbox warden"))
            try:
                await warden._peer.ready(START_S)
                return warden
            except SandboxError as error:
                await warden.close()
                if process.returncode >= 0:
                    raise SandboxUnavailable(explain(str(error))) from None
        raise SandboxUnavailable(
            f"The sandbox warden, which starts sandboxes, was killed as it started, {STARTS} times in a row, the last "
            f"time by {signal.Signals(-process.returncode).name}. Does this machine lack memory?"
        )

    @property
    def alive(self) -> bool:
        return self._peer.alive

    async def fork(self, become: Mapping[str, object], name: str, descriptors: Sequence[int] = ()) -> Peer:
        """A new child of the warden, over a socket of its own."""
        here, there = packets.pair()
        with there:
            try:
                await self._peer.send(become, [there.fileno(), *descriptors])
            except SandboxError:
                here.close()
                raise
        return Peer(here, name)

    async def close(self) -> None:
        self._peer.close()
        await asyncio.to_thread(self._process.wait)


def _start_warden(end: socket.socket) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-B", "-m", "longrein.agents.warden", str(end.fileno())],
        pass_fds=(end.fileno(),),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        env={**BASE_ENV, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )


def bubblewrap() -> str:
    """Path of the program. Raises SandboxUnavailable."""
    found = shutil.which("bwrap")
    if found is None:
        raise SandboxUnavailable(explain("bwrap is not installed"))
    return str(Path(found).resolve())


def explain(reason: str) -> str:
    """The paragraph a person needs where sandboxes cannot be made."""
    return (
        f"runner.sandbox: bubblewrap cannot be used on this machine: {reason}. It needs the program bwrap (Debian and "
        "Ubuntu: apt-get install bubblewrap), Linux 5.11 or newer, and leave to make user namespaces: sysctl "
        "user.max_user_namespaces above 0 and, where they exist, kernel.unprivileged_userns_clone=1 and "
        "kernel.apparmor_restrict_unprivileged_userns=0; in a container, start it privileged. For code you trust, "
        "runner.sandbox: none runs harnesses in plain directories, without isolation."
    )


class Sandbox:
    """One sandbox: a ``Place``."""

    def __init__(
        self, peer: Peer, section: RunnerSection, preloads: PreloadServers | None, own: Sequence[str] = ()
    ) -> None:
        """``own``: files that the harness brings."""
        self._peer = peer
        self._own = own
        self._section = section
        self._preloads = preloads
        self._phase: Phase | None = None
        self._names: list[str] = []
        self._namespaces: list[int] = []

    @classmethod
    async def open(
        cls, warden: Warden, section: RunnerSection, launch: Launch, preloads: PreloadServers | None = None
    ) -> "Sandbox":
        """Make one, with the directories of ``launch`` visible. Raises SandboxError."""
        visible = visible_directories(launch)
        if preloads is not None and launch.preload is not None:
            visible = outermost([*visible, *await preloads.directories(launch.preload, visible)])
        if section.network == "host":
            # The host's resolver may be configured in a file that lies outside /etc.
            visible = outermost([*visible, Path("/etc/resolv.conf").resolve()])
        spec = {
            "become": "keeper",
            "disk_mb": section.disk_mb,
            "visible": [str(path) for path in visible],
            "bwrap": bubblewrap(),
        }
        sandbox = cls(await warden.fork(spec, "sandbox"), section, preloads, list(launch.files))
        try:
            await sandbox._peer.ready(START_S)
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    def env(self, phase: Phase) -> Mapping[str, str]:
        """The verifier has directories of its own: the harness may have left settings and compiled code in its."""
        if phase == "verifier":
            return {**BASE_ENV, **dict.fromkeys(("HOME", "TMPDIR", "PYTHONPYCACHEPREFIX"), OWN), "USER": "root"}
        return {**BASE_ENV, "HOME": "/root", "TMPDIR": "/tmp", "USER": "root"}

    def map(self, text: str) -> str:
        return text

    async def make(self, path: str) -> None:
        await self._peer.ask({"do": "make", "path": path})

    async def put(self, path: str, content: bytes | Path, mode: int = 0o644) -> None:
        """What goes to /tests is kept outside of the harness's reach until the verifier starts."""
        tests = path.startswith("/tests/")
        message = {
            "do": "put",
            "tree": "tests" if tests else "root",
            "path": path.removeprefix("/tests") if tests else path,
            "mode": mode,
        }
        source = packets.memory_file(content) if isinstance(content, bytes) else os.open(content, os.O_RDONLY)
        try:
            await self._peer.ask(message, [source])
        except Refused as error:
            raise SandboxError(f"{path} could not be written: {error}") from None
        finally:
            os.close(source)

    async def start(self, phase: Phase, port: int | None) -> socket.socket | None:
        network = phase == "agent" and self._section.network == "host"
        message = {"do": "start", "phase": phase, "network": network, "port": None if network else port}
        reply = await self._peer.ask(message)
        self._phase = phase
        names = list(reply.message["namespaces"])
        descriptors = _all_descriptors(reply, len(names) + (message["port"] is not None))
        self._names, self._namespaces = names, descriptors[: len(names)]
        listeners = descriptors[len(names) :]
        return socket.socket(fileno=listeners[0]) if listeners else None

    async def run(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        stdout: int,
        stderr: int,
        preload: Preload | None = None,
    ) -> str:
        # A harness that removed or locked its working directory is judged all the same.
        cwds = [cwd, "/"] if self._phase == "verifier" else [cwd]
        order = {"argv": list(argv), "env": dict(env), "cwd": cwds, "limits": list(self._limits())}
        server = self._preloads.get(preload) if self._preloads is not None and preload is not None else None
        with nowhere() as nothing:
            stdio = [nothing, stdout, stderr]
            status = await server.run(order, stdio, self._names, self._namespaces) if server is not None else None
            if status is None:
                status = await self._cold(order, stdio)
        return ending(os.waitstatus_to_exitcode(status))

    async def _cold(self, order: Mapping[str, object], stdio: Sequence[int]) -> int:
        try:
            reply = await self._peer.ask({"do": "run", "order": order}, stdio, timeout_s=None)
        except Refused as error:
            raise HarnessError(f"cannot be started: {error}") from None
        return int(reply.message["status"])

    def _limits(self) -> Limits:
        section = self._section
        return Limits(section.memory_mb * MEGABYTE, section.processes + OWN_PROCESSES, section.disk_mb * MEGABYTE)

    async def watch(self, workdir: str) -> None:
        await self._peer.ask(
            {
                "do": "watch",
                "workdir": workdir,
                "own": self._own,
                "pristine": self._section.verifier_sees == "workdir",
            }
        )

    async def tampered(self, env: Mapping[str, str]) -> list[str]:
        asked = {name: env[name] for name in ("PATH", "PYTHONPATH") if name in env}
        return list((await self._peer.ask({"do": "tampered", "env": asked})).message["told"])

    async def survivors(self) -> list[str]:
        return list((await self._peer.ask({"do": "survivors"})).message["told"])

    async def stop(self) -> None:
        self._release()
        await self._peer.ask({"do": "stop"})

    async def fetch(self, name: str, to: Path) -> None:
        reply = await self._peer.ask({"do": "fetch", "path": name, "first": FILES})
        names = reply.message["names"]
        await asyncio.to_thread(keep_files, zip(names, _all_descriptors(reply, len(names)), strict=True), to)

    async def close(self) -> None:
        """The keeper sees its socket close, kills what is left and ends, and the mounts with it."""
        self._release()
        with contextlib.suppress(SandboxError):
            await self._peer.ask({"do": "stop"})
        await self._peer.end(START_S)

    def _release(self) -> None:
        for descriptor in self._namespaces:
            os.close(descriptor)
        self._namespaces = []


def _all_descriptors(reply: Reply, count: int) -> list[int]:
    """Those of a reply. The kernel leaves out what this process may not hold open as well."""
    if len(reply.descriptors) == count:
        return list(reply.descriptors)
    for descriptor in reply.descriptors:
        os.close(descriptor)
    raise SandboxError("too many open files: raise the limit (ulimit -n), or lower runner.concurrency")


def visible_directories(launch: Launch) -> list[Path]:
    """The harness's own directories, with the interpreters that virtual environments among them lean on."""
    found = list(launch.readable)
    for directory in launch.readable:
        found += interpreter_directories(directory)
    if launch.preload is not None:
        environment = launch.preload.python.parent.parent
        found += [environment, *interpreter_directories(environment)]
    return outermost(found)


def interpreter_directories(environment: Path) -> list[Path]:
    """Where the interpreter of a virtual environment is installed, as ``pyvenv.cfg`` says; none if it is not one."""
    settings = environment / "pyvenv.cfg"
    if not settings.is_file():
        return []
    pairs = (line.partition("=") for line in settings.read_text().splitlines())
    homes = [Path(value.strip()).parent for key, _, value in pairs if key.strip() == "home"]
    return [home for home in homes if home.is_absolute()]


def outermost(paths: Iterable[Path]) -> list[Path]:
    """Those that exist and do not lie inside another or inside what every sandbox shows anyway."""
    unique = sorted(path for path in set(paths) if path.exists())
    shown = [Path("/usr"), Path("/etc")]
    kept: list[Path] = []
    for path in unique:
        if not any(path.is_relative_to(other) for other in (*shown, *kept)):
            kept.append(path)
    return kept


@contextlib.contextmanager
def nowhere() -> Iterator[int]:
    """A descriptor that gives nothing to read and takes anything."""
    descriptor = os.open(os.devnull, os.O_RDWR)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


async def check_sandbox(section: RunnerSection) -> str:
    """Make a small sandbox for real and run a program in it; a line about it.

    Raises:
        SandboxUnavailable: one paragraph: what is missing, how to enable it, and the alternative.
    """
    began = time.monotonic()
    warden = await Warden.start()
    try:
        sandbox = await Sandbox.open(warden, section, Launch(("true",)))
        try:
            listener = await sandbox.start("agent", 1)
            with nowhere() as nothing:
                ended = await sandbox.run(["true"], sandbox.env("agent"), "/tmp", nothing, nothing)
            if listener is not None:
                listener.close()
        finally:
            await sandbox.close()
        if ended != "exited 0":
            raise SandboxUnavailable(explain(f"the program true {ended}"))
    except SandboxUnavailable:
        raise
    except (SandboxError, HarnessError) as error:
        raise SandboxUnavailable(explain(str(error))) from None
    finally:
        await warden.close()
    return f"bubblewrap: a sandbox started, ran and was removed in {time.monotonic() - began:.2f} s"
