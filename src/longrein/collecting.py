"""Keeps rollouts coming: groups are started in the plan's order, end when they end, and are each taken by one step.

A step takes the oldest groups that are complete. In ``sync`` mode no more are started than it still needs; in ``async``
mode as many further ones are under way as ``max_staleness`` steps will take, and go on while the policy changes. Which
step has taken a group is in the ledger before the step learns from it: a step that is made again takes the same groups.
"""

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from longrein.agents.controller import Collected, Wanted
from longrein.batches import kept
from longrein.plan import training_group
from longrein.progress import Phase
from longrein.records import Rollout, Split
from longrein.run import Run
from longrein.waits import waiting


class Collecting:
    """The groups of a run; enter it, and everything it started is ended on the way out."""

    def __init__(self, run: Run) -> None:
        training = run.config.training
        self._run = run
        self._ahead = training.max_staleness if training.mode == "async" else 0
        self._next = 0
        self._taken: set[str] = set()
        self._running: dict[int, asyncio.Task[Collected]] = {}
        self._ended: dict[str, list[Rollout]] = {}
        self._phase: Phase | None = None

    async def __aenter__(self) -> Self:
        self._taken = set(await self._run.ledger.taken())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    @property
    def under_way(self) -> int:
        """Groups that are started and not taken."""
        return len(self._running)

    async def take(self, step: int) -> list[Collected]:
        """The groups of a step, by number; those it took when it was made before, if it was."""
        before = await self._run.ledger.groups(Split.TRAIN, step)
        if before:
            return [await self._run.controller.recorded(self._want(int(group.group_id[1:]))) for group in before]
        training, most = self._run.config.training, self._most()
        found: dict[int, Collected] = {}
        with self._run.display.phase(f"step {step + 1}", training.groups * training.rollouts) as self._phase:
            while missing := min(self._missing(list(found.values())), most - len(found)):
                if len(self._running) < missing and found:
                    self._run.display.say(
                        f"step {step + 1}: {len(found)} groups are complete, {training.groups - missing} of them with "
                        f"contrast; collecting {missing} in their place"
                    )
                self._start(missing, step)
                self._show()
                # Each group has a deadline of its own; at worst all of them run one after the other.
                async with waiting(
                    f"{missing} groups of step {step + 1}", training.collect_s * (len(self._running) + 1)
                ):
                    await asyncio.wait(self._running.values(), return_when=asyncio.FIRST_COMPLETED)
                for number in sorted(number for number, task in self._running.items() if task.done())[:missing]:
                    found[number] = self._running.pop(number).result()
        self._phase = None
        groups = [found[number] for number in sorted(found)]
        await self._run.ledger.take([group.group.group_id for group in groups], step)
        for group in groups:
            self._ended.pop(group.group.group_id, None)
        self._start(0, step)
        return groups

    def _missing(self, found: Sequence[Collected]) -> int:
        return self._run.config.training.groups - len(kept(self._run.config, found))

    def _most(self) -> int:
        """Groups that a step may take at most; those without contrast are replaced by others."""
        training, algorithm = self._run.config.training, self._run.config.algorithm
        return training.groups * (algorithm.collect_rounds if algorithm.keep_groups == "contrast" else 1)

    def _start(self, missing: int, step: int) -> None:
        """Start groups until those under way are what this step misses and the further steps may have begun."""
        training = self._run.config.training
        further = min(self._ahead, training.steps - step - 1) * training.groups
        while len(self._running) < missing + further:
            want = self._want(self._next)
            if want.group.group_id not in self._taken:
                task = asyncio.create_task(self._run.controller.group(want, self._finished), name=want.group.group_id)
                self._running[self._next] = task
            self._next += 1

    def _want(self, number: int) -> Wanted:
        training = self._run.config.training
        return training_group(
            self._run.tasks,
            number,
            rollouts=training.rollouts,
            temperature=self._run.config.sampling.temperature,
            seed=training.seed,
        )

    def _finished(self, rollout: Rollout) -> None:
        self._ended.setdefault(rollout.group_id, []).append(rollout)
        self._show()

    def _show(self) -> None:
        """How many rollouts of the groups not taken have ended, and how well."""
        if self._phase is None:
            return
        ended = [rollout for rollouts in self._ended.values() for rollout in rollouts]
        rewards = [rollout.reward for rollout in ended if rollout.reward is not None]
        whole = self._run.config.training.groups * self._run.config.training.rollouts
        mean = sum(rewards) / max(len(rewards), 1)
        self._phase.reach(min(len(ended), whole), whole, f"rollouts, reward {mean:.2f}")
