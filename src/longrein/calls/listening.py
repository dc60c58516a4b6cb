"""The sockets the gateway is reached through, and the server behind them."""

import asyncio
import contextlib
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from longrein.errors import ConfigError

BACKLOG = 1024

MOST_AHEAD = 64 * 1024
"""Bytes that are read of a connection's next requests while one is answered."""


class Server(uvicorn.Server):
    """uvicorn, leaving signals to whoever started it."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Protocol(H11Protocol):
    """uvicorn's, minding clients that send ahead of their turn and clients that only hold connections open."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            idle = next((other for other in self.connections if other is not self and _idle(other)), self)
            idle.transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # uvicorn stops to read once a next request has come, and would not see that the client hangs up.
        if self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) <= MOST_AHEAD:
            self.flow.resume_reading()


def most_connections() -> int:
    """Half of the files that this process may open: sandboxes and checkpoints need some, too."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2


def _idle(connection: object) -> bool:
    """Whether nothing is being answered on it."""
    return (
        isinstance(connection, H11Protocol)
        and not connection.transport.is_closing()
        and (connection.cycle is None or connection.cycle.response_complete)
    )


def tcp_listener(host: str, port: int) -> socket.socket:
    # Named as TCP, or asyncio leaves Nagle's delay on and every reply waits for an acknowledgement.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"gateway.host {host}, gateway.port {port}: cannot be listened on ({error.strerror}). Use port 0 for a "
            "free one."
        ) from None
    return listener


def unix_listener(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        # A sandbox may run as another user; the key protects the socket as it does the port.
        path.chmod(0o666)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"the gateway's socket {path} cannot be made ({error}). Its path may hold about 100 bytes."
        ) from None
    return listener
