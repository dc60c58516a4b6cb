"""Several policies over one base: each learns from its own calls, and from them as if it were alone."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from longrein.config import AlgorithmSection, LearnerSection, LoraSection
from longrein.learning.batch import TrainBatch, TrainGroup
from longrein.learning.joint import JointLearner, of_policy, open_learner
from longrein.learning.learner import EmbeddedLearner
from tests.learning import models
from tests.learning.test_learner import make_batch

SECTION = LearnerSection(
    precision="float32", forest="packed", threads=1, learning_rate=1e-3, lora=LoraSection(rank=4, alpha=8.0)
)
NAMES = ("policy", "worker")


def learner(*policies: str) -> EmbeddedLearner | JointLearner:
    return open_learner(models.directory(), SECTION, AlgorithmSection(), 3, policies)


def mixed_batch(seed: int) -> TrainBatch:
    """Second calls are the worker's."""
    batch = make_batch(models.learner().module, seed)
    groups = []
    for group in batch.groups:
        rollouts = tuple(
            replace(rollout, calls=(rollout.calls[0], replace(rollout.calls[1], policy="worker")), process=(1.0, 0.5))
            for rollout in group.rollouts
        )
        groups.append(TrainGroup(group.group_id, rollouts))
    return TrainBatch(tuple(groups))


def weights(found: EmbeddedLearner | JointLearner, policy: str) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in found.weights(policy).items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_each_policy_moves_as_it_would_alone() -> None:
    joint = learner(*NAMES)
    assert isinstance(joint, JointLearner)
    for seed in range(2):
        report = joint.update(mixed_batch(seed))
        assert report.learned and report.policies["worker"].learned
        assert report.tokens_trained == report.policies["worker"].tokens_trained == 25
    for policy in NAMES:
        alone = learner("policy")
        for seed in range(2):
            alone.update(of_policy(mixed_batch(seed), policy))
        # Adapters are drawn one after the other, so the second begins elsewhere; what each begins with adds nothing.
        moved = weights(joint, policy)
        if policy == "policy":
            assert same(moved, weights(alone, "policy"))
        assert not same(moved, weights(learner("policy"), "policy"))
    assert not same(weights(joint, "policy"), weights(joint, "worker"))


def test_a_policy_without_calls_is_still() -> None:
    joint = learner(*NAMES)
    start = weights(joint, "worker")
    report = joint.update(make_batch(models.learner().module))
    assert report.learned and "worker: no trainable token" in report.why_not
    assert same(start, weights(joint, "worker"))
    assert not same(start, weights(joint, "policy"))


def test_save_load_and_go_on(tmp_path: Path) -> None:
    one, other = learner(*NAMES), learner(*NAMES)
    one.update(mixed_batch(0))
    one.save(tmp_path)
    other.load(tmp_path)
    for each in (one, other):
        each.update(mixed_batch(1))
    for policy in NAMES:
        assert same(weights(one, policy), weights(other, policy))


def test_process_rewards_stay_with_their_calls() -> None:
    batch = mixed_batch(0)
    assert {rollout.process for rollout in of_policy(batch, "policy").rollouts} == {(1.0,)}
    assert {rollout.process for rollout in of_policy(batch, "worker").rollouts} == {(0.5,)}
