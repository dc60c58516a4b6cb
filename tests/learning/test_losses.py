"""The loss of one token against its formula, and log-probabilities against torch's own."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longrein.config import AlgorithmSection
from longrein.learning.algorithms import resolve
from longrein.learning.logprobs import row_entropies, token_logprobs
from longrein.learning.losses import token_losses

logprob = st.floats(-5.0, -0.01)
unlike_bounds = st.floats(0.05, 0.45)


def naive(
    now: float, proximal: float, behaviour: float, advantage: float, low: float, high: float, dual: float | None
) -> tuple[float, bool]:
    """(surrogate before the importance weight, whether its gradient is zero)."""
    ratio = math.exp(now - proximal)
    if advantage > 0:
        return (advantage * (1 + high), True) if ratio > 1 + high else (advantage * ratio, False)
    if advantage < 0:
        if dual is not None and ratio > max(dual, 1 - low):
            return advantage * dual, True
        return (advantage * (1 - low), True) if ratio < 1 - low else (advantage * ratio, False)
    return 0.0, False


@given(
    logprob,
    logprob,
    logprob,
    st.floats(-3, 3).filter(lambda value: value == 0 or abs(value) > 1e-6),
    unlike_bounds,
    unlike_bounds,
    st.sampled_from([None, 2.0, 3.0]),
    st.sampled_from([None, 0.5, 2.0]),
)
def test_one_token(
    now: float,
    proximal: float,
    behaviour: float,
    advantage: float,
    low: float,
    high: float,
    dual: float | None,
    cut: float | None,
) -> None:
    algorithm = resolve(AlgorithmSection(clip_low=low, clip_high=high, dual_clip=dual, importance_cut=cut))
    current = torch.tensor([now], dtype=torch.float64, requires_grad=True)
    losses = token_losses(
        algorithm, current, *(torch.tensor([value], dtype=torch.float64) for value in (proximal, behaviour, advantage))
    )
    surrogate, still = naive(now, proximal, behaviour, advantage, low, high, dual)
    importance = math.exp(proximal - behaviour)
    weight = 1.0 if cut is None else min(importance, cut)
    assert losses.loss.item() == pytest.approx(-surrogate * weight, rel=1e-9, abs=1e-12)
    assert losses.importance.item() == pytest.approx(importance)
    losses.loss.sum().backward()
    assert current.grad is not None
    if still:
        assert current.grad.item() == 0 and bool(losses.clipped)
    else:
        assert current.grad.item() == pytest.approx(-advantage * math.exp(now - proximal) * weight, abs=1e-12)


def test_kl_and_entropy_terms() -> None:
    algorithm = resolve(AlgorithmSection(kl_coefficient=0.5, entropy_coefficient=0.25))
    now, reference, entropy = -1.0, -1.5, 2.0
    zero, found = torch.zeros(1), torch.tensor([now])
    losses = token_losses(algorithm, found, found, found, zero, torch.tensor([reference]), torch.tensor([entropy]))
    kl = math.exp(reference - now) - (reference - now) - 1
    assert losses.kl.item() == pytest.approx(kl)
    assert losses.loss.item() == pytest.approx(0.5 * kl - 0.25 * entropy)


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(2, 9), st.integers(0, 12), st.integers(0, 1000))
def test_log_probabilities_and_their_gradient(rows: int, vocabulary: int, targets: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64) * 3
    row = torch.randint(0, rows, (targets,), generator=generator)
    token = torch.randint(0, vocabulary, (targets,), generator=generator)
    pull = torch.randn(targets, generator=generator, dtype=torch.float64)
    one, other = (values.clone().requires_grad_() for _ in range(2))
    found = token_logprobs(one * 1.0, row, token)
    expected = torch.log_softmax(other, -1)[row, token]
    torch.testing.assert_close(found, expected)
    (found * pull).sum().backward()
    (expected * pull).sum().backward()
    torch.testing.assert_close(one.grad, other.grad)


def test_entropy_of_a_row() -> None:
    even = torch.zeros(1, 8)
    assert row_entropies(even).item() == pytest.approx(math.log(8))
