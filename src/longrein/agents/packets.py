"""Messages between the processes of a runner: one JSON object per packet, file descriptors alongside.

Standard library only and Python 3.9 at least: harness interpreters run this file too.
"""

import json
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

# A packet must fit the socket's buffer; what is larger travels as a file in memory.
LARGEST = 48 * 1024
MOST_DESCRIPTORS = 128

Message = Mapping[str, Any]


def pair() -> "tuple[socket.socket, socket.socket]":
    """Two connected ends; neither is inherited by programs that are executed."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(end: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    """Send one message. Raises OSError if the other end is gone, BlockingIOError if it does not keep up."""
    data = json.dumps(message).encode()
    if len(data) <= LARGEST:
        socket.send_fds(end, [data], list(descriptors))
        return
    file = memory_file(data)
    try:
        socket.send_fds(end, [b"@"], [file, *descriptors])
    finally:
        os.close(file)


def receive(end: socket.socket) -> "tuple[dict[str, Any], list[int]] | None":
    """The next message and its descriptors (the caller closes them); None when the other end is gone."""
    try:
        data, descriptors, _, _ = socket.recv_fds(end, LARGEST + 1, MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        return None
    if not data:
        return None
    if data == b"@":
        with os.fdopen(descriptors[0], "rb") as file:
            data = file.read()
        descriptors = descriptors[1:]
    return json.loads(data), descriptors


def memory_file(content: bytes) -> int:
    """A descriptor of an anonymous file that holds ``content``, positioned at its start."""
    descriptor = os.memfd_create("content")
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
