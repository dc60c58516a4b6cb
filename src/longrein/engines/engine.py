"""The seam every engine is spoken to through: token ids in, token ids and log-probabilities out.

Invariant: what ``prompt_ids`` says is what the model sees, and what a chunk says is what was sampled; nothing is
re-tokenised on the way.
"""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from longrein.records import POLICY, IntArray

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One continuation to sample.

    Attributes:
        prompt_ids: (P,) int32, P >= 1.
        max_tokens: most tokens to sample; ``P + max_tokens`` must fit ``Engine.context_length``.
        temperature: 0 is greedy.
        top_p: nucleus mass; 1.0 is the full vocabulary.
        top_k: 0 is the full vocabulary.
        stop_ids: sampling one of these ends the completion; the stop token is part of it.
        seed: reproduces the sample for equal batching; None draws from the engine's own generator.
        policy: name of the policy to sample from.
    """

    prompt_ids: IntArray
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_ids: frozenset[int] = frozenset()
    seed: int | None = None
    policy: str = POLICY


@dataclass(frozen=True, slots=True)
class SampleChunk:
    """Newly sampled tokens, at least one.

    Attributes:
        ids: sampled token ids.
        logprobs: log-probability of each, at the request's temperature over the full vocabulary (before top-p/top-k);
            for greedy, at temperature 1.
        version: version of the policy that sampled them.
        finish_reason: set on the last chunk only.
    """

    ids: list[int]
    logprobs: list[float]
    version: int
    finish_reason: FinishReason | None = None


class Engine(Protocol):
    """Samples continuations. Every method is called from the event loop; computing happens elsewhere."""

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and completion together."""
        ...

    @property
    def version(self) -> int:
        """Version of the weights being served."""
        ...

    def sample(self, request: SampleRequest) -> AsyncIterator[SampleChunk]:
        """Yield chunks until one carries a finish reason; closing the iterator early cancels the sample.

        Raises:
            EngineError: the request cannot be served, or the engine died.
        """
        ...

    async def publish(self, weights: Mapping[str, Any], version: int, policy: str = POLICY) -> None:
        """Serve new weights of a policy: full parameter name of the transformers module → tensor, all of them or the
        changed ones.

        Called with no sample in flight (the gate is closed and drained).
        """
        ...

    def describe(self) -> str:
        """One line for people."""
        ...

    async def close(self) -> None:
        """Cancel what is in flight and free the memory."""
        ...
