"""Advantages of whole rollouts, within their group or their batch.

Invariant: each valid rollout counts once in a baseline, however many calls or tokens it has, and before anything is
dropped or split.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

# Rewards closer than this are one reward: rounding must not become a standard deviation to divide by.
SAME = 1e-9


def group_std(rewards: Values) -> Values:
    """(r - mean) / std, with the standard deviation of a sample (n - 1).

    Shao et al. 2024, DeepSeekMath, arXiv:2402.03300, section 4.1.2.
    """
    return _divided(group_mean(rewards))


def group_mean(rewards: Values) -> Values:
    """r - mean.

    Liu et al. 2025, Understanding R1-Zero-Like Training, arXiv:2503.20783, section 3.2 (Dr. GRPO).
    """
    return np.asarray(rewards - rewards.mean()) if has_contrast(rewards) else np.zeros(len(rewards))


def leave_one_out(rewards: Values) -> Values:
    """r - mean of the others.

    Ahmadian et al. 2024, Back to Basics, arXiv:2402.14740, section 2.3 (RLOO).
    """
    return group_mean(rewards) * (len(rewards) / max(len(rewards) - 1, 1))


def _each(of_group: Callable[[Values], Values]) -> Callable[[Sequence[Values]], list[Values]]:
    return lambda groups: [of_group(group) for group in groups]


def batch_std(groups: Sequence[Values]) -> list[Values]:
    """(r - mean) / std over the rollouts of all groups.

    Hu 2025, REINFORCE++, arXiv:2501.03262, section 3 (global advantage normalisation).
    """
    return _split(group_std(_joined(groups)), groups)


def group_mean_batch_std(groups: Sequence[Values]) -> list[Values]:
    """r - the group's mean, divided by the standard deviation of these differences over all groups.

    Hu 2025, REINFORCE++, arXiv:2501.03262, section 3 (REINFORCE++-baseline).
    """
    return _split(_divided(_joined([group_mean(group) for group in groups])), groups)


ADVANTAGES: Mapping[str, Callable[[Sequence[Values]], list[Values]]] = {
    "group_std": _each(group_std),
    "group_mean": _each(group_mean),
    "leave_one_out": _each(leave_one_out),
    "batch_std": batch_std,
    "group_mean_batch_std": group_mean_batch_std,
    "reward": list,
}


def has_contrast(rewards: Sequence[float] | Values) -> bool:
    """Whether rewards differ."""
    return len(rewards) > 1 and max(rewards) - min(rewards) > SAME


def advantages(rewards: Sequence[Sequence[float]], kind: str) -> list[Values]:
    """Advantage of each rollout of a batch.

    Args:
        rewards: of each group's valid rollouts.
        kind: a key of ``ADVANTAGES``.

    Returns:
        (n,) float64 for each group.
    """
    return ADVANTAGES[kind]([np.asarray(group, np.float64) for group in rewards])


def _divided(centred: Values) -> Values:
    """By the standard deviation of a sample, where there is one."""
    return centred / centred.std(ddof=1) if has_contrast(centred) else np.zeros(len(centred))


def _joined(groups: Sequence[Values]) -> Values:
    return np.concatenate([np.zeros(0), *groups])


def _split(joined: Values, groups: Sequence[Values]) -> list[Values]:
    return np.split(joined, np.cumsum([len(group) for group in groups])[:-1]) if groups else []
