"""From rewards to one advantage and one weight per target, fixed before anything is dropped, cut or packed."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longrein.learning.advantages import advantages, has_contrast
from longrein.learning.algorithms import Algorithm
from longrein.learning.losses import rollout_weights
from longrein.records import IntArray


@dataclass(frozen=True, slots=True)
class Credit:
    """What each of a batch's T targets is worth.

    Attributes:
        advantage: (T,) float64, its rollout's.
        weight: (T,) float64, w of the loss sum.
        credited: (T,) bool, whether its loss can have a gradient; the others need not be computed.
        groups, groups_with_contrast: how many there are.
    """

    advantage: NDArray[np.float64]
    weight: NDArray[np.float64]
    credited: NDArray[np.bool_]
    groups: int
    groups_with_contrast: int


def assign(rewards: Sequence[Sequence[float]], rollout: IntArray, algorithm: Algorithm) -> Credit:
    """Credit the targets of a batch.

    Args:
        rewards: of each group, its valid rollouts' rewards.
        rollout: (T,) each target's rollout, counted over the groups in order.
    """
    worth = np.concatenate([np.zeros(0), *(advantages(group, algorithm.advantage) for group in rewards)])  # (R,)
    tokens = np.bincount(rollout, minlength=len(worth)).astype(np.int64)
    weights = rollout_weights(tokens, algorithm.normalization, algorithm.constant_length)
    advantage, weight = worth[rollout], weights[rollout]
    credited = (weight > 0) & ((advantage != 0) | algorithm.needs_every_token)
    return Credit(advantage, weight, credited, len(rewards), sum(has_contrast(group) for group in rewards))
