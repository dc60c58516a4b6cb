"""Rewards of single calls, from each of their sources."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from longrein.config import ProcessSection
from longrein.errors import ConfigError
from longrein.learning.process import process_rewards
from longrein.records import Call, Receipt, Rollout, Split
from tests.forest.random_calls import make_call

ROLLOUT = Rollout("r0", "g0", "task", Split.TRAIN, 0, reward=1.0)


def calls(*marks: tuple[bool | None, bool | None]) -> list[Call]:
    """A conversation: each call goes on from the last. (tools_valid, tools_failed) of each."""
    return [
        replace(
            make_call([1], [2], call_id=f"c{index}", index=index),
            tools_valid=valid,
            tools_failed=failed,
            parent_id=f"c{index - 1}" if index else None,
        )
        for index, (valid, failed) in enumerate(marks)
    ]


def section(**keys: Any) -> ProcessSection:
    return ProcessSection(coefficient=1.0, **keys)


def test_valid_tool_calls() -> None:
    made = calls((True, None), (False, False), (None, True))
    assert process_rewards(section(), ROLLOUT, made) == (1.0, 0.0, None)


def test_a_tool_that_failed_is_said_by_the_next_call() -> None:
    made = calls((True, None), (True, True), (False, False), (True, None), (None, None))
    found = process_rewards(section(source="tool_succeeded"), ROLLOUT, made)
    # The first failed, the second did not, the third was not even valid; of the fourth nothing was said.
    assert found == (0.0, 1.0, 0.0, 1.0, None)


def test_only_trainable_calls_are_judged() -> None:
    made = calls((True, None), (True, None), (False, None))
    made[0] = replace(made[0], train=False)
    made[1] = replace(made[1], delivered=False)
    assert process_rewards(section(), ROLLOUT, made) == (0.0,)


def receipt(content: dict[str, float], file: str = "reward.json") -> Receipt:
    return Receipt(file, json.dumps(content), "", 1.0, 1.0)


def test_the_verifier_names_calls_by_number() -> None:
    made = calls(*[(None, None)] * 3)
    judged = replace(ROLLOUT, receipt=receipt({"reward": 1.0, "call.0": 0.5, "call.2": -1}))
    assert process_rewards(section(source="verifier"), judged, made) == (0.5, None, -1.0)
    silent = replace(ROLLOUT, receipt=receipt({"reward": 1.0}))
    assert process_rewards(section(source="verifier"), silent, made) == (None, None, None)
    assert process_rewards(section(source="verifier"), ROLLOUT, made) == (None, None, None)
    text = replace(ROLLOUT, receipt=Receipt("reward.txt", "1.0", "", 1.0, 1.0))
    assert process_rewards(section(source="verifier"), text, made) == (None, None, None)


def by_length(rollout: Rollout, judged: Sequence[Call]) -> list[float | None]:
    return [None if call.index else float(len(call.completion_ids)) for call in judged]


def too_few(rollout: Rollout, judged: Sequence[Call]) -> list[float]:
    return [1.0]


def not_finite(rollout: Rollout, judged: Sequence[Call]) -> list[float]:
    return [float("nan")] * len(judged)


def hook(name: str) -> ProcessSection:
    return section(source="hook", hook=f"tests.learning.test_process:{name}")


def test_a_hook_of_ones_own() -> None:
    assert process_rewards(hook("by_length"), ROLLOUT, calls((None, None), (None, None))) == (1.0, None)


@pytest.mark.parametrize("name", ["too_few", "not_finite"])
def test_a_hook_must_give_one_number_for_each_call(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} returned .* for 2 calls of r0: expected one finite number or None"):
        process_rewards(hook(name), ROLLOUT, calls((None, None), (None, None)))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tests.learning.test_process:absent", "has no attribute 'absent'"),
        ("no_such_package:hook", "No module named 'no_such_package'"),
        ("tests.learning.test_process", "expected package.module:function"),
        ("tests.learning.test_process:ROLLOUT", "expected package.module:function"),
    ],
)
def test_a_hook_that_cannot_be_called(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        process_rewards(section(source="hook", hook=name), ROLLOUT, calls((None, None)))
