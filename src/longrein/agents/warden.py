"""The one process a runner starts: it forks the keepers of sandboxes and the servers that preload harnesses.

Run as ``python -m longrein.agents.warden FD``. It stays small and single-threaded, so that forking it is cheap and
safe whatever the trainer is doing. As root it gives every sandbox a user of its own; for an ordinary user it first
becomes root of a user namespace, and sandboxes are nested in it. It ends when its socket's other end closes.
"""

import errno
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from longrein.agents import entering, mounts, packets
from longrein.agents.keeper import Spec, keep

# A range that Linux distributions leave unused; each sandbox takes the next that no other sandbox has.
FIRST_UID, UIDS = 60706, 478
HOME = "/root"


def main() -> None:
    end = socket.socket(fileno=int(sys.argv[1]))
    try:
        mounts.private_mounts() if os.geteuid() == 0 else mounts.become_root_of_user_namespace()
    except OSError as error:
        packets.send(end, {"id": 0, "error": error.strerror or str(error), "errno": error.errno})
        return
    many = _knows(FIRST_UID + UIDS)
    packets.send(end, {"id": 0})
    # Children are not waited for; whoever asked for them sees their sockets close.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    number = warden = os.getpid()
    while (packet := packets.receive(end)) is not None:
        message, descriptors = packet
        number += 1
        if os.fork() == 0:
            try:
                end.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.setsid()
                entering.end_with(warden)
                _become(message, descriptors, number if many else None)
            finally:
                os._exit(1)
        for descriptor in descriptors:
            os.close(descriptor)


def _knows(uid: int) -> bool:
    """Whether this user namespace has such a user (in a container or of an ordinary user it may not)."""
    ranges = (map(int, line.split()) for line in Path("/proc/self/uid_map").read_text().splitlines())
    return any(first <= uid < first + count for first, _, count in ranges)


def _become(message: dict[str, Any], descriptors: list[int], number: int | None) -> None:
    """``number`` says where to look for a free user; None takes root, the only one there is."""
    if message["become"] != "keeper":
        _preload(message, *descriptors)
        return
    uid, held = (0, None) if number is None else _free_user(number)
    spec = Spec(uid, message["disk_mb"], tuple(message["visible"]), message["bwrap"])
    keep(socket.socket(fileno=descriptors[0]), spec)
    del held


def _free_user(number: int) -> tuple[int, socket.socket]:
    """A user that no other sandbox of this machine has, and what holds it while the keeper lives.

    Two sandboxes with one user would share its process limit. The name of an abstract socket is taken once, by
    whichever runner asks first, and free again when the keeper ends, however it ends.
    """
    for place in range(UIDS):
        uid = FIRST_UID + (number + place) % UIDS
        held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            held.bind(f"\0longrein-user-{uid}")
        except OSError:
            held.close()
            continue
        return uid, held
    raise OSError(errno.EAGAIN, f"all {UIDS} users for sandboxes are taken")


def _preload(message: dict[str, Any], end: int, log: int) -> None:
    """Become a preload server: network and home are as in the sandboxes that its children will enter."""
    mounts.private_mounts()
    if not message["network"]:
        entering.unshare(entering.CLONE_NEWNET)
    _empty_home(message["visible"])
    nothing = os.open("/dev/null", os.O_RDONLY)
    for target, descriptor in enumerate((nothing, log, log)):
        os.dup2(descriptor, target)
    os.set_inheritable(end, True)
    os.chdir("/")
    os.execve(message["argv"][0], [*message["argv"], str(end)], message["env"])


def _empty_home(visible: list[str]) -> None:
    """A harness that reads its user's settings when imported must find none: the sandbox has none."""
    kept = [(path, os.open(path, os.O_PATH)) for path in visible if Path(path).is_relative_to(HOME)]
    mounts.mount("home", HOME, "tmpfs", mounts.MS_NOSUID | mounts.MS_NODEV, "mode=700,size=16m")
    for path, descriptor in kept:
        Path(path).mkdir(parents=True, exist_ok=True)
        mounts.mount(f"/proc/self/fd/{descriptor}", path, flags=mounts.MS_BIND | mounts.MS_REC)


if __name__ == "__main__":
    main()
