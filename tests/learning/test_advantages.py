"""What baselines and weights count, beside the values that ``test_algorithms`` compares."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longrein.config import AlgorithmSection
from longrein.forest.targets import Targets
from longrein.learning.advantages import ADVANTAGES, advantages, has_contrast
from longrein.learning.credit import assign
from longrein.presets import PRESETS

rewards = st.lists(st.integers(0, 8).map(lambda eighths: eighths / 8), min_size=1, max_size=8)
KINDS = sorted(ADVANTAGES)
CENTRED = [kind for kind in KINDS if kind != "reward"]


def targets(tokens: list[int]) -> Targets:
    """So many of each rollout, in one call."""
    rollout = np.repeat(np.arange(len(tokens)), tokens).astype(np.int32)
    _, call = np.unique(rollout, return_inverse=True)
    return Targets(
        row=np.zeros(len(rollout), np.int64),
        token=np.zeros(len(rollout), np.int32),
        rollout=rollout,
        call=call.astype(np.int32),
        agent=np.zeros(len(rollout), np.int32),
        logprob=np.zeros(len(rollout), np.float32),
        version=np.zeros(len(rollout), np.int32),
        temperature=np.ones(len(rollout), np.float32),
        role=np.zeros(len(rollout), np.uint8),
    )


@pytest.mark.parametrize("kind", CENTRED)
@given(st.lists(rewards, min_size=1, max_size=4))
def test_advantages_cancel(kind: str, groups: list[list[float]]) -> None:
    """Within each group, or over the batch where that is what is normalised."""
    found = advantages(groups, kind)
    assert [len(row) for row in found] == [len(group) for group in groups]
    sums = [sum(row) for row in found]
    for total in [sum(sums)] if kind == "batch_std" else sums:
        assert total == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(("kind", "spread"), [("group_std", 1.0), ("batch_std", 1.0), ("group_mean_batch_std", 1.0)])
def test_the_deviation_is_that_of_a_sample(kind: str, spread: float) -> None:
    (found,) = advantages([[0.0, 0.5, 1.0, 1.0]], kind)
    assert np.std(found, ddof=1) == pytest.approx(spread)


def test_numbers_to_read() -> None:
    assert advantages([[0.0, 1.0], [3.0, 1.0]], "group_mean")[1].tolist() == [1.0, -1.0]
    assert advantages([[0.0, 1.0, 2.0]], "leave_one_out")[0].tolist() == [-1.5, 0.0, 1.5]
    assert advantages([[0.25, 1.0]], "reward")[0].tolist() == [0.25, 1.0]
    assert advantages([[0.0], [2.0]], "batch_std")[1].tolist() == pytest.approx([0.5**0.5])
    assert advantages([[0.0, 2.0], [5.0, 5.0]], "group_mean_batch_std")[1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("kind", CENTRED)
def test_rounding_is_no_contrast(kind: str) -> None:
    group = [0.1 + 0.2, 0.3, 0.3]
    assert group[0] != group[1]
    assert not has_contrast(group)
    assert advantages([group], kind)[0].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("kind", KINDS)
def test_groups_of_one_and_of_none(kind: str) -> None:
    found = advantages([[], [1.0], []], kind)
    assert [row.tolist() for row in found] == [[], [1.0 if kind == "reward" else 0.0], []]
    assert advantages([], kind) == []
    assert not has_contrast([1.0]) and not has_contrast([])


@given(st.lists(rewards, max_size=3), st.data(), st.sampled_from(["rollout_mean", "token_mean", "constant"]))
def test_weights_count_every_valid_rollout(groups: list[list[float]], data: st.DataObject, kind: str) -> None:
    """Rollouts without contrast and rollouts without tokens count in R; nothing else does."""
    count = sum(map(len, groups))
    tokens = data.draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    rows = targets(tokens)
    credit = assign(groups, rows, AlgorithmSection.model_validate({"normalization": kind, "constant_length": 7}))
    for target, index in enumerate(rows.rollout):
        wanted = {
            "rollout_mean": 1 / (count * tokens[index]),
            "token_mean": 1 / sum(tokens),
            "constant": 1 / (count * 7),
        }[kind]
        assert credit.weight[target] == pytest.approx(wanted)
    assert credit.credited.tolist() == (credit.advantage != 0).tolist()
    assert credit.groups == len(groups)
    assert credit.groups_with_contrast == sum(max(group) > min(group) for group in groups)


def test_a_masked_rollout_stays_in_baseline_and_count() -> None:
    rows = targets([1, 2, 3])
    masked = rows.rollout == 1
    whole, part = (assign([[0.0, 1.0, 2.0]], rows, AlgorithmSection(), masked=each) for each in (None, masked))
    np.testing.assert_array_equal(part.advantage, whole.advantage)
    np.testing.assert_array_equal(part.weight, np.where(rows.rollout == 1, 0, whole.weight))
    by_tokens = assign([[0.0, 1.0, 2.0]], rows, AlgorithmSection(name="dapo"), masked=masked)
    assert by_tokens.weight.tolist() == [1 / 4, 0, 0, 1 / 4, 1 / 4, 1 / 4]


def test_every_token_is_credited_where_more_than_the_reward_pulls() -> None:
    credit = assign([[1.0, 1.0]], targets([1, 2]), AlgorithmSection(entropy_coefficient=0.1))
    assert credit.credited.all()
    assert (credit.advantage == 0).all()


def test_a_preset_gives_way_to_what_the_configuration_says() -> None:
    changed = AlgorithmSection(name="dapo", clip_high=0.5, keep_groups="all")
    assert (changed.normalization, changed.clip_low, changed.clip_high) == ("token_mean", 0.2, 0.5)
    assert changed.keep_groups == "all"


def test_the_defaults_are_grpo() -> None:
    """What the configuration documents as default is what GRPO means."""
    assert AlgorithmSection() == AlgorithmSection(name="grpo")
    assert not PRESETS["grpo"]


def test_an_agents_baseline_is_over_the_rollouts_it_took_part_in() -> None:
    """The second agent is absent from the rollout with the highest reward, and from the whole second group."""
    two = replace(targets([2, 2, 1, 1, 1]), agent=np.array([0, 1, 0, 1, 0, 0, 0], np.int32))
    given = [[0.0, 0.5, 1.0], [0.0, 1.0]]
    plain = assign(given, two, AlgorithmSection(advantage="group_mean"))
    assert plain.advantage.tolist() == [-0.5, -0.5, 0.0, 0.0, 0.5, -0.5, 0.5]
    each = assign(given, two, AlgorithmSection(advantage="group_mean", baseline="agent"))
    assert each.advantage.tolist() == [-0.5, -0.25, 0.0, 0.25, 0.5, -0.5, 0.5]
    # What is divided by is as it was: R counts every rollout.
    assert each.weight.tolist() == plain.weight.tolist()
