"""The targets: which tokens of the forest are credited, once each.

Invariant: every completion token of every trainable call is one row, whether or not other calls sampled the same token
at the same place and however often a harness plays it back; no other token is a row.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longrein.errors import LearnerError
from longrein.forest.forest import Forest, IndexArray, grow
from longrein.records import Call, FloatArray, IntArray, Role, RoleArray


@dataclass(frozen=True, slots=True)
class Targets:
    """One row per trained token: T rows, calls in the order given, tokens in the order sampled.

    Attributes:
        row: (T,) int64, packed index of the token that predicts it.
        token: (T,) int32, the token predicted.
        rollout, call: (T,) int32, indices into the batch's rollouts and into its trainable calls.
        agent: (T,) int32, index among the names of the agents that made calls.
        logprob: (T,) float32, the sampler's.
        version: (T,) int32, the policy version that sampled it.
        temperature: (T,) float32, what logits are divided by; 1 for a greedy call.
        role: (T,) uint8, its ``Role`` in a tool call; OTHER where the call has none or they are not known.
    """

    row: IndexArray
    token: IntArray
    rollout: IntArray
    call: IntArray
    agent: IntArray
    logprob: FloatArray
    version: IntArray
    temperature: FloatArray
    role: RoleArray

    def __len__(self) -> int:
        return len(self.row)


@dataclass(frozen=True, slots=True)
class Harvest:
    """A batch's calls, merged.

    Attributes:
        forest: all tokens of all trainable calls, each distinct prefix once.
        targets: what is trained.
        tokens_flat: tokens of the same calls, prompts and completions, with nothing shared.
    """

    forest: Forest
    targets: Targets
    tokens_flat: int


def trainable(call: Call) -> bool:
    """Whether the policy is to learn from this call: its agent is trained, its reply was delivered, and something was
    sampled.
    """
    return call.train and call.delivered and len(call.completion_ids) > 0


def harvest(rollouts: Sequence[Sequence[Call]]) -> Harvest:
    """Merge the calls of a batch's rollouts.

    Raises:
        LearnerError: a call is given twice, has no prompt, or its arrays do not belong together.
    """
    planted = [(rollout, call) for rollout, calls in enumerate(rollouts) for call in calls if trainable(call)]
    _check([call for _, call in planted])
    whole = [np.concatenate([call.prompt_ids, call.completion_ids]) for _, call in planted]
    forest, paths = grow(whole)
    counts = [len(call.completion_ids) for _, call in planted]

    def per_call(values: Iterable[Any], dtype: type) -> NDArray[Any]:
        return np.repeat(np.fromiter(values, dtype, len(counts)), counts)

    def per_token(values: Iterable[NDArray[Any]], dtype: type) -> NDArray[Any]:
        return np.concatenate([np.empty(0, dtype), *values]).astype(dtype, copy=False)

    agents = sorted({call.agent for _, call in planted})
    targets = Targets(
        row=per_token((path[-count - 1 : -1] for path, count in zip(paths, counts, strict=True)), np.int64),
        token=per_token((call.completion_ids for _, call in planted), np.int32),
        rollout=per_call((rollout for rollout, _ in planted), np.int32),
        call=per_call(range(len(planted)), np.int32),
        agent=per_call((agents.index(call.agent) for _, call in planted), np.int32),
        logprob=per_token((call.logprobs for _, call in planted), np.float32),
        version=per_token((call.versions for _, call in planted), np.int32),
        temperature=per_call((call.temperature or 1.0 for _, call in planted), np.float32),
        role=per_token((_roles(call) for _, call in planted), np.uint8),
    )
    return Harvest(forest, targets, sum(map(len, whole)))


def _roles(call: Call) -> RoleArray:
    return np.full(len(call.completion_ids), Role.OTHER, np.uint8) if call.roles is None else call.roles


def _check(calls: Sequence[Call]) -> None:
    seen: set[str] = set()
    for call in calls:
        sampled = len(call.completion_ids)
        if call.call_id in seen:
            raise LearnerError(f"call {call.call_id} is in the batch twice; its tokens would be trained twice.")
        if len(call.prompt_ids) == 0:
            raise LearnerError(f"call {call.call_id} has no prompt tokens, so nothing predicts its first token.")
        if len(call.logprobs) != sampled or len(call.versions) != sampled:
            raise LearnerError(
                f"call {call.call_id} has {sampled} sampled tokens but {len(call.logprobs)} log-probabilities and "
                f"{len(call.versions)} versions; the three belong together."
            )
        if call.roles is not None and len(call.roles) != sampled:
            raise LearnerError(
                f"call {call.call_id} has {sampled} sampled tokens but {len(call.roles)} roles; it needs one for each."
            )
        seen.add(call.call_id)
