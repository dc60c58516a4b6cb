"""What every rollout's calls are served with."""

from dataclasses import dataclass, field
from typing import Protocol

from longrein.calls.admission import Gate, Queue
from longrein.calls.agents import Agents
from longrein.calls.beside import Beside
from longrein.calls.rendering import Renderer
from longrein.config import GatewaySection, SamplingSection
from longrein.engines.engine import Engine
from longrein.records import Call


class Recorder(Protocol):
    """Where calls are kept (the ledger is one)."""

    async def record(self, call: Call) -> None:
        """Keep a call; it is durable when this returns."""
        ...

    async def deliver(self, call_id: str, delivered: bool) -> None:
        """Correct whether a recorded call's reply reached the harness."""
        ...


@dataclass(frozen=True, slots=True)
class Services:
    """What all rollouts share."""

    config: GatewaySection
    sampling: SamplingSection
    renderer: Renderer
    engine: Engine
    recorder: Recorder
    agents: Agents
    gate: Gate
    queue: Queue
    beside: Beside = field(default_factory=Beside)
