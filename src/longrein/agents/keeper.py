"""The process that holds one sandbox: its mounts, its quota, its phases.

It is forked by the warden, makes private mounts that vanish with it, and then obeys one socket. The sandbox's files
live in one memory file system of limited size; a *phase* (build, agent, verifier) is one bubblewrap over those files,
with its own pid, network and ipc namespaces, and ends by killing its pid 1. The keeper is outside all of them, so
nothing in the sandbox can reach it; when the socket's other end closes, it kills the phase and is gone.

The sandbox shows: the host's system directories, read-only (with what the task's Dockerfile copied into them laid
over); the harness's own directories, read-only, in the agent's phase; and the sandbox's own files everywhere else.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longrein.agents import entering, guard, mounts, packets

# The host's programs and their configuration. Anything else of the host is not there at all.
SYSTEM = ("usr", "etc", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
SKELETON = ("dev", "proc", "home", "logs", "mnt", "opt", "root", "run", "srv", "tmp", "var/cache", "var/lib", "var/log")

# In the keeper's own mounts /tmp is replaced by a small tree of mount points.
STAGE = Path("/tmp")
BOX = STAGE / "box"
VISIBLE = STAGE / "visible"
ROOT = BOX / "root"

START_S = 30.0
OWN_PROCESSES = 8
# Room the verifier has however full the harness left the disk.
VERIFIER_MB = 64
MOST_FILES = 64
GRACE_S = 0.2
# The pids, inside, of bubblewrap's own process and of the program that keeps the phase alive.
HOLDERS = 2


@dataclass(frozen=True)
class Spec:
    """What the keeper is told at birth."""

    uid: int
    disk_mb: int
    visible: tuple[str, ...]
    bwrap: str


@dataclass
class Phase:
    """One bubblewrap. ``holder`` is its pid 1, seen from outside."""

    monitor: "subprocess.Popen[bytes]"
    holder: int
    namespaces: dict[str, int]


def keep(end: socket.socket, spec: Spec) -> None:
    """Make the sandbox, then obey until the other end of ``end`` is gone. Never returns."""
    try:
        _stage(spec)
        warden = os.getppid()
        mounts.become_root_of_own_namespace(spec.uid)
        # However busy we are, or stuck.
        entering.end_with(warden)
        mounts.forbid_nested_namespaces()
        _make_box(spec)
    except OSError as error:
        packets.send(end, {"id": 0, "error": error.strerror or str(error), "errno": error.errno})
        os._exit(1)
    packets.send(end, {"id": 0})
    keeper = Keeper(end, spec)
    try:
        keeper.serve()
    finally:
        # Whatever happens from here on: with us, bubblewrap and all that is in it ends.
        signal.alarm(int(START_S))
        try:
            keeper.stop()
        finally:
            os._exit(0)


def _stage(spec: Spec) -> None:
    """Bind the visible directories where the sandbox's own user can find them, whoever may enter their parents."""
    mounts.private_mounts()
    sources = [os.open(path, os.O_PATH | os.O_CLOEXEC) for path in spec.visible]
    mounts.mount("stage", str(STAGE), "tmpfs", mounts.MS_NOSUID | mounts.MS_NODEV, "mode=755,size=1m")
    BOX.mkdir()
    VISIBLE.mkdir()
    for number, source in enumerate(sources):
        target = VISIBLE / str(number)
        if stat.S_ISDIR(os.fstat(source).st_mode):
            target.mkdir()
        else:
            target.touch()
        mounts.mount(f"/proc/self/fd/{source}", str(target), flags=mounts.MS_BIND | mounts.MS_REC)
        os.close(source)


def _make_box(spec: Spec) -> None:
    mounts.mount("box", str(BOX), "tmpfs", mounts.MS_NOSUID | mounts.MS_NODEV, _quota(spec.disk_mb))
    for name in ("root", "upper", "work", "tests", "shm", "trash"):
        (BOX / name).mkdir()
    for name in SKELETON:
        (ROOT / name).mkdir(parents=True)
    for path in (ROOT / "tmp", BOX / "shm"):
        path.chmod(0o1777)
    (ROOT / "var/tmp").symlink_to("/tmp")
    (ROOT / "root").chmod(0o700)
    (BOX / "logs").mkdir()
    for name in ("agent", "artifacts", "verifier"):
        (BOX / "logs" / name).mkdir()
    for name in SYSTEM:
        host = Path("/") / name
        if host.is_symlink():
            (ROOT / name).symlink_to(host.readlink())
        elif host.is_dir():
            for made in (ROOT, BOX / "upper", BOX / "work"):
                (made / name).mkdir()
            # What is copied to /usr before the first phase lands in the layer that will lie over the host's.
            mounts.mount(str(BOX / "upper" / name), str(ROOT / name), flags=mounts.MS_BIND)


def _quota(megabytes: int) -> str:
    return f"mode=755,size={megabytes}m,nr_inodes={megabytes * 256 + 1024}"


class Keeper:
    """Obeys one socket: each request is an operation with an ``id``; so is its reply."""

    def __init__(self, end: socket.socket, spec: Spec) -> None:
        self.end = end
        self.spec = spec
        self.root = os.open(ROOT, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self.tests = os.open(BOX / "tests", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self.phase: Phase | None = None
        self.jobs: dict[int, int] = {}
        self.before: guard.Before | None = None
        self.displaced: list[str] = []
        # The working directory, which alone the verifier takes over from the harness; None takes over everything.
        self.pristine: str | None = None

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
                packet = packets.receive(self.end)
                if packet is None:
                    return
                self.obey(*packet)

    def obey(self, message: dict[str, Any], descriptors: list[int]) -> None:
        number = message["id"]
        try:
            getattr(self, "do_" + message["do"])(number, message, descriptors)
        except OSError as error:
            self.reply(number, {"error": error.strerror or str(error), "errno": error.errno})
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def reply(self, number: int, message: dict[str, Any], passed: Sequence[int] = ()) -> None:
        packets.send(self.end, {"id": number, **message}, passed)

    def reap(self) -> None:
        for pid in list(self.jobs):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self.reply(self.jobs.pop(pid), {"status": status})

    def do_put(self, number: int, message: dict[str, Any], descriptors: list[int]) -> None:
        """Copy a file into the sandbox's own tree, or among the tests."""
        tree = self.tests if message["tree"] == "tests" else self.root
        mounts.write_within(tree, message["path"], message["mode"], descriptors[0])
        self.reply(number, {})

    def do_make(self, number: int, message: dict[str, Any], descriptors: list[int]) -> None:
        """Make a directory."""
        os.close(mounts.make_directories(self.root, message["path"]))
        self.reply(number, {})

    def do_fetch(self, number: int, message: dict[str, Any], descriptors: list[int]) -> None:
        """Hand out the regular files below a directory of /logs, open for reading."""
        found = list(mounts.regular_files(BOX / "logs" / message["path"], MOST_FILES, first=message["first"]))
        try:
            self.reply(number, {"names": [name for name, _ in found]}, [descriptor for _, descriptor in found])
        finally:
            for _, descriptor in found:
                os.close(descriptor)

    def do_watch(self, number: int, message: dict[str, Any], descriptors: list[int]) -> None:
        """Remember how things stand before the harness starts; with ``pristine``, keep them."""
        if message["pristine"]:
            self.pristine = message["workdir"]
            _copy(ROOT, BOX / "pristine", self.pristine)
        self.before = guard.look_before(ROOT, BOX / "began", message["workdir"], message["own"], SYSTEM)
        self.reply(number, {})

    def do_tampered(self, number: int, message: dict[str, Any], descriptors: list[int]) -> None:
        """Say what the harness left that may sway its verifier."""
        assert self.before is not None
        told = [*self.displaced, *guard.look_after(ROOT, self.before, message["env"], SYSTEM)]
        self.reply(number, {"told": guard.shortened(told)})

    def do_survivors(self, number: int, message: dict[str, Any], descriptors: list[int]) -> None:
        """Say which programs of the phase still run, after a moment for those about to end."""
        assert self.phase is not None
        until = time.monotonic() + GRACE_S
        while (told := list(_programs(self.phase))) and time.monotonic() < until:
            time.sleep(0.01)
        self.reply(number, {"told": guard.shortened(told)})

    def do_start(self, number: int, message: dict[str, Any], descriptors: list[int]) -> None:
        """Start a phase; hands out its namespaces and, with a ``port``, a listener on its loopback."""
        self.stop()
        if message["phase"] == "verifier":
            self._clear_for_verifier()
        self.phase = self._start(message["phase"], message["network"])
        names, passed = list(self.phase.namespaces), list(self.phase.namespaces.values())
        listener = _listen_inside(self.phase.namespaces["net"], message["port"]) if message["port"] else None
        self.reply(number, {"namespaces": names}, passed if listener is None else [*passed, listener])
        if listener is not None:
            os.close(listener)

    def do_run(self, number: int, message: dict[str, Any], descriptors: list[int]) -> None:
        """Run a program in the phase; the reply comes when it has ended."""
        assert self.phase is not None
        own = {name: descriptor for name, descriptor in self.phase.namespaces.items() if name != "user"}
        pid = entering.spawn(own, entering.Order.parse(message["order"]), descriptors)
        self.jobs[pid] = number

    def do_stop(self, number: int, message: dict[str, Any], descriptors: list[int]) -> None:
        """Kill the phase; when the reply comes, every process of it is dead."""
        self.stop()
        self.reply(number, {})

    def stop(self) -> None:
        phase, self.phase = self.phase, None
        if phase is None:
            return
        if phase.monitor.poll() is None:
            os.kill(phase.holder, signal.SIGKILL)
        phase.monitor.wait(START_S)
        for descriptor in phase.namespaces.values():
            os.close(descriptor)
        for pid in list(self.jobs):
            self.reply(self.jobs.pop(pid), {"status": os.waitpid(pid, 0)[1]})
        for name in self._layers():
            mounts.unmount(str(ROOT / name))

    def _clear_for_verifier(self) -> None:
        """Nothing the harness made may stand where the verifier's own things will be."""
        mounts.mount(
            "box",
            str(BOX),
            flags=mounts.MS_REMOUNT | mounts.MS_NOSUID | mounts.MS_NODEV,
            options=_quota(self.spec.disk_mb + VERIFIER_MB),
        )
        if self.pristine is not None:
            self._put_back(self.pristine)
        for path, mode in ((ROOT, 0o755), (ROOT / "tmp", 0o1777), (BOX / "logs", 0o755)):
            mounts.restore(path, mode, BOX / "trash")
        for path, name in ((ROOT / "tests", "/tests"), (BOX / "logs/verifier", "/logs/verifier")):
            if os.path.lexists(path) and (not stat.S_ISDIR(path.lstat().st_mode) or name == "/tests" or _holds(path)):
                self.displaced.append(f"{name}: the harness put something where only the verifier's things belong")
        for path in (ROOT / "tests", ROOT / "run", BOX / "logs/verifier", BOX / "shm", BOX / "bench"):
            mounts.discard(path, BOX / "trash")
            path.mkdir()
        (BOX / "shm").chmod(0o1777)
        for name in SYSTEM:
            host, link = Path("/") / name, ROOT / name
            if host.is_symlink() and not (link.is_symlink() and link.readlink() == host.readlink()):
                self.displaced.append(f"/{name}: the harness replaced the system's link")
                mounts.discard(link, BOX / "trash")
                link.symlink_to(host.readlink())

    def _put_back(self, workdir: str) -> None:
        """The tree as it was before the harness started, with the working directory as it is now."""
        kept = BOX / "kept"
        name = Path(workdir).name
        try:
            parent = mounts.open_within(self.root, str(Path(workdir).parent), os.O_PATH | os.O_DIRECTORY)
            with _closing(parent):
                os.rename(name, kept, src_dir_fd=parent)
        except OSError:
            self.displaced.append(f"{workdir}: the harness removed it, or what leads there")
        for path in [path for path in ROOT.iterdir() if path.name not in SYSTEM]:
            mounts.discard(path, BOX / "trash")
        for path in list((BOX / "pristine").iterdir()):
            path.rename(ROOT / path.name)
        if os.path.lexists(kept):
            with _closing(mounts.make_directories(self.root, str(Path(workdir).parent))) as parent:
                os.rename(kept, name, dst_dir_fd=parent)

    def _layers(self) -> list[str]:
        """System directories that the task's Dockerfile copied something into."""
        return [name for name in SYSTEM if (BOX / "upper" / name).is_dir() and any((BOX / "upper" / name).iterdir())]

    def _start(self, phase: str, network: bool) -> Phase:
        for name in self._layers():
            layers = f"lowerdir=/{name},upperdir={BOX}/upper/{name},workdir={BOX}/work/{name},userxattr"
            mounts.mount("overlay", str(ROOT / name), "overlay", mounts.MS_NOSUID | mounts.MS_NODEV, layers)
        information, inform = os.pipe()
        # Its own processes, too: the harness has the same user, so it could trace them and call through them.
        forbid = packets.memory_file(entering.call_filter())
        command = [*self._bubblewrap(phase, network), "--info-fd", str(inform), "--seccomp", str(forbid)]
        monitor = subprocess.Popen(
            [*command, "--", "/bin/sh", "-c", "echo; exec sleep infinity"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(inform, forbid),
            cwd="/",
            env={"PATH": os.defpath},
        )
        os.close(inform)
        os.close(forbid)
        _await_ready(monitor)
        with os.fdopen(information) as file:
            holder = json.load(file)["child-pid"]
        # The host's network namespace is not ours to join, nor do we have to: we never left it.
        names = [name for name in entering.NAMESPACES if name != "net" or not network]
        return Phase(monitor, holder, {n: os.open(f"/proc/{holder}/ns/{n}", os.O_RDONLY | os.O_CLOEXEC) for n in names})

    def _bubblewrap(self, phase: str, network: bool) -> list[str]:
        command = [self.spec.bwrap, "--die-with-parent", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
        command += [] if network else ["--unshare-net"]
        command += ["--hostname", "sandbox", "--cap-drop", "ALL", "--bind", str(ROOT), "/"]
        layers = self._layers()
        for name in SYSTEM:
            host = Path("/") / name
            # Asked of the host: the sandbox may have made a directory of that name for itself.
            if host.is_symlink() or not host.is_dir():
                continue
            if name not in layers:
                command += ["--ro-bind", f"/{name}", f"/{name}"]
            elif phase != "build":
                command += ["--remount-ro", f"/{name}"]
        command += ["--proc", "/proc", "--dev", "/dev", "--bind", str(BOX / "shm"), "/dev/shm", "--remount-ro", "/dev"]
        command += ["--bind", str(BOX / "logs"), "/logs"]
        if phase == "agent":
            for number, path in enumerate(self.spec.visible):
                command += ["--ro-bind", str(VISIBLE / str(number)), path]
        if phase == "verifier":
            command += ["--bind", str(BOX / "tests"), "/tests", "--bind", str(BOX / "bench"), "/run/verifier"]
        return command


def _copy(root: Path, to: Path, workdir: str) -> None:
    """Copy what is the sandbox's own, but not its working directory."""

    def left_out(directory: str, names: list[str]) -> set[str]:
        here = Path("/") / Path(directory).relative_to(root)
        return {name for name in names if (here == Path("/") and name in SYSTEM) or here / name == Path(workdir)}

    shutil.copytree(root, to, symlinks=True, ignore=left_out)


@contextlib.contextmanager
def _closing(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _holds(directory: Path) -> bool:
    """Whether anything is in it."""
    with os.scandir(directory) as entries:
        return next(entries, None) is not None


def _programs(phase: Phase) -> Iterator[str]:
    """The processes of a phase but those that hold it: each a line."""
    inside = os.fstat(phase.namespaces["pid"]).st_ino
    for entry in Path("/proc").iterdir():
        try:
            if not entry.name.isdigit() or (entry / "ns/pid").stat().st_ino != inside:
                continue
            state = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
            own = next(line for line in (entry / "status").read_text().splitlines() if line.startswith("NSpid:"))
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
        if state not in "ZX" and int(own.split()[-1]) > HOLDERS:
            yield f"still ran when the verifier had ended: {words or '(no name)'}"


def _await_ready(monitor: "subprocess.Popen[bytes]") -> None:
    """Wait for the line the holder prints once it stands in the finished sandbox."""
    assert monitor.stdout is not None and monitor.stderr is not None
    readable, _, _ = select.select([monitor.stdout], [], [], START_S)
    if not readable or not monitor.stdout.read(1):
        monitor.kill()
        monitor.wait()
        reason = monitor.stderr.read().decode(errors="replace").strip() or f"not ready after {START_S:.0f} s"
        raise OSError(0, f"bubblewrap could not make the sandbox: {reason}")
    monitor.stdout.close()
    monitor.stderr.close()


def _listen_inside(network: int, port: int) -> int:
    """A listening socket on the sandbox's loopback. It is ours: no process of the sandbox holds or can end it."""
    here, there = packets.pair()
    pid = os.fork()
    if pid == 0:
        try:
            entering.check(entering.libc.setns(network, entering.CLONE_NEWNET), "joining the network namespace")
            listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))
            listener.listen(64)
            packets.send(there, {}, [listener.fileno()])
        except OSError as error:
            packets.send(there, {"error": error.strerror})
        os._exit(0)
    there.close()
    packet = packets.receive(here)
    here.close()
    os.waitpid(pid, 0)
    if packet is None or "error" in packet[0]:
        raise OSError(0, f"port {port} of the sandbox: {packet[0]['error'] if packet else 'the helper died'}")
    return packet[1][0]
