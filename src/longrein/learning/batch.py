"""What one update learns from: rewarded rollouts, merged into a forest, credited, and dealt out to optimizer steps."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from longrein.config import AlgorithmSection
from longrein.errors import LearnerError
from longrein.forest.packing import MicroBatch, pack
from longrein.forest.targets import Targets, harvest, trainable
from longrein.learning.capo import ROLES, Capo
from longrein.learning.credit import Credit, assign, share
from longrein.learning.shaping import shaped
from longrein.records import Call, Role


@dataclass(frozen=True, slots=True)
class TrainRollout:
    """A valid rollout.

    Attributes:
        calls: all of them, delivered or not.
        cut_off: whether it ran into a limit: of time, calls, tokens or context.
        process: process rewards of its trainable calls, in order, None where a call has none; empty where there are
            none at all.
    """

    rollout_id: str
    reward: float
    calls: tuple[Call, ...]
    cut_off: bool = False
    process: tuple[float | None, ...] = ()


@dataclass(frozen=True, slots=True)
class TrainGroup:
    """The valid rollouts that share a baseline."""

    group_id: str
    rollouts: tuple[TrainRollout, ...]


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """What one update learns from.

    Attributes:
        version: of the policy that is updated; what sampled a token may be older.
        max_staleness: in versions; tokens that are older are not trained. None trains them all.
    """

    groups: tuple[TrainGroup, ...]
    version: int = 0
    max_staleness: int | None = None

    @property
    def rollouts(self) -> list[TrainRollout]:
        return [rollout for group in self.groups for rollout in group.rollouts]


Progress = Callable[[int, int], None]
"""Called after each micro-batch with how many are done, and of how many."""

Cancelled = Callable[[], bool]
"""Asked between micro-batches whether to stop."""


@dataclass(frozen=True, slots=True)
class Objective:
    """One loss of an optimizer step.

    Attributes:
        role: of the tokens that make it; None where all do.
    """

    credit: Credit
    parts: list[MicroBatch]
    role: Role | None = None


class Work:
    """A batch, merged and credited, and the micro-batches of each of its optimizer steps.

    Attributes:
        stale: (T,) targets that are too old to be trained.
        needed: (T,) targets of every rollout that has a credited one.
        steps: the losses of each optimizer step.
        parts: the micro-batches of all of them.

    Raises:
        LearnerError: the batch contradicts itself.
    """

    def __init__(
        self,
        batch: TrainBatch,
        algorithm: AlgorithmSection,
        budget: int,
        progress: Progress | None,
        cancelled: Cancelled | None,
        capo: Capo | None = None,
    ) -> None:
        rollouts = batch.rollouts
        self.merged = harvest([rollout.calls for rollout in rollouts])
        targets = self.merged.targets
        cut_off = np.array([algorithm.cut_off == "mask" and rollout.cut_off for rollout in rollouts], bool)
        age = batch.version - targets.version
        self.stale = np.zeros(len(targets), bool) if batch.max_staleness is None else age > batch.max_staleness
        self.credit = assign(
            _shaped_rewards(batch, targets, algorithm),
            targets,
            algorithm,
            process=[[_process(rollout) for rollout in group.rollouts] for group in batch.groups],
            masked=cut_off[targets.rollout] | self.stale,
        )
        useful = np.bincount(targets.rollout, self.credit.credited, minlength=len(rollouts)) > 0
        self.needed = useful[targets.rollout] & (self.credit.weight > 0)
        credits = [self.credit] if algorithm.mini_batches == 1 else _dealt(batch, self.credit, targets, algorithm)
        self._budget = budget
        self.steps = [self._objectives(each, algorithm, capo) for each in credits] * algorithm.epochs
        self.parts = [part for step in self.steps for objective in step for part in objective.parts]
        self._progress = progress
        self._cancelled = cancelled
        self._done = 0

    def advance(self) -> None:
        """A micro-batch is done."""
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, len(self.parts))

    def check(self) -> None:
        """Raises LearnerError where the update was cancelled."""
        if self._cancelled is not None and self._cancelled():
            raise LearnerError(f"the update was cancelled after {self._done} of {len(self.parts)} micro-batches.")

    def _objectives(self, credit: Credit, algorithm: AlgorithmSection, capo: Capo | None) -> list[Objective]:
        if capo is None:
            return [self._objective(credit, None)]
        found, targets = [], self.merged.targets
        for role in ROLES:
            own = share(credit, targets, algorithm, capo.tokens(targets, role), credit.rollouts)
            own = replace(own, weight=own.weight * capo.coefficient(role))
            found.append(self._objective(own, role))
        return found

    def _objective(self, credit: Credit, role: Role | None) -> Objective:
        credited = credit.credited & (credit.weight > 0)
        return Objective(credit, pack(self.merged.forest, self.merged.targets.row, credited, self._budget), role)


def _process(rollout: TrainRollout) -> tuple[float | None, ...]:
    """One value for each trainable call."""
    count = sum(trainable(call) for call in rollout.calls)
    if rollout.process and len(rollout.process) != count:
        raise LearnerError(
            f"rollout {rollout.rollout_id} has {count} trainable calls, but {len(rollout.process)} process rewards; "
            "give one, or None, for each."
        )
    return rollout.process or (None,) * count


def _shaped_rewards(batch: TrainBatch, targets: Targets, algorithm: AlgorithmSection) -> list[list[float]]:
    tokens = iter(np.bincount(targets.rollout, minlength=len(batch.rollouts)).tolist())
    return [[shaped(rollout.reward, next(tokens), algorithm) for rollout in group.rollouts] for group in batch.groups]


def _dealt(batch: TrainBatch, credit: Credit, targets: Targets, algorithm: AlgorithmSection) -> list[Credit]:
    """The credit of each mini-batch: groups are dealt out in turn, so that each stays whole."""
    owner = np.repeat(np.arange(len(batch.groups)), [len(group.rollouts) for group in batch.groups])
    found = []
    for index in range(algorithm.mini_batches):
        mine = owner % algorithm.mini_batches == index  # (R,)
        found.append(share(credit, targets, algorithm, mine[targets.rollout], int(mine.sum())))
    return found


def nothing_to_learn(batch: TrainBatch, work: Work) -> str:
    """Why none of a batch's targets has a gradient."""
    rewards = [[rollout.reward for rollout in group.rollouts] for group in batch.groups]
    credit = work.credit
    if not rewards:
        return "no group reached its quorum of rollouts with a reward, or none was kept"
    if not len(work.merged.targets):
        return "no trainable token: no call was delivered, or nothing was sampled"
    if work.stale.all():
        return f"every token is older than training.max_staleness allows: {batch.max_staleness} versions"
    if not credit.weight.any():
        return "every rollout was cut off, and algorithm.cut_off is mask"
    if not credit.groups_with_contrast:
        return f"no contrast: within each of the {credit.groups} groups all rewards are equal{_all_alike(rewards)}"
    return "the rollouts that differ from their group have no trainable token"


def _all_alike(rewards: list[list[float]]) -> str:
    """What to do where no group's rewards differ from another's either."""
    found = {reward for group in rewards for reward in group}
    if len(found) > 1:
        return ""
    return (
        f" (all are {found.pop():g}: give tasks that are sometimes solved, a reward for part of the way, or "
        "model.demonstrations)"
    )
