"""The sockets the gateway is reached through, and the server behind them."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from longrein.errors import ConfigError

BACKLOG = 1024


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
