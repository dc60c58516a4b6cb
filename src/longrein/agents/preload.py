"""Preloaded harnesses: import once, fork for each rollout.

A server is started at the first trial that asks for it. If it cannot be used, or dies, trials start their harness
afresh instead; that is slower and otherwise the same.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from longrein.agents.peer import Peer, Refused
from longrein.agents.place import BASE_ENV
from longrein.agents.runner import Preload
from longrein.errors import SandboxError

IMPORT_S = 300.0
MOST_STARTS = 3
Fork = Callable[[Mapping[str, object], str, Sequence[int]], Awaitable[Peer]]

log = logging.getLogger(__name__)


class PreloadServer:
    """One interpreter with the harness imported; see ``preload_server.py``."""

    def __init__(self, peer: Peer, directories: Sequence[Path]) -> None:
        self._peer = peer
        self.directories = directories

    @classmethod
    async def start(cls, fork: Fork, preload: Preload, visible: Sequence[Path], network: bool) -> "PreloadServer":
        """Raises SandboxError with what the harness printed if its imports fail."""
        here = Path(__file__).parent
        script = str(here / "preload_server.py")
        printed = os.memfd_create("preload")
        message = {
            "become": "preload",
            "argv": [str(preload.python), script, preload.entry, *preload.imports],
            "env": {**BASE_ENV, "HOME": "/root", "TMPDIR": "/tmp", "USER": "root", **preload.env},
            "visible": [str(path) for path in (*visible, here)],
            "network": network,
        }
        peer = await fork(message, "preloaded harness", [printed])
        try:
            ready = await peer.ready(IMPORT_S)
        except SandboxError as error:
            peer.close()
            said = os.pread(printed, 4096, max(0, os.fstat(printed).st_size - 4096)).decode(errors="replace").strip()
            raise SandboxError(f"{error}{': ' if said else ''}{said}") from None
        finally:
            os.close(printed)
        return cls(peer, [Path(path) for path in ready["paths"]])

    @property
    def alive(self) -> bool:
        return self._peer.alive

    async def run(
        self, order: Mapping[str, object], stdio: Sequence[int], names: Sequence[str], namespaces: Sequence[int]
    ) -> int | None:
        """The wait status of the harness; None if it was not started. SandboxError if the server dies meanwhile."""
        if not self.alive:
            return None
        message = {"do": "run", "order": order, "namespaces": list(names)}
        try:
            reply = await self._peer.ask(message, [*stdio, *namespaces], timeout_s=None)
        except Refused as error:
            log.warning("starting the harness afresh: %s", error)
            return None
        return int(reply.message["status"])

    def close(self) -> None:
        self._peer.close()


class PreloadServers:
    """The servers of a runner, one for each ``Preload``."""

    def __init__(self, fork: Fork, network: bool) -> None:
        """``network``: whether sandboxes, and so their harnesses, have the host's network."""
        self._fork = fork
        self._network = network
        self._servers: dict[Preload, PreloadServer] = {}
        self._starts: dict[Preload, int] = {}
        self._starting = asyncio.Lock()

    async def directories(self, preload: Preload, visible: Sequence[Path]) -> Sequence[Path]:
        """Start the server if need be; the directories its interpreter reads."""
        async with self._starting:
            server = self._servers.get(preload)
            if server is None or not server.alive:
                server = await self._start(preload, visible)
        return server.directories if server is not None else ()

    def get(self, preload: Preload) -> PreloadServer | None:
        """The running server, or None: then start the harness afresh."""
        server = self._servers.get(preload)
        return server if server is not None and server.alive else None

    async def _start(self, preload: Preload, visible: Sequence[Path]) -> PreloadServer | None:
        starts = self._starts[preload] = self._starts.get(preload, 0) + 1
        if starts > MOST_STARTS:
            return None
        if starts > 1:
            log.warning("the preloaded harness %s died; preloading it again", preload.entry)
        try:
            self._servers[preload] = await PreloadServer.start(self._fork, preload, visible, self._network)
        except SandboxError as error:
            self._starts[preload] = MOST_STARTS
            log.warning("%s cannot be preloaded, so every rollout imports it: %s", preload.entry, error)
            return None
        return self._servers[preload]

    def close(self) -> None:
        for server in self._servers.values():
            server.close()
