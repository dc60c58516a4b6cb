"""From the groups that a step has taken to what its update learns from."""

import asyncio
from collections.abc import Sequence
from typing import Protocol, TypeVar

from longrein.agents.controller import Collected
from longrein.config import Config
from longrein.learning.batch import TrainBatch, TrainGroup, TrainRollout
from longrein.learning.process import process_rewards
from longrein.learning.shaping import kept_groups
from longrein.ledger import Ledger
from longrein.records import Call, Rollout


class HasRollouts(Protocol):
    """The part of a group that decides whether it is learned from."""

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        """The valid ones."""
        ...


G = TypeVar("G", bound=HasRollouts)


def at_quorum(config: Config, group: HasRollouts) -> bool:
    """Whether enough of a group's rollouts are valid."""
    return len(group.rollouts) >= max(2, config.training.quorum * config.training.rollouts)


def kept(config: Config, groups: Sequence[G]) -> list[G]:
    """The groups that are learned from: at quorum, chosen by the algorithm, and no more than a step has."""
    valid = [group for group in groups if at_quorum(config, group)]
    rewards = [[reward_of(rollout) for rollout in group.rollouts] for group in valid]
    return [valid[index] for index in kept_groups(rewards, config.algorithm)][: config.training.groups]


async def assemble(config: Config, ledger: Ledger, groups: Sequence[Collected], step: int) -> TrainBatch:
    """The recorded calls of every valid rollout."""
    assembled = []
    for group in groups:
        rollouts = []
        for rollout in group.rollouts:
            calls = await ledger.calls(rollout.rollout_id)
            process = await _process_rewards(config, rollout, calls)
            cut_off = _cut_off(rollout, calls, config)
            rollouts.append(TrainRollout(rollout.rollout_id, reward_of(rollout), tuple(calls), cut_off, process))
        assembled.append(TrainGroup(group.group.group_id, tuple(rollouts)))
    training = config.training
    return TrainBatch(tuple(assembled), step, training.max_staleness if training.mode == "async" else None)


def reward_of(rollout: Rollout) -> float:
    """A valid rollout's."""
    assert rollout.reward is not None, "only valid rollouts are asked"
    return rollout.reward


async def _process_rewards(config: Config, rollout: Rollout, calls: Sequence[Call]) -> tuple[float | None, ...]:
    """Of a rollout's trainable calls, where the algorithm wants them. A hook may take its time."""
    section = config.algorithm.process
    return await asyncio.to_thread(process_rewards, section, rollout, calls) if section.coefficient else ()


def _cut_off(rollout: Rollout, calls: Sequence[Call], config: Config) -> bool:
    """Whether a limit ended the rollout, rather than the agent."""
    if rollout.ending == "timed out" or len(calls) >= config.gateway.max_calls:
        return True
    if sum(len(call.completion_ids) for call in calls) >= config.gateway.max_tokens:
        return True
    answered = [call for call in calls if call.delivered and call.train]
    return bool(answered) and answered[-1].finish_reason == "length"
