"""Whole updates over a forest against naive ones without: the gradient of every optimizer step, in float64."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from longrein.config import AlgorithmSection, LearnerSection, LoraSection, ProcessSection
from longrein.errors import LearnerError
from longrein.learning.adapters import attach, without
from longrein.learning.attention import use_forest_attention
from longrein.learning.backend import Packed
from longrein.learning.batch import TrainBatch, TrainGroup, TrainRollout, Work
from longrein.learning.figures import UpdateReport
from longrein.learning.learner import Body, EmbeddedLearner
from longrein.learning.walk import Walk
from longrein.presets import PRESETS
from longrein.records import Call
from tests.forest.random_calls import make_call
from tests.learning import models, naive, separately

LORA = LoraSection(rank=4, alpha=8.0)


@dataclasses.dataclass(frozen=True)
class How:
    """How the forest is computed: in micro-batches of so many tokens, by which back end."""

    budget: int
    forest: Literal["packed", "walk"] = "packed"


class ExactLearner(EmbeddedLearner):
    """In float64 and by plain gradient descent. ``gradients`` keeps that of each optimizer step, all in one vector."""

    def __init__(self, algorithm: AlgorithmSection, rate: float, how: How) -> None:
        module = models.exact_model()
        if how.forest == "packed":
            use_forest_attention(module)
        backend = (Packed if how.forest == "packed" else Walk)(module, torch.float64)
        lora = LORA if algorithm.kl_coefficient else None
        body = Body(module, attach(module, lora) if lora else None, backend, torch.float64, threads=1)
        section = LearnerSection(micro_batch_tokens=how.budget, learning_rate=rate, grad_clip=1e12, lora=lora)
        super().__init__(body, section, algorithm)
        descent: Any = torch.optim.SGD(self._trained, lr=rate)
        self._optimizer = descent
        self.gradients: list[Tensor] = []
        descent.register_step_pre_hook(lambda *_: self.gradients.append(separately.gradient(self.module)))


def descend(
    module: Any, batch: TrainBatch, algorithm: AlgorithmSection, rate: float, reference: dict[str, Tensor] | None
) -> tuple[list[Tensor], list[float]]:
    """The gradient of each optimizer step, and each step's loss, naively. A step whose gradient is zero is none."""
    with torch.no_grad():
        proximal = {call.call_id: separately.token_logprobs(module, call) for call in calls_of(batch)}
    gradients, losses = [], []
    for chosen in naive.optimizer_steps(len(batch.groups), algorithm):
        module.zero_grad()
        loss = naive.loss(separately.attempts(module, batch, proximal, reference), algorithm, chosen)
        losses.append(float(loss.detach()))
        if loss.requires_grad:
            torch.autograd.backward(loss)
        gradient = separately.gradient(module)
        if float(gradient.norm()) == 0:
            continue
        gradients.append(gradient)
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter -= rate * parameter.grad
    return gradients, losses


def calls_of(batch: TrainBatch) -> list[Call]:
    return [call for rollout in batch.rollouts for call in rollout.calls]


def random_batch(module: Any, random: np.random.Generator, sizes: list[int], process: bool) -> TrainBatch:
    """Rollouts of calls that extend one another, now and then start anew, and are not all delivered.

    The second group has no contrast. What the sampler says lies beside what the module says.
    """
    groups = []
    for number, size in enumerate(sizes):
        prompt = random.integers(0, 30, 6).tolist()
        rollouts = []
        for index in range(size):
            reward = 1.0 if number == 1 else (0.0, 1.0, 0.25)[index % 3]
            rollouts.append(_random_rollout(module, random, prompt, f"{number}.{index}", reward, process))
        groups.append(TrainGroup(str(number), tuple(rollouts)))
    return TrainBatch(tuple(groups))


def _random_rollout(
    module: Any, random: np.random.Generator, prompt: list[int], name: str, reward: float, process: bool
) -> TrainRollout:
    calls: list[Call] = []
    ids = prompt
    for index in range(random.choice([0, 1, 2, 3], p=[0.1, 0.2, 0.4, 0.3])):
        completion = random.integers(0, 30, random.integers(1, 5)).tolist()
        delivered, temperature = bool(random.integers(6)), float(random.choice([1.0, 1.0, 0.5]))
        made = make_call(
            ids, completion, call_id=f"{name}.{index}", rollout_id=name, delivered=delivered, temperature=temperature
        )
        with torch.no_grad():
            logprobs = separately.token_logprobs(module, made) + torch.tensor(random.normal(size=len(completion))) * 0.4
        agent = "helper" if random.integers(4) == 0 else "main"
        calls.append(dataclasses.replace(made, logprobs=logprobs.float().numpy(), agent=agent))
        ids = [*(ids if random.integers(4) else prompt), *completion, *random.integers(0, 30, 2).tolist()]
    given = [(None, 0.0, 0.5, 1.0)[int(random.integers(4))] for call in calls if call.delivered] if process else []
    return TrainRollout(name, reward, tuple(calls), bool(random.integers(5) == 0), tuple(given))


def check_update(
    algorithm: AlgorithmSection,
    seed: int,
    rate: float,
    how: How,
    change: Callable[[TrainBatch], TrainBatch] = lambda batch: batch,
) -> UpdateReport:
    """A whole update against the naive one, step by step; what it reported."""
    learner = ExactLearner(algorithm, rate, how)
    torch.manual_seed(seed)
    for name, parameter in learner.module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    plain = models.exact_model()
    base = attach(plain, LORA) if algorithm.kl_coefficient else None
    plain.load_state_dict(learner.module.state_dict())
    random = np.random.default_rng(seed)
    batch = change(random_batch(plain, random, [3, 2, 4, 3, 3], process=algorithm.process.coefficient != 0))
    reference = None
    if base is not None:
        with torch.no_grad(), without(base):
            reference = {call.call_id: separately.token_logprobs(plain, call) for call in calls_of(batch)}
    wanted, losses = descend(plain, batch, algorithm, rate, reference)
    report = learner.update(batch)
    assert len(learner.gradients) == len(wanted), report.why_not
    for mine, theirs in zip(learner.gradients, wanted, strict=True):
        assert float((mine - theirs).norm()) <= 1e-9 * float(theirs.norm())
    if len(wanted) == algorithm.updates:
        assert report.loss == pytest.approx(np.mean(losses), rel=1e-9, abs=1e-12)
    return report


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize(("seed", "how"), [(0, How(40)), (1, How(8192)), (2, How(60, "walk"))])
def test_whole_updates(name: str, seed: int, how: How) -> None:
    """Several mini-batches and epochs where there is a ratio."""
    keys: dict[str, Any] = {"name": name, "constant_length": 8}
    if AlgorithmSection(name=name).surrogate != "policy_gradient":
        keys |= {"epochs": 2, "mini_batches": 2}
    report = check_update(AlgorithmSection(**keys), seed, rate=6e-6 if name == "gspo" else 0.02, how=how)
    if "epochs" in keys:
        assert report.optimizer_steps > 2 and 0 < report.clip_fraction < 0.9


@pytest.mark.parametrize(
    "keys",
    [
        {"ratio_level": "call", "old_policy": "behaviour", "importance": "none"},
        {"ratio_level": "rollout", "old_policy": "behaviour", "importance": "none", "epochs": 1, "mini_batches": 1},
        {"importance": "band", "importance_level": "call", "importance_mean": "product", "importance_low": 0.8},
        {"importance": "mask", "importance_level": "rollout", "importance_high": 1.05, "epochs": 1, "mini_batches": 1},
        {"importance": "truncate", "importance_high": 1.05, "name": "cispo", "ratio_level": "rollout"},
        {"discount": 0.8, "process": {"coefficient": 0.7, "discount": 0.9}, "dual_clip": 1.1},
        {"name": "dr_grpo", "process": {"coefficient": 1.0}, "overlong_limit": 6, "overlong_buffer": 3},
        {"name": "dapo", "cut_off": "mask", "mini_batches": 3},
        {"baseline": "agent", "discount": 0.9},
        {"kl_coefficient": 0.5, "kl_estimator": "k1"},
        {"kl_coefficient": 0.5, "kl_estimator": "k2", "entropy_coefficient": 0.1, "advantage": "leave_one_out"},
        {"kl_coefficient": 0.5, "kl_estimator": "k3", "ratio_level": "call", "normalization": "token_mean"},
        {"name": "rloo", "entropy_coefficient": 0.1, "epochs": 1, "mini_batches": 1, "importance_level": "rollout"},
    ],
)
def test_whole_updates_with_other_keys(keys: dict[str, Any]) -> None:
    algorithm = AlgorithmSection(**{"epochs": 2, "mini_batches": 2, "constant_length": 8, **keys})
    report = check_update(algorithm, 2, rate=0.01, how=How(60))
    assert report.optimizer_steps > algorithm.updates / 2


def test_a_step_without_gradient_is_no_end() -> None:
    """All of the first mini-batch is rejected; the second is learned from all the same."""
    algorithm = AlgorithmSection(importance="mask", mini_batches=2)

    def rejected(batch: TrainBatch) -> TrainBatch:
        return TrainBatch((implausible(batch.groups[0]), batch.groups[2]))

    def implausible(group: TrainGroup) -> TrainGroup:
        rollouts = []
        for rollout in group.rollouts:
            calls = tuple(dataclasses.replace(call, logprobs=call.logprobs - 3) for call in rollout.calls)
            rollouts.append(dataclasses.replace(rollout, calls=calls))
        return dataclasses.replace(group, rollouts=tuple(rollouts))

    report = check_update(algorithm, 0, rate=0.02, how=How(8192), change=rejected)
    assert report.learned and report.optimizer_steps == 1


def test_rollouts_without_process_rewards_leave_the_others_theirs() -> None:
    algorithm = AlgorithmSection(process=ProcessSection(coefficient=1.0))
    calls = [make_call([1, 2], [3, 4], call_id=str(index), delivered=index != 1) for index in range(5)]
    rewarded = TrainRollout("b", 0.0, tuple(calls[3:]), process=(0.0, 1.0))

    def advantages(*process: float | None) -> list[float]:
        silent = TrainRollout("a", 0.0, tuple(calls[:3]), process=process)
        work = Work(TrainBatch((TrainGroup("g", (silent, rewarded)),)), algorithm, 8192, None, None)
        return [float(value) for value in work.credit.advantage]

    apart = 0.5**0.5
    assert advantages() == advantages(None, None) == pytest.approx([0, 0, 0, 0, 0, 0, apart, apart])
    with pytest.raises(LearnerError, match="rollout a has 2 trainable calls, but 3 process rewards; give one, or None"):
        advantages(None, None, None)
