"""Enter a sandbox from outside and give up everything that is not needed there.

A process enters by forking: the child joins the sandbox's namespaces and forks once more, because only a child born
after the join lives in the new pid namespace. The grandchild gives up every capability, takes its limits and then
runs its body, a program or (for a preloaded harness) a function. The child stays outside, waits, and ends exactly as
the grandchild did, so whoever forked it learns the true exit status.

Standard library only and Python 3.9 at least: harness interpreters run this file too.
"""

import contextlib
import ctypes
import errno
import os
import resource
import select
import signal
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

# The user namespace comes first: it gives the right to join the others. Names as in /proc/PID/ns.
NAMESPACES = {
    "user": CLONE_NEWUSER,
    "mnt": CLONE_NEWNS,
    "net": CLONE_NEWNET,
    "ipc": CLONE_NEWIPC,
    "uts": CLONE_NEWUTS,
    "pid": CLONE_NEWPID,
}

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_CAPBSET_DROP = 24
PR_SET_NO_NEW_PRIVS = 38
START_S = 30.0
CAPABILITY_VERSION_3 = 0x20080522
LAST_CAPABILITY = 63

# What no namespace keeps apart, so that it would lead out of the sandbox: the kernel's keys (those of the trainer's
# session, too), sockets to the machine that hosts this one, and io_uring, which makes sockets unseen.
# ABI (AUDIT_ARCH_*) → its number of socket(2), and of add_key, request_key, keyctl, io_uring_setup.
FORBIDDEN = {
    0xC000003E: (41, (248, 249, 250, 425)),  # x86-64
    0x40000003: (359, (102, 286, 287, 288, 425)),  # i386; socketcall(2) hides what it asks for
    0xC00000B7: (198, (217, 218, 219, 425)),  # AArch64
    0x40000028: (281, (309, 310, 311, 425)),  # Arm
    0xC00000F3: (198, (217, 218, 219, 425)),  # RISC-V
}
FAMILIES = (1, 2, 10, 16)  # unix, IPv4, IPv6, netlink
X32 = 0x40000000
BPF_LOAD, BPF_EQUAL, BPF_AT_LEAST, BPF_RETURN = 0x20, 0x15, 0x35, 0x06
NUMBER_AT, ABI_AT, FIRST_ARGUMENT_AT = 0, 4, 16
SECCOMP_MODE_FILTER, SECCOMP_ERRNO, SECCOMP_ALLOW = 2, 0x00050000, 0x7FFF0000

libc = ctypes.CDLL(None, use_errno=True)


class Limits(NamedTuple):
    """What one process inside may use. Bytes, processes of the sandbox, open files of the process."""

    memory: int
    processes: int
    file_size: int
    open_files: int = 4096


class Order(NamedTuple):
    """A program to run inside: sent as JSON from process to process."""

    argv: Sequence[str]
    env: Mapping[str, str]
    # The first of these that can be entered.
    cwd: Sequence[str]
    limits: Limits

    @classmethod
    def parse(cls, tree: Mapping[str, object]) -> "Order":
        limits = Limits(*tree["limits"])  # type: ignore[misc]
        return cls(tree["argv"], tree["env"], tree["cwd"], limits)  # type: ignore[arg-type]


def check(result: int, action: str) -> int:
    """``result`` of a libc call, or OSError that names ``action``."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{action}: {os.strerror(number)}")
    return result


def unshare(flags: int) -> None:
    check(libc.unshare(flags), "unshare")


def end_with(parent: int) -> None:
    """Be killed when ``parent``, our parent, ends. A change of user undoes it."""
    check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "ending with the parent")
    if os.getppid() != parent:
        os._exit(1)


def spawn(
    namespaces: Mapping[str, int],
    order: Order,
    stdio: Sequence[int],
    body: "Callable[[], int] | None" = None,
    keep: Sequence[int] = (),
) -> int:
    """Start ``order`` inside; returns the pid to wait for, whose status will be the program's.

    ``namespaces`` maps names of NAMESPACES (those the caller is not in already) to file descriptors, ``stdio`` holds
    the three standard descriptors. ``body`` is called in place of executing ``order.argv``; ``keep`` stay open for it.
    Raises OSError if the sandbox cannot be entered or the program not started.
    """
    troubles, report = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(troubles)
        _outside(namespaces, order, stdio, body, keep, report)
    os.close(report)
    with os.fdopen(troubles, "rb") as pipe:
        if not select.select([pipe], [], [], START_S)[0]:
            raise OSError(errno.ETIMEDOUT, f"{order.argv[0]} was not started after {START_S:.0f} s")
        trouble = pipe.read()
    if trouble:
        os.waitpid(pid, 0)
        number, _, text = trouble.decode(errors="replace").partition(" ")
        raise OSError(int(number), text)
    return pid


def _outside(
    namespaces: Mapping[str, int],
    order: Order,
    stdio: Sequence[int],
    body: "Callable[[], int] | None",
    keep: Sequence[int],
    report: int,
) -> None:
    """The first child. Never returns."""
    try:
        signal.set_wakeup_fd(-1)
        for name, flag in NAMESPACES.items():
            if name in namespaces:
                check(libc.setns(namespaces[name], flag), f"joining the sandbox's {name} namespace")
        pid = os.fork()
    except OSError as error:
        _fail(report, error)
    if pid == 0:
        _inside(order, stdio, body, keep, report)
    # What this process holds open must not outlive the sandbox, nor keep a pipe of the program's from ending.
    os.closerange(0, 65536)
    _end_as(os.waitpid(pid, 0)[1])


def _inside(
    order: Order, stdio: Sequence[int], body: "Callable[[], int] | None", keep: Sequence[int], report: int
) -> None:
    """The grandchild, in the sandbox. Never returns."""
    try:
        confine(order, stdio, (*keep, report))
        if body is None:
            _execute(order)
    except OSError as error:
        _fail(report, error)
    code = 70
    try:
        os.close(report)
        code = body() if body is not None else code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code & 0xFF)


def _execute(order: Order) -> None:
    # Python ignores these for itself; a program expects the defaults.
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execvpe(order.argv[0], list(order.argv), dict(order.env))
    except OSError as error:
        raise OSError(error.errno, f"{order.argv[0]} cannot be executed: {os.strerror(error.errno or 0)}") from None


def _fail(report: int, error: OSError) -> None:
    os.write(report, f"{error.errno or 0} {error.strerror or error}".encode())
    os._exit(70)


def _end_as(status: int) -> None:
    """End this process the way the process with this wait status ended."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


def confine(order: Order, stdio: Sequence[int], keep: Sequence[int] = ()) -> None:
    """Take the sandbox's working directory, limits and file descriptors; give up every privilege for good."""
    os.setsid()
    os.umask(0o022)
    for target, descriptor in enumerate(stdio):
        os.dup2(descriptor, target)
    _close_all_but((0, 1, 2, *keep))
    for number in signal.valid_signals():
        if number not in (signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _give_up_privileges()
    _limit(order.limits)
    _enter(order.cwd)


def _enter(directories: Sequence[str]) -> None:
    for directory in directories[:-1]:
        with contextlib.suppress(OSError):
            os.chdir(directory)
            return
    os.chdir(directories[-1])


def _close_all_but(kept: Sequence[int]) -> None:
    start = 0
    for descriptor in sorted(set(kept)):
        # An empty range must not reach the system call, which would take it for all descriptors.
        if descriptor > start:
            os.closerange(start, descriptor)
        start = descriptor + 1
    os.closerange(start, 65536)


def _give_up_privileges() -> None:
    # The kernel hides a process's own /proc entries from it after such changes, until told otherwise.
    check(libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0), "dumpable")
    # Out of memory, the kernel shall take a sandbox before it takes the trainer.
    Path("/proc/self/oom_score_adj").write_text("1000")
    # An ordinary user's namespace forbids this; the groups then mean nothing inside.
    with contextlib.suppress(PermissionError):
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    for capability in range(LAST_CAPABILITY + 1):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    check(libc.capset(header, nothing), "dropping capabilities")
    _forbid_calls()
    check(libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0), "dumpable")


def _forbid_calls() -> None:
    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))

    instructions = call_filter()
    program = Program(len(instructions) // 8, instructions)
    check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0), "forbidding system calls")


def call_filter() -> bytes:
    """The program by which the kernel refuses the calls of FORBIDDEN, as seccomp(2) takes it."""
    program = [(BPF_LOAD, 0, 0, ABI_AT)]
    for abi, (socket_call, forbidden) in FORBIDDEN.items():
        body = [(BPF_LOAD, 0, 0, NUMBER_AT), (BPF_AT_LEAST, 0, 1, X32), _refuse(errno.ENOSYS)]
        for call in forbidden:
            body += [(BPF_EQUAL, 0, 1, call), _refuse(errno.ENOSYS)]
        body += [(BPF_EQUAL, 1, 0, socket_call), (BPF_RETURN, 0, 0, SECCOMP_ALLOW)]
        body += [(BPF_LOAD, 0, 0, FIRST_ARGUMENT_AT)]
        for family in FAMILIES:
            body += [(BPF_EQUAL, 0, 1, family), (BPF_RETURN, 0, 0, SECCOMP_ALLOW)]
        body += [_refuse(errno.EAFNOSUPPORT)]
        program += [(BPF_EQUAL, 0, len(body), abi), *body]
    program += [(BPF_RETURN, 0, 0, SECCOMP_ALLOW)]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


def _refuse(number: int) -> "tuple[int, int, int, int]":
    return BPF_RETURN, 0, 0, SECCOMP_ERRNO | number


def _limit(limits: Limits) -> None:
    wanted = {
        # Not RLIMIT_AS: runtimes such as V8 reserve far more address space than they ever use.
        resource.RLIMIT_DATA: limits.memory,
        resource.RLIMIT_NPROC: limits.processes,
        resource.RLIMIT_FSIZE: limits.file_size,
        resource.RLIMIT_NOFILE: limits.open_files,
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in wanted.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
