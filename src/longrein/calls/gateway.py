"""The model endpoint: one key per rollout, one module per dialect, the same app on loopback TCP and on a unix socket.

A rollout's key opens that rollout's model calls while it runs, and nothing else. Keys are kept hashed and never logged.
"""

import asyncio
import hashlib
import secrets
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from longrein.calls.admission import Gate, Queue
from longrein.calls.agents import Agents
from longrein.calls.dialect import CountingDialect, Dialect, Target
from longrein.calls.listening import Protocol, Server, tcp_listener, unix_listener
from longrein.calls.reading import Paths, as_call_error, keys_in, parse_body, read_body
from longrein.calls.rendering import Renderer
from longrein.calls.rollout import OpenRollout, RolloutUse
from longrein.calls.routes import dialect_of, routes
from longrein.calls.sending import Delivery, error_headers
from longrein.calls.services import Recorder, Services
from longrein.config import AgentsSection, GatewaySection, SamplingSection
from longrein.engines.engine import Engine
from longrein.errors import CallError, ConfigError, ContextLengthExceeded, UnknownKey

START_S = 30.0
STOP_S = 10


class Gateway:
    """The model endpoint of a run.

    Args:
        config: host, port, limits.
        sampling: what every call samples with, whatever the harness wishes.
        renderer: conversations to tokens and back.
        engine: samples.
        recorder: keeps calls.
        socket: path of the unix socket (made on ``start``, removed on ``close``).
        agents: which calls belong to which role inside the harness.
    """

    def __init__(
        self,
        config: GatewaySection,
        sampling: SamplingSection,
        renderer: Renderer,
        engine: Engine,
        recorder: Recorder,
        socket: Path,
        agents: AgentsSection = AgentsSection(),  # noqa: B008
    ) -> None:
        self._services = Services(
            config, sampling, renderer, engine, recorder, Agents(agents), Gate(), Queue(config.queue)
        )
        self._rollouts: dict[str, OpenRollout] = {}
        self._keys: dict[bytes, OpenRollout] = {}
        self._socket = socket
        self._server: Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._url = ""

    @property
    def url(self) -> str:
        """``http://host:port`` (without ``/v1``); empty before ``start``."""
        return self._url

    @property
    def socket(self) -> Path:
        return self._socket

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: host and port, or the socket's path, cannot be listened on.
        """
        tcp = tcp_listener(self._services.config.host, self._services.config.port)
        try:
            unix = unix_listener(self._socket)
        except ConfigError:
            tcp.close()
            raise
        host, port = tcp.getsockname()[:2]
        self._url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._server = Server(
            uvicorn.Config(
                _app(self),
                http=Protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="critical",
                access_log=False,
                proxy_headers=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=STOP_S,
            )
        )
        self._serving = asyncio.create_task(self._server.serve(sockets=[tcp, unix]))
        listening = asyncio.create_task(self._server.listening.wait())
        await asyncio.wait({listening, self._serving}, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        listening.cancel()
        if self._serving.done():
            await self._serving

    async def close(self) -> None:
        """End every call and stop listening."""
        for rollout_id in list(self._rollouts):
            await self.close_rollout(rollout_id)
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving
            self._server = None
        self._services.beside.close()
        self._socket.unlink(missing_ok=True)

    # ---- for the controller

    def open_rollout(self, rollout_id: str, *, temperature: float | None = None, seed: int | None = None) -> str:
        """The key that opens this rollout's model calls.

        Args:
            temperature: of its calls, None for the configured one.
            seed: makes its samples reproducible for equal batching.
        """
        if rollout_id in self._rollouts:
            raise ValueError(f"rollout {rollout_id} is open already")
        if temperature is None:
            temperature = self._services.sampling.temperature
        key = f"lr-{secrets.token_urlsafe(32)}"
        rollout = OpenRollout(rollout_id, self._services, temperature, seed)
        self._rollouts[rollout_id] = rollout
        self._keys[_hashed(key)] = rollout
        return key

    async def close_rollout(self, rollout_id: str) -> RolloutUse:
        """Revoke the key, end its calls, and say what it used (nothing, for a rollout that is not open)."""
        rollout = self._rollouts.pop(rollout_id, None)
        if rollout is None:
            return RolloutUse()
        self._keys = {hashed: other for hashed, other in self._keys.items() if other is not rollout}
        return await rollout.close()

    async def pause(self, drain_s: float) -> int:
        """Hold new calls and wait until none is in flight; those that take over ``drain_s`` are cut at a token, and go
        on from there after ``resume``. Returns how many were.

        Raises:
            DeadlineExceeded: names the calls that could not be cut; calls are not held then.
        """
        return await self._services.gate.pause(drain_s)

    def resume(self) -> None:
        """Let held calls go on."""
        self._services.gate.resume()

    # ---- for clients

    def rollout_of(self, request: Request) -> OpenRollout:
        """The rollout whose key the request carries.

        Raises:
            UnknownKey: it carries none, or none that is open.
        """
        given = list(keys_in(request))
        for key in given:
            # What the time of a look-up could tell is of the digest, and says nothing of a key.
            if rollout := self._keys.get(_hashed(key)):
                return rollout
        what = "The key given belongs to no running rollout" if given else "No key was given"
        raise UnknownKey(f"{what}. Send the rollout's key as 'Authorization: Bearer KEY' or in the path, /k/KEY/v1.")

    async def ask(self, request: Request, dialect: Dialect, target: Target) -> Delivery | Response:
        """Answer one model call."""
        rollout = self.rollout_of(request)
        try:
            return await self._answer(rollout, request, dialect, target)
        except CallError as error:
            rollout.note_refusal(error)
            raise

    async def _answer(
        self, rollout: OpenRollout, request: Request, dialect: Dialect, target: Target
    ) -> Delivery | Response:
        raw = await self._body(request)
        digest = hashlib.sha256(f"{request.url.path} {sorted(target.query.items())}\n".encode() + raw).digest()
        async with rollout.reading(digest):
            answer = rollout.join(digest)
            if answer is None:
                return await self._begin(rollout, raw, digest, dialect, target)
        return Delivery(rollout, answer, dialect, self._services.config.keepalive_s)

    async def _begin(
        self, rollout: OpenRollout, raw: bytes, digest: bytes, dialect: Dialect, target: Target
    ) -> Delivery | Response:
        beside = self._services.beside
        body = await beside.run(len(raw), lambda: parse_body(raw))
        ask = await beside.run(len(raw), lambda: dialect.read(body, target))
        try:
            answer = await rollout.admit(ask, dialect, body, digest, target, len(raw))
        except ContextLengthExceeded as error:
            if not (dialect.overflow_in_stream and ask.stream):
                raise
            rollout.note_refusal(error)
            stream = dialect.stream(rollout.header(ask, dialect), ask)
            return Response(stream.begin() + stream.error(error), headers={"content-type": stream.content_type})
        return Delivery(rollout, answer, dialect, self._services.config.keepalive_s)

    async def count(self, request: Request, dialect: CountingDialect, target: Target) -> Response:
        """Say how many tokens a call's prompt would have."""
        rollout = self.rollout_of(request)
        raw = await self._body(request)
        beside = self._services.beside
        conversation = await beside.run(len(raw), lambda: dialect.read_count(parse_body(raw), target))
        return JSONResponse(dialect.count(await rollout.count(conversation, len(raw))))

    async def _body(self, request: Request) -> bytes:
        return await read_body(request, int(self._services.config.max_body_mb * 1024 * 1024))

    @property
    def model_name(self) -> str:
        """What the served model is called."""
        return self._services.config.model_name


def _app(gateway: Gateway) -> ASGIApp:
    async def refuse(request: Request, error: Exception) -> Response:
        if isinstance(error, ClientDisconnect):
            return Response(status_code=499)
        shown = as_call_error(request, error)
        status, body = dialect_of(request).error(shown)
        return JSONResponse(body, status_code=status, headers=error_headers(shown))

    app = Starlette(
        routes=routes(gateway),
        exception_handlers={
            HTTPException: refuse,
            CallError: refuse,
            ClientDisconnect: refuse,
            Exception: refuse,
        },
    )
    app.router.redirect_slashes = False
    return Paths(app)


def _hashed(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
