"""Advantages against their definitions, one rollout at a time."""

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longrein.config import AlgorithmSection
from longrein.learning.advantages import advantages, has_contrast
from longrein.learning.algorithms import PRESETS, resolve
from longrein.learning.credit import assign

rewards = st.lists(st.integers(0, 8).map(lambda eighths: eighths / 8), min_size=2, max_size=8)


def naive(group: list[float], kind: str) -> list[float]:
    if max(group) == min(group):
        return [0.0] * len(group)
    found = []
    for index, reward in enumerate(group):
        others = group[:index] + group[index + 1 :]
        baseline = statistics.fmean(others if kind == "leave_one_out" else group)
        found.append((reward - baseline) / (statistics.stdev(group) if kind == "group_std" else 1.0))
    return found


@pytest.mark.parametrize("kind", ["group_std", "group_mean", "leave_one_out"])
@given(rewards)
def test_advantages_are_what_they_say(kind: str, group: list[float]) -> None:
    np.testing.assert_allclose(advantages(group, kind), naive(group, kind), rtol=1e-12, atol=1e-12)


def test_rounding_is_no_contrast() -> None:
    group = [0.1 + 0.2, 0.3, 0.3]
    assert group[0] != group[1]
    assert not has_contrast(group)
    assert advantages(group, "group_std").tolist() == [0.0, 0.0, 0.0]
    assert not has_contrast([1.0])
    assert advantages([], "group_mean").tolist() == []


@given(st.lists(rewards, max_size=3), st.data(), st.sampled_from(["rollout_mean", "token_mean", "constant"]))
def test_weights_count_every_valid_rollout(groups: list[list[float]], data: st.DataObject, kind: str) -> None:
    """Rollouts without contrast and rollouts without tokens count in R; nothing else does."""
    count = sum(map(len, groups))
    tokens = data.draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    rollout = np.repeat(np.arange(count), tokens).astype(np.int32)
    algorithm = resolve(AlgorithmSection(normalization=kind, constant_length=7))
    credit = assign(groups, rollout, algorithm)
    worth = [value for group in groups for value in naive(group, "group_std")]
    for target, index in enumerate(rollout):
        wanted = {
            "rollout_mean": 1 / (count * tokens[index]),
            "token_mean": 1 / sum(tokens),
            "constant": 1 / (count * 7),
        }[kind]
        assert credit.weight[target] == pytest.approx(wanted)
        assert credit.advantage[target] == pytest.approx(worth[index])
        assert credit.credited[target] == (worth[index] != 0)
    assert credit.groups == len(groups)
    assert credit.groups_with_contrast == sum(max(group) > min(group) for group in groups)


def test_every_token_is_credited_where_more_than_the_reward_pulls() -> None:
    algorithm = resolve(AlgorithmSection(entropy_coefficient=0.1))
    credit = assign([[1.0, 1.0]], np.array([0, 1, 1], np.int32), algorithm)
    assert credit.credited.all()
    assert (credit.advantage == 0).all()


def test_a_preset_gives_way_to_what_the_configuration_says() -> None:
    assert resolve(AlgorithmSection()) == PRESETS["grpo"]
    changed = resolve(AlgorithmSection(clip_high=0.28, importance_cut=None))
    assert (changed.clip_low, changed.clip_high, changed.importance_cut) == (0.2, 0.28, None)


def test_the_configuration_and_the_preset_agree() -> None:
    """What the configuration documents as default is what GRPO means."""
    section = AlgorithmSection()
    for name in type(section).model_fields:
        if name != "name":
            assert getattr(section, name) == getattr(PRESETS["grpo"], name)
