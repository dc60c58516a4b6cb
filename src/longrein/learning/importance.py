"""Ratios of probabilities over more than one token, and the weights that correct for a sampler that is not the learner.

The behaviour policy sampled a token, the proximal one is the learner before the update; between them lie another
arithmetic (dtype, kernels) and staleness. The weight proximal/behaviour is a constant of the loss.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from longrein.config import AlgorithmSection
from longrein.forest.targets import Targets

Values = NDArray[np.float64]
Level = Literal["token", "call", "rollout"]


# Of a long product; what is beyond is cut anyway, and no sum of squares of it is infinite.
LARGEST_LOG = 50.0


@dataclass(frozen=True, slots=True)
class Weights:
    """Importance weights of T targets.

    Attributes:
        ratio: (T,) before truncation or rejection, at the level asked for.
        weight: (T,) as they multiply the loss; 0 for a rejected target.
        cut: (T,) bool, truncated or rejected.
    """

    ratio: Values
    weight: Values
    cut: NDArray[np.bool_]


def over(level: Level, targets: Targets, values: Values, *, mean: bool) -> Values:
    """(T,) the sum or mean of ``values`` over each target's call or rollout; at token level the values themselves."""
    if level == "token":
        return values
    index = targets.call if level == "call" else targets.rollout
    total = np.bincount(index, values)[index]
    return np.asarray(total / np.bincount(index)[index] if mean else total)


def importance_weights(algorithm: AlgorithmSection, targets: Targets, proximal: Values) -> Weights:
    """Weights proximal/behaviour.

    Truncation: Espeholt et al. 2018, IMPALA, arXiv:1802.01561, section 4.1. Rejection outside a band: IcePop, Ling Team
    2025, arXiv:2510.18855.

    Args:
        proximal: (T,) log-probability under the learner at the start of the update.
    """
    mean = algorithm.importance_mean == "geometric"
    apart = over(algorithm.importance_level, targets, proximal - targets.logprob, mean=mean)
    return bounded(algorithm, np.exp(np.minimum(apart, LARGEST_LOG)))


def bounded(algorithm: AlgorithmSection, ratio: Values) -> Weights:
    """The weights that ratios become."""
    high = ratio > algorithm.importance_high
    if algorithm.importance == "none":
        return Weights(ratio, np.ones_like(ratio), np.zeros(len(ratio), bool))
    if algorithm.importance == "truncate":
        return Weights(ratio, np.minimum(ratio, algorithm.importance_high), high)
    rejected = high | (ratio < algorithm.importance_low) if algorithm.importance == "band" else high
    return Weights(ratio, np.where(rejected, 0.0, ratio), rejected)


def effective_sample_size(weight: Values) -> float:
    """(Σw)² / (n·Σw²): 1 where all weights are equal, 1/n where one is everything; 0 of nothing.

    Kong 1992, A note on importance sampling using standardized weights.
    """
    squares = float((weight**2).sum())
    return float(weight.sum()) ** 2 / (len(weight) * squares) if squares > 0 else 0.0
