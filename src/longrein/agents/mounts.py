"""Namespaces, mounts and path resolution, by the system calls themselves (the standard library has no names for them).

Errors are OSErrors that say what was attempted.
"""

import contextlib
import ctypes
import os
import shutil
import stat
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

from longrein.agents.entering import CLONE_NEWNS, CLONE_NEWUSER, check, libc, unshare

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC = 1, 2, 4, 32, 4096, 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2
SYS_OPENAT2 = 437
RESOLVE_NO_MAGICLINKS, RESOLVE_IN_ROOT = 0x02, 0x10


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    result = libc.mount(source.encode(), target.encode(), kind.encode() or None, flags, options.encode() or None)
    check(result, f"mounting {kind or source} at {target}")


def unmount(target: str) -> None:
    check(libc.umount2(target.encode(), MNT_DETACH), f"unmounting {target}")


def private_mounts() -> None:
    """From here on, what this process mounts is seen by it and its children alone, and vanishes with them."""
    unshare(CLONE_NEWNS)
    mount("none", "/", flags=MS_REC | MS_PRIVATE)


def become_root_of_own_namespace(uid: int) -> None:
    """Enter a new user namespace whose one user, root, is ``uid`` outside; also a mount namespace owned by it."""
    ready, done = os.pipe()
    parent = os.getpid()
    writer = os.fork()
    if writer == 0:
        # The map is written from outside: there, but no longer inside, we have the right to pick the user.
        os.close(done)
        os.read(ready, 1)
        _write_maps(parent, uid)
    os.close(ready)
    unshare(CLONE_NEWUSER | CLONE_NEWNS)
    os.close(done)
    status = os.waitpid(writer, 0)[1]
    if status:
        number = os.WEXITSTATUS(status)
        raise OSError(number, f"mapping user {uid} into a user namespace: {os.strerror(number)}")
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    mount("none", "/", flags=MS_REC | MS_PRIVATE)


def become_root_of_user_namespace() -> None:
    """The same for an ordinary user, who may map only itself."""
    uid, gid = os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER | CLONE_NEWNS)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    mount("none", "/", flags=MS_REC | MS_PRIVATE)


def _write_maps(pid: int, uid: int) -> None:
    try:
        for name in ("gid_map", "uid_map"):
            Path(f"/proc/{pid}/{name}").write_text(f"0 {uid} 1")
    except OSError as error:
        os._exit(error.errno or 1)
    os._exit(0)


def forbid_nested_namespaces() -> None:
    """Whoever can make a user namespace is root in it and could mount memory beyond every quota."""
    Path("/proc/sys/user/max_user_namespaces").write_text("0")


def open_within(root: int, path: str, flags: int, mode: int = 0) -> int:
    """Open ``path`` as a process with root directory ``root`` would: no symlink leads out."""
    how = struct.pack("QQQ", flags | os.O_CLOEXEC, mode, RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS)
    name = ctypes.c_char_p(path.encode())
    return check(libc.syscall(SYS_OPENAT2, root, name, how, len(how)), f"opening {path} in the sandbox")


def make_directories(root: int, path: str) -> int:
    """Make ``path`` and what is missing above it within ``root``; returns a descriptor of it (the caller closes it)."""
    current = open_within(root, ".", os.O_PATH | os.O_DIRECTORY)
    walked = ""
    for part in Path(path).parts:
        if part == "/":
            continue
        walked = f"{walked}/{part}"
        try:
            following = open_within(root, walked, os.O_PATH | os.O_DIRECTORY)
        except FileNotFoundError:
            os.mkdir(part, 0o755, dir_fd=current)
            following = open_within(root, walked, os.O_PATH | os.O_DIRECTORY)
        os.close(current)
        current = following
    return current


def write_within(root: int, path: str, mode: int, source: int) -> None:
    """Copy the file ``source`` to ``path`` within ``root``, replacing what is there."""
    os.close(make_directories(root, str(Path(path).parent)))
    target = open_within(root, path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode & 0o777)
    with os.fdopen(target, "wb") as to, os.fdopen(os.dup(source), "rb") as content:
        shutil.copyfileobj(content, to)
        os.fchmod(target, mode & 0o777)


def restore(path: Path, mode: int, trash: Path) -> None:
    """Make ``path`` a directory of this mode again, whatever was done to it; what is in a directory stays."""
    if path.is_symlink() or not path.is_dir():
        discard(path, trash)
        path.mkdir()
    with contextlib.suppress(OSError):
        # It would decide the modes of what is made there from now on.
        os.removexattr(path, "system.posix_acl_default")
    path.chmod(mode)


def discard(path: Path, trash: Path) -> None:
    """Take whatever is at ``path`` out of the way, following no link and however deep it is.

    ``trash`` is a directory of the same mount.
    """
    with contextlib.suppress(FileNotFoundError):
        path.rename(trash / f"{len(list(trash.iterdir()))}")


def regular_files(top: Path, limit: int, depth: int = 4, first: Sequence[str] = ()) -> Iterator[tuple[str, int]]:
    """Up to ``limit`` regular files below ``top``: relative path and an open descriptor (the caller closes it).

    Symlinks, devices and pipes are passed over, ``top`` included: none of them is content of the sandbox's own.
    ``first`` names files that come before all others of their directory.
    """
    try:
        # As a directory or not at all: opening a pipe would wait for whoever writes to it.
        opened = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        yield from _regular_files(opened, limit, depth, first)
    finally:
        os.close(opened)


def _regular_files(top: int, limit: int, depth: int, first: Sequence[str]) -> Iterator[tuple[str, int]]:
    count = 0
    for directory, names, files, here in os.fwalk(".", dir_fd=top):
        inner = Path(directory)
        names[:] = sorted(names) if len(inner.parts) < depth else []
        for name in sorted(files, key=lambda name: (name not in first, name)):
            if count == limit:
                return
            if not stat.S_ISREG(os.stat(name, dir_fd=here, follow_symlinks=False).st_mode):
                continue
            count += 1
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=here)
            yield str(inner / name), descriptor
