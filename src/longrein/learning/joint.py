"""Several policies trained at once: one adapter for each over the same base weights, each with an optimizer of its own.

Invariant: a policy learns from its own calls alone, and from every one of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from longrein.config import AlgorithmSection, LearnerSection
from longrein.forest.targets import trainable
from longrein.learning.batch import Cancelled, Progress, TrainBatch, TrainGroup, TrainRollout
from longrein.learning.figures import UpdateReport
from longrein.learning.fsdp import FsdpLearner, check
from longrein.learning.learner import Body, EmbeddedLearner


class JointLearner:
    """A ``Learner`` of several policies.

    Args:
        learners: policy → the learner of its adapter; all over one module.
    """

    def __init__(self, learners: Mapping[str, EmbeddedLearner]) -> None:
        self._learners = dict(learners)
        self.policies = tuple(self._learners)

    @property
    def module(self) -> PreTrainedModel:
        """What all of them share."""
        return next(iter(self._learners.values())).module

    def describe(self) -> str:
        """One line for people."""
        return f"{next(iter(self._learners.values())).describe()} for each of {', '.join(self.policies)}"

    def update(
        self, batch: TrainBatch, progress: Progress | None = None, cancelled: Cancelled | None = None
    ) -> UpdateReport:
        """The optimizer steps of every policy, one policy after the other; see ``Learner``.

        The report is the first policy's, with those of the others in ``policies``; ``learned`` where any has learned.
        """
        reports = {
            policy: learner.update(of_policy(batch, policy), progress, cancelled)
            for policy, learner in self._learners.items()
        }
        first, *others = self.policies
        learned = any(report.learned for report in reports.values())
        why_not = "; ".join(f"{policy}: {report.why_not}" for policy, report in reports.items() if report.why_not)
        return replace(
            reports[first], learned=learned, why_not=why_not, policies={policy: reports[policy] for policy in others}
        )

    def weights(self, policy: str) -> Mapping[str, Tensor]:
        """See ``Learner``."""
        return self._learners[policy].weights(policy)

    def save(self, directory: Path) -> None:
        """A folder for each policy; see ``Learner``."""
        for policy, learner in self._learners.items():
            own = directory / policy
            own.mkdir()
            learner.save(own)

    def load(self, directory: Path) -> None:
        """See ``Learner``."""
        for policy, learner in self._learners.items():
            learner.load(directory / policy)

    def close(self) -> None:
        """They started nothing; see ``Learner``."""


def open_learner(
    directory: Path, config: LearnerSection, algorithm: AlgorithmSection, steps: int, policies: Sequence[str]
) -> "EmbeddedLearner | JointLearner | FsdpLearner":
    """The learner of one policy, on one rank or several, or of several policies over one base."""
    check(config, algorithm, policies)
    if config.kind == "fsdp":
        return FsdpLearner(directory, config, algorithm, steps)
    if len(policies) == 1:
        return EmbeddedLearner.open(directory, config, algorithm, steps)
    body = Body.open(directory, config, policies)
    return JointLearner({policy: EmbeddedLearner(body, config, algorithm, (policy,), steps) for policy in policies})


def of_policy(batch: TrainBatch, policy: str) -> TrainBatch:
    """The same groups and rollouts with the calls of one policy alone."""
    groups = [
        TrainGroup(group.group_id, tuple(_of_policy(rollout, policy) for rollout in group.rollouts))
        for group in batch.groups
    ]
    return replace(batch, groups=tuple(groups))


def _of_policy(rollout: TrainRollout, policy: str) -> TrainRollout:
    calls = tuple(call for call in rollout.calls if call.policy == policy)
    judged = [call for call in rollout.calls if trainable(call)]
    process = tuple(
        reward for call, reward in zip(judged, rollout.process, strict=bool(rollout.process)) if call.policy == policy
    )
    return replace(rollout, calls=calls, process=process)
