"""New weights, from the learner into an engine."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from longrein.engines.engine import Engine


class HasWeights(Protocol):
    """The part of a learner that is published."""

    def weights(self) -> Mapping[str, Any]:
        """Parameter names of the plain transformers module → tensors."""
        ...


Compute = Callable[[Callable[[], Mapping[str, Any]]], Awaitable[Mapping[str, Any]]]
"""Runs a function on the compute thread and awaits its result."""


async def publish(learner: HasWeights, engine: Engine, version: int, compute: Compute) -> None:
    """Make an engine serve the learner's weights as ``version``.

    Called behind a closed gate: no sample is in flight, and no update runs while the weights are read.

    Args:
        compute: runs ``learner.weights`` on the thread that the learner computes on.

    Raises:
        EngineError: the engine refused them; it serves what it served before.
    """
    await engine.publish(await compute(learner.weights), version)
