"""What is done to rewards and groups before advantages are taken: penalties for length, and which groups stay."""

import math
from collections.abc import Sequence

import numpy as np

from longrein.config import AlgorithmSection
from longrein.learning.advantages import has_contrast


def overlong_penalty(tokens: int, limit: int, buffer: int) -> float:
    """0 up to ``limit - buffer`` tokens, then falling evenly to -1 at ``limit``, -1 beyond.

    Yu et al. 2025, DAPO, arXiv:2503.14476, Eq. 13.
    """
    if tokens <= limit - buffer:
        return 0.0
    return max(-1.0, (limit - buffer - tokens) / buffer) if buffer else -1.0


def shaped(reward: float, tokens: int, algorithm: AlgorithmSection) -> float:
    """A rollout's reward with its penalty for length.

    Args:
        tokens: sampled in the rollout's trainable calls.
    """
    if algorithm.overlong_limit is None:
        return reward
    return reward + overlong_penalty(tokens, algorithm.overlong_limit, algorithm.overlong_buffer)


def kept_groups(rewards: Sequence[Sequence[float]], algorithm: AlgorithmSection) -> list[int]:
    """Which groups are learned from, in order.

    ``contrast``: those whose rewards differ (DAPO, arXiv:2503.14476, Eq. 11). ``variance``: the share, rounded up,
    whose rewards have the largest standard deviation (StarPO-S, arXiv:2504.20073, section 3.3); of equals, the first.
    """
    everything = list(range(len(rewards)))
    if algorithm.keep_groups == "contrast":
        return [index for index in everything if has_contrast(rewards[index])]
    if algorithm.keep_groups == "variance":
        # Rounded: equal spreads of different rewards differ in their last bits.
        spread = [round(float(np.std(group)), 9) if len(group) else 0.0 for group in rewards]
        widest = sorted(everything, key=lambda index: (-spread[index], index))
        return sorted(widest[: math.ceil(round(algorithm.keep_share * len(rewards), 9))])
    return everything
