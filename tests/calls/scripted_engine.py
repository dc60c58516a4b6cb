"""An engine that says what it is told to say, as fast or as slowly, and fails when it should."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from longrein.calls.services import Recorder
from longrein.engines.engine import SampleChunk, SampleRequest
from longrein.errors import EngineError, LedgerError
from longrein.records import Call


@dataclass
class Line:
    """One reply: ids to sample, seconds before each, an error after ``fail_after``, a wait after the first."""

    ids: list[int]
    delay_s: float = 0.0
    fail_after: int | None = None
    gate: asyncio.Event | None = None

    def hold(self) -> asyncio.Event:
        """Stop after the first token until the event is set."""
        self.gate = asyncio.Event()
        return self.gate


@dataclass
class ScriptedEngine:
    """Plays its lines in order; the last one again and again.

    Attributes:
        requests: what was asked, in order.
        running: samples under way now.
        cancelled: samples that were closed early.
    """

    encode: Callable[[str], Sequence[int]]
    context_length: int = 4096
    version: int = 0
    lines: list[Line] = field(default_factory=list)
    requests: list[SampleRequest] = field(default_factory=list)
    running: int = 0
    cancelled: int = 0

    def say(self, text: str | Sequence[int], *, delay_s: float = 0.0, fail_after: int | None = None) -> Line:
        """Add a line; text is tokenised, special tokens included (end it with the stop token, or it ends by length)."""
        ids = list(self.encode(text)) if isinstance(text, str) else list(text)
        line = Line(ids, delay_s, fail_after)
        self.lines.append(line)
        return line

    async def sample(self, request: SampleRequest) -> AsyncIterator[SampleChunk]:
        line = self.lines[min(len(self.requests), len(self.lines) - 1)]
        self.requests.append(request)
        self.running += 1
        ended = False
        try:
            ids = line.ids[: request.max_tokens]
            for i, token in enumerate(ids):
                if line.fail_after == i:
                    ended = True
                    raise EngineError("the script says so")
                if line.gate is not None and i > 0:
                    await line.gate.wait()
                await asyncio.sleep(line.delay_s)
                stopped = token in request.stop_ids
                last = stopped or i == len(ids) - 1
                ended = last
                reason = ("stop" if stopped else "length") if last else None
                yield SampleChunk([token], [-0.25 * (i + 1)], self.version, reason)
                if last:
                    return
        finally:
            self.running -= 1
            self.cancelled += not ended

    def describe(self) -> str:
        return type(self).__name__

    async def publish(self, weights: Mapping[str, Any], version: int, policy: str = "policy") -> None:
        self.version = version

    async def close(self) -> None:
        pass


@dataclass
class Notebook(Recorder):
    """A recorder that keeps calls in memory: when ``hold`` is set, and not at all if ``broken``."""

    calls: list[Call] = field(default_factory=list)
    delivered: dict[str, bool] = field(default_factory=dict)
    hold: asyncio.Event = field(default_factory=asyncio.Event)
    broken: bool = False

    def __post_init__(self) -> None:
        self.hold.set()

    async def record(self, call: Call) -> None:
        await self.hold.wait()
        if self.broken:
            raise LedgerError("the disk is full")
        self.calls.append(call)
        self.delivered[call.call_id] = call.delivered

    async def deliver(self, call_id: str, delivered: bool) -> None:
        await asyncio.sleep(0)
        self.delivered[call_id] = delivered


def told(call: Call) -> list[int]:
    """All tokens of a call: what the next one may continue."""
    return [int(i) for i in np.concatenate([call.prompt_ids, call.completion_ids])]
