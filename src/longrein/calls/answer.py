"""One call under way, and everybody who waits for it: the client that asked, and its retries.

The sample belongs to the answer, not to a connection, so a retry of the same body joins what is being sampled or is
given what was sampled.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from longrein.calls.dialect import Ask, Delta, Header, Reply
from longrein.calls.sessions import Opening
from longrein.config import AgentRule
from longrein.engines.engine import SampleChunk, SampleRequest
from longrein.errors import CallError


@dataclass(slots=True)
class Sample:
    """What the engine has given so far; complete once ``finish_reason`` is set."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: str = ""

    def take(self, chunk: SampleChunk) -> None:
        self.ids += chunk.ids
        self.logprobs += chunk.logprobs
        self.versions += [chunk.version] * len(chunk.ids)
        self.finish_reason = chunk.finish_reason or ""


class Answer:
    """A call's deltas, then its reply or its error, for any number of followers.

    Attributes:
        digest: of the request body; a body with the same digest is the same call.
        kept: whether the sample is complete, so that losing every follower no longer ends it.
        delivered: whether some follower was sent all of the reply.
        undelivered: whether it is recorded as not delivered.
    """

    def __init__(
        self,
        call_id: str,
        index: int,
        digest: bytes,
        ask: Ask,
        agent: AgentRule,
        header: Header,
        opening: Opening,
        request: SampleRequest,
    ) -> None:
        self.call_id = call_id
        self.index = index
        self.digest = digest
        self.ask = ask
        self.agent = agent
        self.header = header
        self.opening = opening
        self.request = request
        self.sample = Sample()
        self.reply: Reply | None = None
        self.error: CallError | None = None
        self.followers = 0
        self.kept = False
        self.delivered = False
        self.undelivered = False
        self.whole = True
        self._deltas: list[Delta] = []
        self._waiting: list[asyncio.Future[bool]] = []

    @property
    def ended(self) -> bool:
        return self.reply is not None or self.error is not None

    def publish(self, delta: Delta | None) -> None:
        if delta is not None:
            self._deltas.append(delta)
            self._wake()

    def complete(self, reply: Reply) -> None:
        self.reply = reply
        self._wake()

    def fail(self, error: CallError) -> None:
        if not self.ended:
            self.error = error
            self._wake()

    def _wake(self) -> None:
        for waiting in self._waiting:
            _tell(waiting, True)
        self._waiting.clear()

    async def follow(self, gone: "asyncio.Task[None]", keepalive_s: float) -> AsyncIterator[Delta | None]:
        """Every delta from the first on, and None after each ``keepalive_s`` of silence, until the end or ``gone``."""
        told = 0
        gone.add_done_callback(lambda _: self._wake())
        while True:
            while told < len(self._deltas):
                told += 1
                yield self._deltas[told - 1]
            if gone.done() or self.ended:
                return
            if not await self._news(keepalive_s):
                yield None

    async def _news(self, patience_s: float) -> bool:
        """Wait until something has changed; False once nothing has for so long."""
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[bool] = loop.create_future()
        self._waiting.append(waiting)
        bell = loop.call_later(patience_s, _tell, waiting, False)
        try:
            return await waiting
        finally:
            bell.cancel()
            if waiting in self._waiting:
                self._waiting.remove(waiting)


def _tell(waiting: "asyncio.Future[bool]", news: bool) -> None:
    if not waiting.done():
        waiting.set_result(news)
