"""Steps that go wrong without an error."""

from dataclasses import replace
from typing import Any

import pytest

from longrein.records import Call
from longrein.trouble import troubles
from tests.learning import models
from tests.learning.test_learner import make_batch
from tests.test_ledger import call


@pytest.fixture(scope="module")
def report() -> Any:
    """Of an update that went well."""
    learner = models.learner()
    return learner.update(make_batch(learner.module))


@pytest.mark.parametrize(
    ("valid", "told"),
    [((None, None), 0), ((True, False), 0), ((False, None, False), 1)],
)
def test_only_when_all_calls_are_malformed(report: Any, valid: tuple[bool | None, ...], told: int) -> None:
    calls: list[Call] = [replace(call(f"c{index}"), tools_valid=each) for index, each in enumerate(valid)]
    found = troubles(report, calls, 10.0)
    assert len(found) == told and all("replies with tool calls are malformed" in line for line in found)


def test_a_mismatch_is_told_above_its_bound_alone(report: Any) -> None:
    apart = report.by_age["0"].logprob_difference_mean
    assert troubles(report, [], apart * 1.01) == [] and apart > 0
    (line,) = troubles(report, [], apart * 0.99)
    assert line.startswith("sampler and learner disagree: ") and "engine.dtype" in line
    (line,) = troubles(replace(report, learned=False, why_not="the gradient is zero"), [], 100.0)
    assert line == "nothing was learned: the gradient is zero"
