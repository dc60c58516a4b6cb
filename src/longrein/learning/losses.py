"""The loss: a weighted sum over targets, Loss = Σ w_t ℓ_t, whose weights are fixed before anything is cut or packed.

Learners only ever sum, so any split of the targets gives the same gradient.

Three log-probabilities of a sampled token are told apart. The *behaviour* is the sampler's, recorded with the call.
The *proximal* one is the learner's own before the first update on a batch, and the *current* one is the learner's now.
The ratio of the surrogate is current/proximal (or current/behaviour, where ``old_policy`` says so): it bounds how far
several updates on one batch may move, and is 1 at the first of them. What separates proximal from behaviour is no
movement on this batch but arithmetic and staleness; the importance weight corrects for it (see ``importance``).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longrein.config import AlgorithmSection
from longrein.learning.surrogates import SURROGATES


def rollout_weights(
    tokens: NDArray[np.int64],
    rollouts: int,
    normalization: Literal["rollout_mean", "token_mean", "constant"],
    constant_length: int,
) -> NDArray[np.float64]:
    """The weight of each token of each rollout.

    With R valid rollouts of T tokens each: ``rollout_mean`` 1/(R·T), ``token_mean`` 1/ΣT, ``constant`` 1/(R·L).

    Args:
        tokens: (n,) targets of each rollout, over all its calls; those without contrast count too.
        rollouts: R, those without tokens included.
        constant_length: L.

    Returns:
        (n,) float64; 0 for a rollout without tokens.
    """
    some = np.maximum(tokens, 1)
    if normalization == "rollout_mean":
        weights = 1 / (rollouts * some)
    elif normalization == "token_mean":
        weights = np.full(len(tokens), 1 / max(int(tokens.sum()), 1))
    else:
        weights = np.full(len(tokens), 1 / (rollouts * constant_length))
    return np.where(tokens > 0, weights, 0.0)


def k1(apart: Tensor) -> Tensor:
    """log p - log q. Its mean is KL(p‖q), its gradient zero in expectation."""
    return -apart


def k2(apart: Tensor) -> Tensor:
    """(log p - log q)² / 2. The expected gradient is that of KL(p‖q)."""
    return apart**2 / 2


def k3(apart: Tensor) -> Tensor:
    """q/p - 1 - log(q/p). Its mean is KL(p‖q), and it is never negative; DeepSeekMath, arXiv:2402.03300, Eq. 4."""
    return torch.exp(apart) - apart - 1


# Schulman 2020, Approximating KL Divergence: of samples from p, given log q - log p.
ESTIMATORS: Mapping[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """Per target: its loss, and what is reported of it.

    Attributes:
        loss: (T,) with gradient.
        clipped_low, clipped_high: (T,) bool, where the ratio met a bound that acts.
        ratio: (T,) current/old, without gradient.
        kl: (T,) estimate against the reference, without gradient; zeros without one.
    """

    loss: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    ratio: Tensor
    kl: Tensor


def token_losses(
    algorithm: AlgorithmSection,
    logprob: Tensor,
    log_ratio: Tensor,
    advantage: Tensor,
    importance: Tensor,
    reference: Tensor | None = None,
    entropy: Tensor | None = None,
) -> TokenLosses:
    """ℓ of each target: -importance · surrogate + kl_coefficient · KL - entropy_coefficient · entropy.

    Args:
        logprob: (T,) current log-probability of the sampled token, with gradient.
        log_ratio: (T,) value of log(current/old), at the level of ``ratio_level``; its gradient is taken to be that of
            ``logprob`` (GSPO-token, Zheng et al. 2025, arXiv:2507.18071, Eq. 14; with equal weights and advantages over
            a sequence, the gradient of its mean log ratio).
        advantage: (T,).
        importance: (T,) weight proximal/behaviour, a constant.
        reference: (T,) under the reference policy; needed where ``kl_coefficient`` is set.
        entropy: (T,) of the current distribution, with gradient; needed where ``entropy_coefficient`` is set.
    """
    ratio = torch.exp(log_ratio.detach() + (logprob - logprob.detach()))
    surrogate = SURROGATES[algorithm.surrogate](algorithm, ratio, logprob, advantage)
    loss = -importance * surrogate.value
    kl = torch.zeros_like(advantage)
    if algorithm.kl_coefficient:
        assert reference is not None, "a KL term needs a reference"
        estimate = ESTIMATORS[algorithm.kl_estimator](reference - logprob)
        loss = loss + algorithm.kl_coefficient * estimate
        kl = estimate.detach()
    if algorithm.entropy_coefficient:
        assert entropy is not None, "an entropy term needs the entropy"
        loss = loss - algorithm.entropy_coefficient * entropy
    return TokenLosses(loss, surrogate.clipped_low, surrogate.clipped_high, ratio.detach(), kl)
