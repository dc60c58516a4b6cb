"""Carries bytes between a port inside a sandbox and the gateway's unix socket.

The listening socket belongs to us, not to the sandbox: the harness can neither see who answers nor end it. Buffers
are bounded, so a side that does not read makes the other wait; a side that has finished writing is still read from.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

CHUNK = 1 << 16
# Connections of one sandbox at once. More than this is a harness that has lost its way; they are closed at once.
MOST_CONNECTIONS = 64


@asynccontextmanager
async def relayed(listener: socket.socket | None, gateway: Path) -> AsyncIterator[None]:
    """Serve ``listener`` meanwhile; then close it and every connection. Without one there is nothing to do."""
    if listener is None:
        yield
        return
    relay = Relay(gateway)
    server = await asyncio.start_server(relay.accept, sock=listener, limit=CHUNK)
    try:
        yield
    finally:
        server.close()
        await relay.close()


class Relay:
    """The connections of one listener."""

    def __init__(self, gateway: Path) -> None:
        self._gateway = gateway
        self._connections: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= MOST_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._carry(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far: asyncio.StreamWriter | None = None
        try:
            far_reader, far = await asyncio.open_unix_connection(self._gateway, limit=CHUNK)
            async with asyncio.TaskGroup() as both:
                both.create_task(_pump(reader, far))
                both.create_task(_pump(far_reader, writer))
        except* OSError:
            pass  # one side hung up, and now the other learns it
        finally:
            for end in (writer, far):
                if end is not None:
                    end.transport.abort() if end.transport.get_write_buffer_size() else end.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(CHUNK):
        writer.write(data)
        await writer.drain()
    with contextlib.suppress(OSError):
        writer.write_eof()
