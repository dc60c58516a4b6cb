"""The loss: a weighted sum over targets, Loss = Σ w_t ℓ_t, whose weights are fixed before anything is cut or packed.

Learners only ever sum, so any split of the targets gives the same gradient.

Three log-probabilities of a sampled token are told apart. The *behaviour* is the sampler's, recorded with the call.
The *proximal* one is the learner's own at the start of the step, and the *current* one is the learner's now. The
clipped ratio is current / proximal: it bounds how far several updates on one batch may move, and with a single update
it is 1, so that only its gradient acts. What separates proximal from behaviour is no movement of the policy but
arithmetic (another dtype, other kernels) and staleness; it is corrected by the importance weight proximal / behaviour,
a constant, truncated from above at ``importance_cut``.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longrein.learning.algorithms import Algorithm


def rollout_weights(
    tokens: NDArray[np.int64], normalization: Literal["rollout_mean", "token_mean", "constant"], constant_length: int
) -> NDArray[np.float64]:
    """The weight of each token of each rollout.

    With R valid rollouts of T tokens each: ``rollout_mean`` 1/(R·T), ``token_mean`` 1/ΣT, ``constant`` 1/(R·L).

    Args:
        tokens: (R,) targets of each valid rollout, over all its calls; those without contrast count too.
        constant_length: L.

    Returns:
        (R,) float64; 0 for a rollout without tokens.
    """
    rollouts, some = max(len(tokens), 1), np.maximum(tokens, 1)
    if normalization == "rollout_mean":
        weights = 1 / (rollouts * some)
    elif normalization == "token_mean":
        weights = np.full(len(tokens), 1 / max(int(tokens.sum()), 1))
    else:
        weights = np.full(len(tokens), 1 / (rollouts * constant_length))
    return np.where(tokens > 0, weights, 0.0)


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """Per target: its loss, and what is reported of it.

    Attributes:
        loss: (T,) with gradient.
        clipped: (T,) bool, where the ratio was clipped and the gradient is zero.
        importance: (T,) proximal / behaviour, before truncation.
        kl: (T,) k3 estimate against the reference; zeros without one.
    """

    loss: Tensor
    clipped: Tensor
    importance: Tensor
    kl: Tensor


def token_losses(
    algorithm: Algorithm,
    logprob: Tensor,
    proximal: Tensor,
    behaviour: Tensor,
    advantage: Tensor,
    reference: Tensor | None = None,
    entropy: Tensor | None = None,
) -> TokenLosses:
    """ℓ of each target.

    The clipped surrogate is Schulman et al. 2017 (PPO, arXiv:1707.06347) Eq. 7 with separate bounds below and above;
    the bound for negative advantages is dual-clip PPO, Ye et al. 2019, arXiv:1912.09729; the truncated importance
    weight multiplies it; the KL estimate is exp(d) - d - 1 with d = reference - current (Schulman's k3; DeepSeekMath,
    arXiv:2402.03300, Eq. 4).

    Args:
        logprob, proximal, behaviour: (T,) log-probability of the sampled token, current, proximal and behaviour.
        advantage: (T,).
        reference: (T,) under the reference policy; needed where ``kl_coefficient`` is set.
        entropy: (T,) of the current distribution, with gradient; needed where ``entropy_coefficient`` is set.
    """
    ratio = torch.exp(logprob - proximal)
    clamped = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
    surrogate = torch.minimum(ratio * advantage, clamped * advantage)
    clipped = clamped * advantage < ratio * advantage
    if algorithm.dual_clip is not None:
        floor = algorithm.dual_clip * advantage
        below = (advantage < 0) & (surrogate < floor)
        surrogate = torch.where(below, floor, surrogate)
        clipped = clipped | below
    importance = torch.exp(proximal - behaviour)
    if algorithm.importance_cut is not None:
        surrogate = surrogate * importance.clamp(max=algorithm.importance_cut)
    loss = -surrogate
    kl = torch.zeros_like(proximal)
    if algorithm.kl_coefficient:
        assert reference is not None, "a KL term needs a reference"
        apart = reference - logprob
        estimate = torch.exp(apart) - apart - 1
        loss = loss + algorithm.kl_coefficient * estimate
        kl = estimate.detach()
    if algorithm.entropy_coefficient:
        assert entropy is not None, "an entropy term needs the entropy"
        loss = loss - algorithm.entropy_coefficient * entropy
    return TokenLosses(loss, clipped, importance, kl)
