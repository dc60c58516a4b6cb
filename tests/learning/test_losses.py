"""What is reported of a token's loss, and log-probabilities against torch's own."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longrein.config import AlgorithmSection
from longrein.learning.logprobs import row_entropies, token_logprobs
from longrein.learning.losses import TokenLosses, token_losses


def losses(
    ratios: list[float], advantages: list[float], now: float = -1.0, **keys: Any
) -> tuple[TokenLosses, Tensor, Tensor]:
    """Of tokens with these ratios; the log-probabilities' gradients; the ratios as they are reported."""
    current = torch.full((len(ratios),), now, dtype=torch.float64, requires_grad=True)
    found = token_losses(
        AlgorithmSection(**keys),
        current,
        torch.tensor(ratios, dtype=torch.float64).log(),
        torch.tensor(advantages, dtype=torch.float64),
        torch.ones(len(ratios), dtype=torch.float64),
        torch.full_like(current, -1.5).detach(),
        torch.full_like(current, 2.0).detach(),
    )
    (gradient,) = torch.autograd.grad(found.loss.sum(), current)
    return found, gradient, found.ratio


RATIOS, SIGNS = [0.5, 0.5, 1.0, 1.0, 1.5, 1.5, 4.0, 4.0], [1.0, -1.0] * 4


def test_a_bound_is_met_where_it_takes_the_gradient() -> None:
    found, gradient, ratio = losses(RATIOS, SIGNS)
    assert found.clipped_low.tolist() == [False, True, False, False, False, False, False, False]
    assert found.clipped_high.tolist() == [False, False, False, False, True, False, True, False]
    assert (gradient == 0).tolist() == (found.clipped_low | found.clipped_high).tolist()
    assert ratio.tolist() == pytest.approx(RATIOS)


def test_a_dual_clip_bounds_what_is_bad_and_likelier_than_before() -> None:
    found, gradient, _ = losses(RATIOS, SIGNS, dual_clip=3.0)
    assert found.clipped_low.tolist() == [False, True, False, False, False, False, False, False]
    assert found.clipped_high.tolist() == [False, False, False, False, True, False, True, True]
    assert (gradient == 0).tolist() == (found.clipped_low | found.clipped_high).tolist()
    assert found.loss.tolist()[-1] == pytest.approx(3.0)


def test_cispo_keeps_the_gradient_of_what_it_clips() -> None:
    found, gradient, _ = losses(RATIOS, SIGNS, surrogate="cispo")
    assert found.clipped_low.tolist() == [True, True, *[False] * 6]
    assert found.clipped_high.tolist() == [*[False] * 4, True, True, True, True]
    assert gradient.tolist() == pytest.approx([-0.8, 0.8, -1, 1, -1.2, 1.2, -1.2, 1.2])


def test_a_policy_gradient_has_no_ratio() -> None:
    found, gradient, _ = losses(RATIOS, SIGNS, name="policy_gradient")
    assert not found.clipped_low.any() and not found.clipped_high.any()
    assert gradient.tolist() == pytest.approx([-1.0, 1.0] * 4)


@pytest.mark.parametrize(
    ("estimator", "value", "pull"),
    [("k1", 0.5, 1.0), ("k2", 0.125, 0.5), ("k3", math.exp(-0.5) - 0.5, 1 - math.exp(-0.5))],
)
def test_kl_and_entropy_terms(estimator: str, value: float, pull: float) -> None:
    found, gradient, _ = losses([1.0], [0.0], kl_coefficient=0.5, kl_estimator=estimator, entropy_coefficient=0.25)
    assert found.kl.item() == pytest.approx(value)
    assert found.loss.item() == pytest.approx(0.5 * value - 0.25 * 2.0)
    assert gradient.item() == pytest.approx(0.5 * pull)


def test_without_a_coefficient_there_is_no_kl() -> None:
    assert losses([1.0], [1.0])[0].kl.item() == 0


def test_estimates_of_kl_have_its_mean_and_gradient() -> None:
    """Summed over a whole vocabulary. The gradients are those of KL(p‖q), and of KL(q‖p) for k3."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, generator=generator, dtype=torch.float64).requires_grad_()
    q = torch.log_softmax(torch.randn(7, generator=generator, dtype=torch.float64), 0)
    p = torch.log_softmax(logits, 0)
    (wanted,) = torch.autograd.grad((p.exp() * (p - q)).sum(), logits, retain_graph=True)
    (reverse,) = torch.autograd.grad((q.exp() * (q - p)).sum(), logits, retain_graph=True)
    nothing = torch.zeros_like(q)
    for estimator, gradient in (("k1", torch.zeros(7)), ("k2", wanted), ("k3", reverse)):
        algorithm = AlgorithmSection.model_validate({"kl_coefficient": 1.0, "kl_estimator": estimator})
        found = token_losses(algorithm, p, nothing, nothing, nothing, q)
        (pull,) = torch.autograd.grad((p.exp().detach() * found.loss).sum(), logits, retain_graph=True)
        torch.testing.assert_close(pull, gradient.double())
        if estimator != "k2":
            assert float((p.exp() * found.kl).sum().detach()) == pytest.approx(
                float((p.exp() * (p - q)).sum().detach())
            )


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
    torch.autograd.backward(found, pull)
    torch.autograd.backward(expected, pull)
    torch.testing.assert_close(one.grad, other.grad)


def test_entropy_of_a_row() -> None:
    even = torch.zeros(1, 8)
    assert row_entropies(even).item() == pytest.approx(math.log(8))
