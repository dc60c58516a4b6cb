"""Penalties for length at their corners, and which groups stay."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longrein.config import AlgorithmSection
from longrein.learning.shaping import kept_groups, overlong_penalty, shaped


@pytest.mark.parametrize(
    ("tokens", "penalty"),
    [(0, 0.0), (60, 0.0), (61, -1 / 40), (80, -0.5), (99, -39 / 40), (100, -1.0), (101, -1.0), (10_000, -1.0)],
)
def test_the_penalty_grows_over_the_buffer(tokens: int, penalty: float) -> None:
    assert overlong_penalty(tokens, 100, 40) == pytest.approx(penalty, abs=1e-12)


@pytest.mark.parametrize(
    ("limit", "buffer", "tokens", "penalty"),
    [
        (100, 0, 100, 0.0),
        (100, 0, 101, -1.0),
        (100, 100, 0, 0.0),
        (100, 100, 1, -0.01),
        (100, 1, 99, 0),
        (100, 1, 100, -1),
    ],
)
def test_a_buffer_of_nothing_or_of_everything(limit: int, buffer: int, tokens: int, penalty: float) -> None:
    assert overlong_penalty(tokens, limit, buffer) == pytest.approx(penalty)


@given(st.integers(1, 50), st.integers(0, 50), st.integers(0, 120))
def test_it_never_rises_with_length(limit: int, buffer: int, tokens: int) -> None:
    buffer = min(limit, buffer)
    one, longer = (overlong_penalty(count, limit, buffer) for count in (tokens, tokens + 1))
    assert -1 <= longer <= one <= 0


def test_a_reward_is_shaped_where_there_is_a_limit() -> None:
    assert shaped(0.75, 10**6, AlgorithmSection()) == 0.75
    limited = AlgorithmSection(overlong_limit=10, overlong_buffer=4)
    assert [shaped(0.75, tokens, limited) for tokens in (6, 8, 11)] == [0.75, 0.25, -0.25]


GROUPS = [[1.0, 1.0], [0.0, 1.0], [0.5, 0.5, 0.5], [0.0, 0.5, 1.0], [], [0.3], [0.1 + 0.2, 0.3]]


def test_all_groups_stay_unless_asked() -> None:
    assert kept_groups(GROUPS, AlgorithmSection()) == [0, 1, 2, 3, 4, 5, 6]


def test_groups_with_contrast() -> None:
    """Rounding is none, nor are one rollout or no rollouts."""
    assert kept_groups(GROUPS, AlgorithmSection(name="dapo")) == [1, 3]
    assert kept_groups([], AlgorithmSection(name="dapo")) == []


def variance(share: float) -> AlgorithmSection:
    return AlgorithmSection(keep_groups="variance", keep_share=share)


@pytest.mark.parametrize(
    ("share", "kept"), [(0.01, [1]), (1 / 7, [1]), (0.25, [1, 3]), (0.4, [0, 1, 3]), (1.0, [0, 1, 2, 3, 4, 5, 6])]
)
def test_the_widest_groups_in_their_order(share: float, kept: list[int]) -> None:
    """Their spreads are 0.5 and 0.41, and nothing or a rounding error in the others."""
    assert kept_groups(GROUPS, variance(share)) == kept


def test_of_equally_wide_groups_the_first_stay() -> None:
    assert kept_groups([[0.2, 0.3], [0.1, 0.2], [0.0, 0.1], [0.0, 1.0]], variance(0.5)) == [0, 3]
    assert kept_groups([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]], variance(0.5)) == [0, 1]


@pytest.mark.parametrize(("share", "count", "kept"), [(0.28, 25, 7), (0.07, 100, 7), (0.25, 4, 1), (0.25, 5, 2)])
def test_the_share_is_rounded_up_and_no_further(share: float, count: int, kept: int) -> None:
    assert len(kept_groups([[0.0, 1.0]] * count, variance(share))) == kept
