"""Every completion token of every trainable call is a target once; nothing else is."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from longrein.errors import LearnerError
from longrein.forest.targets import harvest
from longrein.records import Call, Role
from tests.forest.random_calls import make_call, rollouts


@given(rollouts())
def test_every_sampled_token_of_a_delivered_call_is_trained_once(batch: list[list[Call]]) -> None:
    merged = harvest(batch)
    targets, forest = merged.targets, merged.forest
    found: Counter[Any] = Counter()
    for index in range(len(targets)):
        row = int(targets.row[index])
        path = [forest.tokens[k] for start, stop in forest.path(row) for k in range(start, stop)]
        prefix = (*map(int, path), int(forest.tokens[row]))
        told = float(targets.logprob[index]), int(targets.role[index])
        found[int(targets.rollout[index]), prefix, int(targets.token[index]), told] += 1
    expected: Counter[Any] = Counter()
    for number, calls in enumerate(batch):
        for call in calls:
            whole = [*call.prompt_ids.tolist(), *call.completion_ids.tolist()]
            for place, token in enumerate(call.completion_ids.tolist() if call.delivered else []):
                prefix = tuple(whole[: len(call.prompt_ids) + place])
                role = Role.OTHER if call.roles is None else int(call.roles[place])
                expected[number, prefix, token, (float(call.logprobs[place]), role)] += 1
    assert found == expected


@given(rollouts())
def test_tokens_are_counted_with_and_without_sharing(batch: list[list[Call]]) -> None:
    merged = harvest(batch)
    whole = [
        (*call.prompt_ids.tolist(), *call.completion_ids.tolist())
        for calls in batch
        for call in calls
        if call.delivered and len(call.completion_ids)
    ]
    assert merged.tokens_flat == sum(map(len, whole))
    assert len(merged.forest) == len({each[: k + 1] for each in whole for k in range(len(each))})


def test_a_completion_played_back_is_not_trained_again() -> None:
    first = make_call([1, 2], [3, 4], call_id="a")
    second = make_call([1, 2, 3, 4, 5], [6], call_id="b", index=1)
    targets = harvest([[first, second]]).targets
    assert targets.token.tolist() == [3, 4, 6]
    assert targets.call.tolist() == [0, 0, 1]
    assert targets.row.tolist() == [1, 2, 4]


def test_equal_samples_share_rows_and_keep_their_own_targets() -> None:
    one = make_call([1], [2, 3], call_id="a", temperature=0.5)
    other = make_call([1], [2, 3], call_id="b", temperature=0.0)
    merged = harvest([[one], [other]])
    assert len(merged.forest) == 3
    assert merged.targets.row.tolist() == [0, 1, 0, 1]
    assert merged.targets.rollout.tolist() == [0, 0, 1, 1]
    assert merged.targets.temperature.tolist() == [0.5, 0.5, 1.0, 1.0]


def test_each_target_has_its_calls_role() -> None:
    one = make_call([1], [2, 3, 4], call_id="a", roles=[Role.OTHER, Role.ACTION, Role.ARGUMENTS])
    other = make_call([1], [2, 3], call_id="b")
    lost = make_call([1], [2, 3], call_id="c", roles=[Role.ACTION, Role.ACTION], delivered=False)
    last = make_call([1, 5], [2], call_id="d", roles=[Role.ARGUMENTS])
    assert harvest([[one, lost], [other, last]]).targets.role.tolist() == [0, 1, 2, 0, 0, 2]


def test_undelivered_calls_are_not_even_in_the_forest() -> None:
    merged = harvest([[make_call([1, 2], [3], delivered=False)], []])
    assert len(merged.forest) == len(merged.targets) == merged.tokens_flat == 0


def test_malformed_batches_are_refused() -> None:
    call = make_call([1], [2], call_id="twin")
    with pytest.raises(LearnerError, match="twin is in the batch twice"):
        harvest([[call], [call]])
    with pytest.raises(LearnerError, match="no prompt tokens"):
        harvest([[make_call([], [2])]])
    with pytest.raises(LearnerError, match="2 sampled tokens but 1 log-prob"):
        harvest([[make_call([1], [2, 3], logprobs=[-1.0])]])
    with pytest.raises(LearnerError, match="2 sampled tokens but 1 roles"):
        harvest([[make_call([1], [2, 3], roles=[1])]])


def test_arrays_have_the_documented_types() -> None:
    for batch in ([], [[make_call([1], [2])]]):
        targets = harvest(batch).targets
        assert targets.row.dtype == np.int64
        assert {targets.token.dtype, targets.rollout.dtype, targets.call.dtype, targets.version.dtype} == {
            np.dtype(np.int32)
        }
        assert targets.logprob.dtype == targets.temperature.dtype == np.float32
        assert targets.role.dtype == np.uint8
