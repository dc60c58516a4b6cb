"""What is published is read on the compute thread and served as the version it is."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from longrein.engines.engine import SampleChunk, SampleRequest
from longrein.errors import EngineError
from longrein.publishing.publish import publish


class Learner:
    """Weights of two policies, and which thread read them."""

    policies = ("policy", "planner")
    thread = ""

    def weights(self, policy: str) -> Mapping[str, Any]:
        self.thread = threading.current_thread().name
        return {"model.norm.weight": 1.5 if policy == "policy" else 2.5}


class Engine:
    """Keeps what it was given."""

    context_length = 8
    version = 0

    def __init__(self, refuses: bool = False) -> None:
        self.served: dict[str, Mapping[str, Any]] = {}
        self._refuses = refuses

    def sample(self, request: SampleRequest) -> AsyncIterator[SampleChunk]:
        raise NotImplementedError

    def describe(self) -> str:
        return "nothing"

    async def publish(self, weights: Mapping[str, Any], version: int, policy: str = "policy") -> None:
        if self._refuses:
            raise EngineError("samples are in flight")
        self.served[policy], self.version = weights, version

    async def close(self) -> None: ...


async def test_weights_are_served_under_their_version() -> None:
    learner, engine = Learner(), Engine()
    with ThreadPoolExecutor(1, thread_name_prefix="compute") as executor:

        async def compute(work: Callable[[str], Mapping[str, Any]], policy: str) -> Mapping[str, Any]:
            return await asyncio.get_running_loop().run_in_executor(executor, work, policy)

        await publish(learner, engine, 3, compute)
        assert engine.version == 3
        assert engine.served == {"policy": {"model.norm.weight": 1.5}, "planner": {"model.norm.weight": 2.5}}
        assert learner.thread.startswith("compute")
        with pytest.raises(EngineError, match="in flight"):
            await publish(learner, Engine(refuses=True), 4, compute)
