"""Answers on their way to a client: whole or streamed, with a sign of life while they take long.

What is returned is whether the client was sent everything.
"""

import asyncio
from collections.abc import Mapping

from starlette.types import Message, Receive, Scope, Send

from longrein.calls.answer import Answer
from longrein.calls.dialect import Ask, Dialect
from longrein.calls.fields import as_json
from longrein.calls.rollout import OpenRollout
from longrein.errors import CallError

SEND_S = 60.0
"""Longest time a client may leave its connection full."""

MOST_NOTES = 1000
"""Characters of a header that says what was left out."""


class Delivery:
    """The ASGI response that follows one answer."""

    def __init__(self, rollout: OpenRollout, answer: Answer, dialect: Dialect, keepalive_s: float) -> None:
        self._rollout = rollout
        self._answer = answer
        self._dialect = dialect
        self._keepalive_s = keepalive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(_hung_up(receive))
        delivered = False
        try:
            connection = _Connection(send, gone)
            delivered = await (self._stream(connection) if self._answer.ask.stream else self._whole(connection))
        except _Gone:
            pass
        finally:
            gone.cancel()
            # Shielded, so that a server on its way out does not leave a delivery half told.
            await asyncio.shield(self._rollout.leave(self._answer, delivered=delivered))

    async def _stream(self, connection: "_Connection") -> bool:
        stream = self._dialect.stream(self._answer.header, self._answer.ask)
        await connection.start(
            200, {"content-type": stream.content_type, "cache-control": "no-cache", **_notes(self._answer.ask)}
        )
        await connection.send(stream.begin())
        async for delta in self._answer.follow(connection.gone, self._keepalive_s):
            await connection.send(stream.alive() if delta is None else stream.delta(delta))
        if self._answer.error is not None:
            await connection.end(stream.error(self._answer.error))
        if self._answer.reply is None:
            return False
        await connection.end(stream.end(self._answer.reply))
        return True

    async def _whole(self, connection: "_Connection") -> bool:
        # The status is sent late, so that an error can still have its own; white space before JSON means nothing.
        async for delta in self._answer.follow(connection.gone, self._keepalive_s):
            if delta is None:
                await connection.start(200, {"content-type": "application/json"})
                await connection.send(b" ")
        if self._answer.error is not None and not connection.started:
            await error_response(self._dialect, self._answer.error, connection)
        if self._answer.reply is None:
            # After a 200 an error cannot be told in the client's terms; a broken connection is one it retries.
            return False
        body = as_json(self._dialect.reply(self._answer.header, self._answer.ask, self._answer.reply))
        headers = {"content-type": "application/json", "content-length": str(len(body)), **_notes(self._answer.ask)}
        await connection.start(200, headers)
        await connection.end(body)
        return True


class _Gone(Exception):
    """The client hung up."""


class _Connection:
    """One client's response."""

    def __init__(self, send: Send, gone: "asyncio.Task[None]") -> None:
        self._send = send
        self.gone = gone
        self.started = False

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Send status and headers, once."""
        if not self.started:
            self.started = True
            raw = [(name.encode(), value.encode()) for name, value in headers.items()]
            await self._put({"type": "http.response.start", "status": status, "headers": raw})

    async def send(self, body: bytes) -> None:
        await self._put({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self, body: bytes) -> None:
        # A turn of the loop, so that a client that has hung up by now is known to have.
        await asyncio.sleep(0)
        await self._put({"type": "http.response.body", "body": body, "more_body": False})

    async def _put(self, message: Message) -> None:
        if self.gone.done():
            raise _Gone
        try:
            async with asyncio.timeout(SEND_S):
                await self._send(message)
        except TimeoutError:
            raise _Gone from None


async def error_response(dialect: Dialect, error: CallError, connection: _Connection) -> None:
    status, shown = dialect.error(error)
    body = as_json(shown)
    await connection.start(status, error_headers(error) | {"content-length": str(len(body))})
    await connection.end(body)


def error_headers(error: CallError) -> dict[str, str]:
    headers = {"content-type": "application/json"}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    return headers


def _notes(ask: Ask) -> dict[str, str]:
    """A header that says what was left out of the request."""
    said = "; ".join(ask.dropped)[:MOST_NOTES].encode("ascii", "replace").decode()
    said = "".join(character if character.isprintable() else " " for character in said)
    return {"longrein-dropped": " ".join(said.split())} if said else {}


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
