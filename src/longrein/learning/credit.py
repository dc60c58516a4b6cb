"""From rewards to one advantage and one weight per target, fixed before anything is dropped, cut or packed."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longrein.config import AlgorithmSection
from longrein.forest.targets import Targets
from longrein.learning.advantages import advantages, has_contrast
from longrein.learning.losses import rollout_weights

Values = NDArray[np.float64]
Process = Sequence[float | None]
"""The process rewards of a rollout's trainable calls, in order; None where a call has none."""


@dataclass(frozen=True, slots=True)
class Credit:
    """What each of a batch's T targets is worth.

    Attributes:
        advantage: (T,) float64, its rollout's and its call's.
        weight: (T,) float64, w of the loss sum.
        credited: (T,) bool, whether its loss can have a gradient; the others need not be computed.
        rollouts: R, how many the weights are over.
        groups, groups_with_contrast: how many there are.
    """

    advantage: Values
    weight: Values
    credited: NDArray[np.bool_]
    rollouts: int
    groups: int
    groups_with_contrast: int


def assign(
    rewards: Sequence[Sequence[float]],
    targets: Targets,
    algorithm: AlgorithmSection,
    *,
    process: Sequence[Sequence[Process]] = (),
    masked: NDArray[np.bool_] | None = None,
) -> Credit:
    """Credit the targets of a batch.

    Args:
        rewards: of each group, its valid rollouts' rewards, shaped already.
        targets: their rollouts are counted over the groups in order.
        process: of each group, of each rollout, one value for each of its calls; needed where they have a coefficient.
        masked: (T,) targets that are not trained; their rollouts count in baselines and in R.
    """
    advantage = _rollout_advantages(rewards, targets, algorithm)
    if algorithm.discount < 1:
        advantage = advantage * algorithm.discount ** _calls_to_come(targets)
    if algorithm.process.coefficient:
        of_calls = np.concatenate([np.zeros(0), *(_process_advantages(group, algorithm) for group in process)])
        advantage = advantage + algorithm.process.coefficient * of_calls[targets.call]
    trained = np.ones(len(targets), bool) if masked is None else ~masked
    contrast = sum(has_contrast(group) for group in rewards)
    return _weighed(advantage, targets, algorithm, trained, sum(map(len, rewards)), len(rewards), contrast)


def _rollout_advantages(rewards: Sequence[Sequence[float]], targets: Targets, algorithm: AlgorithmSection) -> Values:
    """(T,) against the baseline of the whole group, or of its rollouts in which the target's agent took part."""
    if algorithm.baseline == "rollout":
        return np.concatenate([np.zeros(0), *advantages(rewards, algorithm.advantage)])[targets.rollout]
    found = np.zeros(len(targets))
    starts = np.cumsum([0, *(len(group) for group in rewards)])
    for agent in np.unique(targets.agent):
        mine = targets.agent == agent
        present = np.zeros(starts[-1], bool)
        present[targets.rollout[mine]] = True
        chosen = [present[start:stop] for start, stop in itertools.pairwise(starts)]
        of_agent = [np.asarray(group)[each].tolist() for group, each in zip(rewards, chosen, strict=True)]
        worth = np.zeros(starts[-1])
        worth[present] = np.concatenate([np.zeros(0), *advantages(of_agent, algorithm.advantage)])
        found[mine] = worth[targets.rollout[mine]]
    return found


def share(
    credit: Credit,
    targets: Targets,
    algorithm: AlgorithmSection,
    tokens: NDArray[np.bool_],
    rollouts: int,
) -> Credit:
    """The credit of a part of the batch: the same advantages, weights over the chosen tokens alone.

    Args:
        tokens: (T,) which targets belong to it.
        rollouts: R of the part.
    """
    chosen = tokens & (credit.weight > 0)
    return _weighed(credit.advantage, targets, algorithm, chosen, rollouts, credit.groups, credit.groups_with_contrast)


def _weighed(
    advantage: Values,
    targets: Targets,
    algorithm: AlgorithmSection,
    trained: NDArray[np.bool_],
    rollouts: int,
    groups: int,
    contrast: int,
) -> Credit:
    """Weights over R = ``rollouts``, of which those that train nothing have no tokens."""
    tokens = np.bincount(targets.rollout[trained], minlength=int(targets.rollout.max(initial=-1)) + 1)
    weights = rollout_weights(tokens, max(rollouts, 1), algorithm.normalization, algorithm.constant_length)
    weight = np.where(trained, weights[targets.rollout], 0.0)
    credited = (weight > 0) & ((advantage != 0) | algorithm.needs_every_token)
    return Credit(advantage, weight, credited, rollouts, groups, contrast)


def _calls_to_come(targets: Targets) -> NDArray[np.int64]:
    """(T,) how many calls of its rollout come after each target's."""
    last = np.full(int(targets.rollout.max(initial=-1)) + 1, -1)
    np.maximum.at(last, targets.rollout, targets.call)
    # Calls are numbered over the batch, rollout by rollout.
    return np.asarray(last[targets.rollout] - targets.call, np.int64)


def _process_advantages(group: Sequence[Process], algorithm: AlgorithmSection) -> Values:
    """A_proc of every call of a group's rollouts, one after the other.

    Shao et al. 2024, DeepSeekMath, arXiv:2402.03300, section 4.1.3: normalised over all calls of the group, then summed
    from a call to the end; here discounted.
    """
    given = np.asarray([reward for calls in group for reward in calls if reward is not None], np.float64)
    mean, spread = (float(given.mean()), float(given.std(ddof=1))) if has_contrast(given) else (0.0, 0.0)
    scale = spread if algorithm.advantage in ("group_std", "batch_std", "group_mean_batch_std") else 1.0
    found = []
    for calls in group:
        total, sums = 0.0, []
        for reward in reversed(calls):
            own = 0.0 if reward is None or not spread else (reward - mean) / scale
            total = own + algorithm.process.discount * total
            sums.append(total)
        found += sums[::-1]
    return np.asarray(found, np.float64)
