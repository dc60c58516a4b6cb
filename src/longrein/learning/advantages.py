"""Advantages of whole rollouts, within their group.

Invariant: each valid rollout of a group counts once in the baseline, however many calls or tokens it has, and before
anything is dropped or split.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

# Rewards closer than this are one reward: rounding must not become a standard deviation to divide by.
SAME = 1e-9


def group_std(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """(r - mean) / std, with the standard deviation of a sample (n - 1).

    Shao et al. 2024, DeepSeekMath, arXiv:2402.03300, section 4.1.2.
    """
    return np.asarray((rewards - rewards.mean()) / rewards.std(ddof=1))


def group_mean(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """r - mean.

    Liu et al. 2025, Understanding R1-Zero-Like Training, arXiv:2503.20783, section 3.2 (Dr. GRPO).
    """
    return np.asarray(rewards - rewards.mean())


def leave_one_out(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """r - mean of the others.

    Ahmadian et al. 2024, Back to Basics, arXiv:2402.14740 (RLOO).
    """
    return np.asarray((rewards - rewards.mean()) * (len(rewards) / (len(rewards) - 1)))


ADVANTAGES: Mapping[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
    "group_std": group_std,
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
}


def has_contrast(rewards: Sequence[float]) -> bool:
    """Whether a group's rewards differ."""
    return len(rewards) > 1 and max(rewards) - min(rewards) > SAME


def advantages(rewards: Sequence[float], kind: str) -> NDArray[np.float64]:
    """Advantage of each rollout of one group; all zero where the rewards do not differ.

    Args:
        rewards: of the group's valid rollouts.
        kind: a key of ``ADVANTAGES``.

    Returns:
        (n,) float64.
    """
    if not has_contrast(rewards):
        return np.zeros(len(rewards))
    return ADVANTAGES[kind](np.asarray(rewards, np.float64))
