"""One set of rollouts, however it is cut into calls, sessions, branches and micro-batches: the same loss and gradients.

The ways to cut are random; what is cut is the same. Sums over ranks are in ``test_ranks``.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from longrein.config import AlgorithmSection, LearnerSection
from longrein.learning.attention import use_forest_attention
from longrein.learning.backend import Backend, Packed
from longrein.learning.batch import TrainBatch, TrainGroup, TrainRollout
from longrein.learning.learner import Body, EmbeddedLearner
from longrein.learning.walk import Walk
from longrein.records import Call
from tests.forest.random_calls import make_call
from tests.learning.models import exact_model

WAYS = 50

# Of the plain steps between one gradient and the next: far enough that ratios differ from 1, not all of them clipped.
RATE = 3e-3

# Whatever is told of calls (ratios of a call, discounts, process rewards) depends on them by what it means.
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"name": "grpo"},
    "tokens": {"name": "dapo", "keep_groups": "all", "entropy_coefficient": 0.01, "overlong_limit": 14},
    "sequences": {"name": "gspo", "clip_low": 0.1, "clip_high": 0.1, "mini_batches": 2, "epochs": 2},
    "weights": {
        "name": "cispo",
        "importance": "band",
        "importance_level": "rollout",
        "epochs": 2,
        "cut_off": "mask",
        "importance_low": 0.2,
    },
}


def rollouts(seed: int) -> list[TrainGroup]:
    """Two groups of three rollouts of two sessions: a main one of two turns and a sub-agent's, on shared prompts."""
    random = np.random.default_rng(seed)

    def tokens(count: int) -> list[int]:
        return [int(token) for token in random.integers(0, 400, count)]

    groups = []
    for number in range(2):
        prompt, other, members = tokens(9), tokens(4), []
        for index, reward in enumerate((0.0, 1.0, 0.4)):
            calls, history = [], prompt
            for turn in range(2):
                calls.append(call(history, tokens(3 + index), f"{number}.{index}.{turn}", random))
                history = [*history, *calls[-1].completion_ids.tolist(), *tokens(2)]
            calls.append(call([*prompt[:5], *other], tokens(4), f"{number}.{index}.sub", random))
            members.append(TrainRollout(f"{number}.{index}", reward, tuple(calls), cut_off=index == 2))
        groups.append(TrainGroup(str(number), tuple(members)))
    return groups


def call(prompt: Sequence[int], completion: Sequence[int], name: str, random: np.random.Generator) -> Call:
    logprobs = (-6 + 0.3 * random.standard_normal(len(completion))).tolist()
    return make_call(list(prompt), list(completion), call_id=name, logprobs=logprobs)


def cut(groups: Sequence[TrainGroup], random: np.random.Generator) -> TrainBatch:
    """The same tokens in other calls, in another order, among replies that nobody received."""
    found = []
    for group in groups:
        members = []
        for rollout in group.rollouts:
            calls = [piece for each in rollout.calls for piece in pieces(each, random)]
            lost = calls[int(random.integers(len(calls)))]
            calls.append(replace(lost, call_id=f"{lost.call_id}.lost", delivered=False))
            members.append(replace(rollout, calls=tuple(calls[index] for index in random.permutation(len(calls)))))
        found.append(replace(group, rollouts=tuple(members)))
    return TrainBatch(tuple(found))


def pieces(whole: Call, random: np.random.Generator) -> list[Call]:
    """A call as one or several, each going on from the last."""
    length = len(whole.completion_ids)
    places = [0, *sorted({int(place) for place in random.integers(1, length, random.integers(0, 3))}), length]
    made = []
    for start, stop in itertools.pairwise(places):
        made.append(
            replace(
                whole,
                call_id=f"{whole.call_id}.{start}",
                prompt_ids=np.concatenate([whole.prompt_ids, whole.completion_ids[:start]]),
                completion_ids=whole.completion_ids[start:stop],
                logprobs=whole.logprobs[start:stop],
                versions=whole.versions[start:stop],
            )
        )
    return made


class Recording(torch.optim.SGD):
    """Plain steps, so that a difference in a gradient stays as small as it is; keeps each gradient."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        super().__init__(parameters, lr=RATE)
        self.gradients: list[Tensor] = []

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["lr"] = RATE
            self.gradients.append(torch.cat([parameter.grad.flatten() for parameter in group["params"]]))
        super().step()


def gradients(batch: TrainBatch, algorithm: AlgorithmSection, budget: int, kind: str) -> tuple[float, list[Tensor]]:
    """The loss of an update and the gradient of each of its steps, from the same start."""
    module = exact_model()
    backend: Backend = Walk(module, torch.float64)
    if kind == "packed":
        use_forest_attention(module)
        backend = Packed(module, torch.float64)
    section = LearnerSection(micro_batch_tokens=budget, grad_clip=1e9)
    learner = EmbeddedLearner(Body(module, None, backend, torch.float64, 1), section, algorithm)
    recording = Recording(learner._trained)
    learner._optimizer = recording  # type: ignore[assignment]
    report = learner.update(batch)
    assert report.optimizer_steps == algorithm.updates, report.why_not
    return report.loss, recording.gradients


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_gradient_does_not_depend_on_how_rollouts_are_cut(name: str) -> None:
    algorithm = AlgorithmSection(**ALGORITHMS[name])
    groups = rollouts(0)
    loss, wanted = gradients(TrainBatch(tuple(groups)), algorithm, 10_000, "packed")
    assert len(wanted) == algorithm.updates and all(float(each.norm()) > 1e-3 for each in wanted)
    random = np.random.default_rng(1)
    for way in range(WAYS // len(ALGORITHMS) + 1):
        budget = int(random.integers(16, 120))
        found, steps = gradients(cut(groups, random), algorithm, budget, ("packed", "walk")[way % 2])
        assert found == pytest.approx(loss, rel=1e-9)
        for one, other in zip(steps, wanted, strict=True):
            assert float((one - other).norm()) <= 1e-9 * float(other.norm())
