"""Ratios over calls and rollouts, what they are cut to, and the figures that are told of them."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longrein.config import AlgorithmSection
from longrein.forest.targets import Targets
from longrein.learning.batch import TrainBatch, TrainGroup, TrainRollout
from longrein.learning.figures import AgeReport, UpdateReport
from longrein.learning.importance import bounded, effective_sample_size, importance_weights, over
from tests.forest.random_calls import make_call
from tests.learning import models


def targets(rollout: list[int], call: list[int], logprob: list[float]) -> Targets:
    count = len(rollout)
    return Targets(
        row=np.zeros(count, np.int64),
        token=np.zeros(count, np.int32),
        rollout=np.array(rollout, np.int32),
        call=np.array(call, np.int32),
        agent=np.zeros(count, np.int32),
        logprob=np.array(logprob, np.float32),
        version=np.zeros(count, np.int32),
        temperature=np.ones(count, np.float32),
        role=np.zeros(count, np.uint8),
    )


# The rollout in the middle has no target.
THREE = targets([0, 0, 0, 2, 2], [0, 0, 1, 2, 2], [-1.0] * 5)
VALUES = np.array([1.0, 2.0, 6.0, -1.0, 4.0])


@pytest.mark.parametrize(
    ("level", "mean", "expected"),
    [
        ("token", False, [1, 2, 6, -1, 4]),
        ("token", True, [1, 2, 6, -1, 4]),
        ("call", False, [3, 3, 6, 3, 3]),
        ("call", True, [1.5, 1.5, 6, 1.5, 1.5]),
        ("rollout", False, [9, 9, 9, 3, 3]),
        ("rollout", True, [3, 3, 3, 1.5, 1.5]),
    ],
)
def test_over_each_level(level: str, mean: bool, expected: list[float]) -> None:
    assert over(level, THREE, VALUES, mean=mean).tolist() == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("level", ["token", "call", "rollout"])
def test_over_nothing(level: str) -> None:
    assert over(level, targets([], [], []), np.zeros(0), mean=True).tolist() == []  # type: ignore[arg-type]


def test_the_weight_is_the_proximal_policy_by_the_behaviour() -> None:
    algorithm = AlgorithmSection(importance_level="rollout", importance_mean="product", importance_high=100.0)
    found = importance_weights(algorithm, THREE, np.log([0.5, 0.25, 0.1, 0.2, 0.9]))
    one, other = 0.5 * 0.25 * 0.1 * math.e**3, 0.2 * 0.9 * math.e**2
    np.testing.assert_allclose(found.weight, [one] * 3 + [other] * 2)


@pytest.mark.parametrize(
    ("importance", "weight", "cut"),
    [
        ("none", [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]),
        ("truncate", [0.1, 0.5, 1.5, 2, 2], [0, 0, 0, 0, 1]),
        ("mask", [0.1, 0.5, 1.5, 2, 0], [0, 0, 0, 0, 1]),
        ("band", [0, 0.5, 1.5, 2, 0], [1, 0, 0, 0, 1]),
    ],
)
def test_what_is_cut_and_the_bounds_themselves_are_not(importance: str, weight: list[float], cut: list[int]) -> None:
    algorithm = AlgorithmSection.model_validate(
        {"importance": importance, "importance_low": 0.5, "importance_high": 2.0}
    )
    found = bounded(algorithm, np.array([0.1, 0.5, 1.5, 2.0, 2.5]))
    assert found.weight.tolist() == weight
    assert found.cut.tolist() == [bool(each) for each in cut]
    assert found.ratio.tolist() == [0.1, 0.5, 1.5, 2.0, 2.5]


def test_a_product_over_a_long_rollout_does_not_overflow() -> None:
    algorithm = AlgorithmSection(importance_level="rollout", importance_mean="product")
    found = importance_weights(algorithm, targets([0] * 800, [0] * 800, [-1.0] * 800), np.zeros(800))
    assert found.weight.tolist() == [2.0] * 800 and found.cut.all()
    assert effective_sample_size(found.ratio) == pytest.approx(1.0)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=9), st.floats(0.1, 10))
def test_effective_sample_size(weights: list[float], scale: float) -> None:
    values = np.array(weights)
    size = effective_sample_size(values)
    assert 1 / len(values) - 1e-12 <= size <= 1 + 1e-12
    assert effective_sample_size(values * scale) == pytest.approx(size)
    assert effective_sample_size(np.full(len(values), scale)) == pytest.approx(1)


def test_effective_sample_size_of_one_that_is_everything_and_of_nothing() -> None:
    assert effective_sample_size(np.array([0.0, 0.0, 5.0, 0.0])) == pytest.approx(1 / 4)
    assert effective_sample_size(np.zeros(3)) == effective_sample_size(np.zeros(0)) == 0
    assert effective_sample_size(np.array([1.0, 3.0])) == pytest.approx(16 / 20)


def aged_update(algorithm: dict[str, object]) -> UpdateReport:
    """Four groups, sampled 0 to 3 versions ago; what they say of their tokens is off by more with each version.

    Also a call that is of two versions.
    """
    random = np.random.default_rng(0)
    groups = []
    for age in range(4):
        rollouts = []
        for index in range(2):
            count = 4 + age
            call = make_call(
                random.integers(0, 400, 6).tolist(),
                random.integers(0, 400, count).tolist(),
                call_id=f"{age}.{index}",
                logprobs=(random.normal(-6, 0.3 + age, count)).tolist(),
            )
            versions = np.full(count, 7 - age, np.int32)
            versions[0] = 7
            rollouts.append(TrainRollout(call.call_id, float(index), (dataclasses.replace(call, versions=versions),)))
        groups.append(TrainGroup(str(age), tuple(rollouts)))
    return models.learner(algorithm, learning_rate=1e-2).update(TrainBatch(tuple(groups), version=7))


@pytest.mark.parametrize(
    "algorithm", [{}, {"importance": "band", "epochs": 3, "mini_batches": 2}, {"name": "cispo", "epochs": 2}]
)
def test_figures_by_age_add_up(algorithm: dict[str, object]) -> None:
    report = aged_update(algorithm)
    ages = report.by_age
    assert {age: each.tokens for age, each in ages.items()} == {"0": 2 * 7, "1": 2 * 4, "2": 2 * 5, "3": 2 * 6}
    for name in ("importance_cut", "clip_fraction_low", "clip_fraction_high", "kl_behaviour", "entropy"):
        total = sum(each.tokens * getattr(each, name) for each in ages.values())
        assert total / report.tokens_trained == pytest.approx(getattr(report, name), abs=1e-9), name
    assert report.clip_fraction == pytest.approx(report.clip_fraction_low + report.clip_fraction_high)
    assert report.importance_cut > 0
    for name in ("clip_fraction_low", "clip_fraction_high"):
        if getattr(report, name) > 0:
            assert len({getattr(each, name) for each in ages.values()}) > 1, f"{name} is each age's own"


def test_what_is_older_is_further_off() -> None:
    report = aged_update({})
    young, old = report.by_age["1"], report.by_age["3"]
    assert young.effective_sample_size > old.effective_sample_size
    assert young.kl_behaviour < old.kl_behaviour
    for each in report.by_age.values():
        assert 0 < each.ratio_p01 <= each.ratio_p50 <= each.ratio_p99
        assert isinstance(each, AgeReport)


def test_age_reports_are_of_the_ratios_themselves() -> None:
    """One age: the whole is that age."""
    random = np.random.default_rng(1)
    calls = [
        make_call([1, 2, 3], random.integers(0, 400, 3).tolist(), call_id=str(index), logprobs=[-6.0, -5.0, -7.0])
        for index in range(2)
    ]
    batch = TrainBatch((TrainGroup("g", tuple(TrainRollout(c.call_id, float(i), (c,)) for i, c in enumerate(calls))),))
    report = models.learner().update(batch)
    (only,) = report.by_age.values()
    for field in dataclasses.fields(AgeReport):
        if field.name != "tokens":
            assert getattr(only, field.name) == getattr(report, field.name)
    assert list(report.by_age) == ["0"] and only.tokens == 6
