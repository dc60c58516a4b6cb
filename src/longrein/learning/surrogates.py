"""What is maximised of one token, given its ratio current/old and its advantage: one function a family.

Each returns the surrogate, with the gradient that the algorithm is, and where it was clipped below and above.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from longrein.config import AlgorithmSection


@dataclass(frozen=True, slots=True)
class Surrogate:
    """Per target: (T,) value with gradient, and (T,) bool where the ratio met its lower or its upper bound."""

    value: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


def clip(algorithm: AlgorithmSection, ratio: Tensor, logprob: Tensor, advantage: Tensor) -> Surrogate:
    """min(r·A, clip(r, 1 - low, 1 + high)·A), and not below dual_clip·A.

    Schulman et al. 2017, PPO, arXiv:1707.06347, Eq. 7; separate bounds, DAPO, arXiv:2503.14476, Eq. 10; dual clip, Ye
    et al. 2019, arXiv:1912.09729, Eq. 5.
    """
    clamped = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
    value = torch.minimum(ratio * advantage, clamped * advantage)
    clipped_low = (ratio < 1 - algorithm.clip_low) & (advantage < 0)
    clipped_high = (ratio > 1 + algorithm.clip_high) & (advantage > 0)
    if algorithm.dual_clip is not None:
        floor = algorithm.dual_clip * advantage
        below = (advantage < 0) & (value < floor)
        value = torch.where(below, floor, value)
        clipped_high = clipped_high | below
    return Surrogate(value, clipped_low, clipped_high)


def cispo(algorithm: AlgorithmSection, ratio: Tensor, logprob: Tensor, advantage: Tensor) -> Surrogate:
    """The clipped ratio, as a constant, times A·log p: a clipped token keeps its gradient.

    MiniMax 2025, MiniMax-M1, arXiv:2506.13585, Eq. 4 and 5.
    """
    fixed = ratio.detach()
    low, high = 1 - algorithm.clip_low, 1 + algorithm.clip_high
    return Surrogate(fixed.clamp(low, high) * advantage * logprob, fixed < low, fixed > high)


def policy_gradient(algorithm: AlgorithmSection, ratio: Tensor, logprob: Tensor, advantage: Tensor) -> Surrogate:
    """A·log p. Williams 1992, Machine Learning 8, section 4."""
    never = torch.zeros_like(logprob, dtype=torch.bool)
    return Surrogate(advantage * logprob, never, never)


SURROGATES: Mapping[str, Callable[[AlgorithmSection, Tensor, Tensor, Tensor], Surrogate]] = {
    "clip": clip,
    "cispo": cispo,
    "policy_gradient": policy_gradient,
}
