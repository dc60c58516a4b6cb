"""The sampler draws from the distribution it reports."""

import pytest
import torch

from longrein.engines.sampling import BLOCK, Choice, sample

SIZES = [5, BLOCK, BLOCK + 1, 3 * BLOCK + 50]


def free(uniform: float, temperature: float = 1.0) -> Choice:
    return Choice(uniform, temperature, 1.0, 0)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_inverts_the_cumulative_distribution(size: int, temperature: float) -> None:
    logits = torch.randn(1, size, generator=torch.Generator().manual_seed(size)) * 2
    expected = (logits[0].double() / temperature).softmax(0)
    # Tokens rarer than float32's rounding of the whole cannot be aimed at.
    likely = [index for index in range(size) if expected[index] > 1e-5]
    middles = expected.cumsum(0) - expected / 2
    ids, logprobs = sample(logits.expand(len(likely), -1), [free(float(middles[i]), temperature) for i in likely])
    assert ids == likely
    torch.testing.assert_close(torch.tensor(logprobs), expected[likely].log().float(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("size", SIZES)
def test_never_draws_the_impossible(size: int) -> None:
    logits = torch.full((4, size), float("-inf"))
    for row, column in enumerate((0, size // 2, size - 1, size - 2)):
        logits[row, column] = 3.0
    for uniform in (0.0, 0.5, 1 - 1e-16):
        ids, logprobs = sample(logits, [free(uniform)] * 4)
        assert ids == [0, size // 2, size - 1, size - 2]
        assert logprobs == [0.0] * 4


def test_greedy_takes_the_likeliest_and_reports_temperature_one() -> None:
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(0))
    ids, logprobs = sample(logits, [Choice(0.99, 0.0, 1.0, 0), free(0.3, 0.7), Choice(0.0, 0.0, 1.0, 0)])
    assert [ids[0], ids[2]] == [int(logits[0].argmax()), int(logits[2].argmax())]
    assert logprobs[0] == pytest.approx(float(logits[0].log_softmax(0).max()), abs=1e-5)


def test_truncation_limits_what_is_drawn_and_not_what_is_reported() -> None:
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.15, 0.1, 0.05]])).expand(200, -1)
    grid = [index / 200 for index in range(200)]
    ids, logprobs = sample(logits, [Choice(u, 1.0, 1.0, 2) for u in grid])
    assert set(ids) == {0, 1}
    assert ids.count(0) / 200 == pytest.approx(4 / 7, abs=0.01)
    assert min(logprobs) == pytest.approx(torch.tensor(0.3).log().item(), abs=1e-5)
    assert set(sample(logits, [Choice(u, 1.0, 0.75, 0) for u in grid])[0]) == {0, 1, 2}
    assert set(sample(logits, [Choice(u, 1.0, 0.01, 0) for u in grid])[0]) == {0}
    # Top-p is of what top-k leaves: 0.4 of 0.7 is less than 0.6, so both stay.
    assert set(sample(logits, [Choice(u, 1.0, 0.6, 2) for u in grid])[0]) == {0, 1}
    assert set(sample(logits, [Choice(u, 1.0, 0.5, 2) for u in grid])[0]) == {0}
