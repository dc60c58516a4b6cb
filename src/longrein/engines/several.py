"""Several policies served at once: one engine for each, all on the same compute thread, each with a cache of its own.

Invariant: a request is sampled by the policy it names and by no other.
"""

from collections.abc import AsyncIterator, Mapping
from typing import Any

from longrein.engines.engine import Engine, SampleChunk, SampleRequest
from longrein.errors import EngineError
from longrein.records import POLICY


class SeveralPolicies:
    """An ``Engine`` that hands each request to its policy's.

    Args:
        engines: policy → the engine that serves it; not empty.
    """

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self._engines = dict(engines)
        self.context_length = min(engine.context_length for engine in self._engines.values())

    @property
    def version(self) -> int:
        """The newest of any policy's weights."""
        return max(engine.version for engine in self._engines.values())

    def describe(self) -> str:
        """One line for people."""
        return "; ".join(f"{policy}: {engine.describe()}" for policy, engine in self._engines.items())

    def sample(self, request: SampleRequest) -> AsyncIterator[SampleChunk]:
        """See ``Engine``."""
        return self._of(request.policy).sample(request)

    async def publish(self, weights: Mapping[str, Any], version: int, policy: str = POLICY) -> None:
        """See ``Engine``."""
        await self._of(policy).publish(weights, version)

    async def close(self) -> None:
        """See ``Engine``."""
        for engine in self._engines.values():
            await engine.close()

    def _of(self, policy: str) -> Engine:
        engine = self._engines.get(policy)
        if engine is None:
            raise EngineError(f"no policy is called {policy!r}; served are {', '.join(self._engines)}.")
        return engine
