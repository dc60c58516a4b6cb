"""The asyncio end of a socket to a warden, keeper or preload server: requests out, replies back by number."""

import asyncio
import contextlib
import itertools
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from longrein.agents import packets
from longrein.errors import SandboxError

# Everything but running a program is a matter of milliseconds.
ANSWER_S = 60.0


class Reply(NamedTuple):
    """An answer and the descriptors that came with it (the caller closes them)."""

    message: Mapping[str, Any]
    descriptors: Sequence[int]


class Refused(SandboxError):
    """The other end answered with an error; ``errno`` is the system's number, 0 if there is none."""

    def __init__(self, name: str, message: Mapping[str, Any]) -> None:
        super().__init__(f"{name}: {message['error']}")
        self.errno = int(message.get("errno") or 0)


class Peer:
    """One connection. When the other end is gone, every waiting request raises SandboxError."""

    def __init__(self, end: socket.socket, name: str) -> None:
        end.setblocking(False)
        self._end = end
        self._name = name
        self._waiting: dict[int, asyncio.Future[Reply]] = {0: asyncio.get_running_loop().create_future()}
        self._numbers = itertools.count(1)
        self._sending = asyncio.Lock()
        self._ended = asyncio.Event()
        self.alive = True
        asyncio.get_running_loop().add_reader(end.fileno(), self._receive)

    async def ready(self, timeout_s: float) -> Mapping[str, Any]:
        """What the other end says of itself once it is up. Raises SandboxError."""
        future = self._waiting[0]
        try:
            async with asyncio.timeout(timeout_s):
                return (await future).message
        except TimeoutError:
            raise SandboxError(f"{self._name}: not ready after {timeout_s:.0f} s") from None

    async def ask(
        self, message: Mapping[str, Any], descriptors: Sequence[int] = (), timeout_s: float | None = ANSWER_S
    ) -> Reply:
        """Send a request and wait for its reply. Raises Refused or SandboxError."""
        number = next(self._numbers)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            async with asyncio.timeout(timeout_s):
                await self.send({"id": number, **message}, descriptors)
                return await future
        except TimeoutError:
            raise SandboxError(f"{self._name}: no answer to {message['do']!r} after {timeout_s:.0f} s") from None
        finally:
            self._waiting.pop(number, None)

    async def send(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send a message that has no reply."""
        async with self._sending:
            while self.alive:
                try:
                    packets.send(self._end, message, descriptors)
                    return
                except BlockingIOError:
                    await asyncio.sleep(0.005)
                except OSError:
                    self._gone()
        raise SandboxError(f"{self._name}: died")

    def close(self) -> None:
        """Close our end; the other one ends itself."""
        if self.alive:
            self._gone()

    async def end(self, timeout_s: float) -> None:
        """Close our end and wait, so long at most, until the other process is through."""
        if self.alive:
            self._end.shutdown(socket.SHUT_WR)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._ended.wait()
        self.close()

    def _receive(self) -> None:
        try:
            packet = packets.receive(self._end)
        except BlockingIOError:
            return
        if packet is None:
            self._gone()
            return
        message, descriptors = packet
        future = self._waiting.get(message["id"])
        if future is None or future.done():
            for descriptor in descriptors:
                os.close(descriptor)
        elif "error" in message:
            future.set_exception(Refused(self._name, message))
        else:
            future.set_result(Reply(message, descriptors))

    def _gone(self) -> None:
        self.alive = False
        self._ended.set()
        asyncio.get_running_loop().remove_reader(self._end.fileno())
        self._end.close()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(SandboxError(f"{self._name}: died"))
                # Whoever waited may have gone already.
                future.exception()
        self._waiting.clear()
