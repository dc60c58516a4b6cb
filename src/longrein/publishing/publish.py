"""New weights, from the learner into an engine."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from longrein.engines.engine import Engine


class HasWeights(Protocol):
    """The part of a learner that is published."""

    @property
    def policies(self) -> Sequence[str]:
        """Names of what it trains."""
        ...

    def weights(self, policy: str) -> Mapping[str, Any]:
        """Parameter names of the plain transformers module → tensors."""
        ...


Compute = Callable[[Callable[[str], Mapping[str, Any]], str], Awaitable[Mapping[str, Any]]]
"""Runs a function of a policy's name on the compute thread and awaits its result."""


async def publish(learner: HasWeights, engine: Engine, version: int, compute: Compute) -> None:
    """Make an engine serve the learner's weights as ``version``.

    Called behind a closed gate: no sample is in flight, and no update runs while the weights are read.

    Args:
        compute: runs ``learner.weights`` on the thread that the learner computes on.

    Raises:
        EngineError: the engine refused them; it serves what it served before.
    """
    for policy in learner.policies:
        await engine.publish(await compute(learner.weights, policy), version, policy)
