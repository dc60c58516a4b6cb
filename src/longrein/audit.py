"""What a run directory proves, read back from the ledger and the checkpoints by nothing that wrote them.

Each check is one of the promises a run makes: tasks in the plan's order, every rollout ended and counted once, every
sampled token of every trainable call trained by one step, none older than allowed, every reward with its evidence.
"""

import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from longrein.batches import kept
from longrein.config import Config
from longrein.doctor import Check, Report
from longrein.errors import LongreinError
from longrein.forest.targets import trainable
from longrein.ledger import CommittedStep, Ledger
from longrein.plan import training_group
from longrein.publishing import checkpoints
from longrein.records import Call, Group, Rollout, RolloutState, Split
from longrein.run import load_tasks
from longrein.rundir import RunDirectory

ENDED = (RolloutState.DONE, RolloutState.FAILED, RolloutState.CANCELLED)
SHOWN = 3


class Findings:
    """What one check has looked at, and what was wrong."""

    def __init__(self, name: str, what: str) -> None:
        self.name = name
        self._what = what
        self._count = 0
        self._wrong: list[str] = []

    def expect(self, holds: bool, otherwise: str) -> None:
        """Count one thing looked at."""
        self._count += 1
        if not holds:
            self._wrong.append(otherwise)

    def check(self) -> Check:
        wrong = "; ".join(self._wrong[:SHOWN]) + ("; …" if len(self._wrong) > SHOWN else "")
        detail = f"{self._count:,} {self._what}" + (f", {len(self._wrong)} wrong: {wrong}" if self._wrong else "")
        return Check(self.name, not self._wrong, detail, 0.0)


async def audit(config: Config) -> Report:
    """Check a run that is not under way.

    Raises:
        LongreinError: there is no run in ``output.dir``, or another process works in it.
    """
    directory = RunDirectory(config.output.dir)
    if not directory.ledger.exists():
        raise LongreinError(f"output.dir {directory.root} holds no run: {directory.ledger} does not exist.")
    ledger = await Ledger.open(directory.ledger)
    try:
        return await _Audit(config, ledger, directory.checkpoints).report()
    finally:
        await ledger.close()


@dataclass(frozen=True, slots=True)
class _Members:
    """The valid rollouts of a group."""

    rollouts: tuple[Rollout, ...]


class _Audit:
    def __init__(self, config: Config, ledger: Ledger, saved: Path) -> None:
        self._config = config
        self._ledger = ledger
        self._saved = saved
        self._steps: list[CommittedStep] = []
        self._plan = Findings("plan", "groups are of the tasks that the plan names, in its order")
        self._groups = Findings("groups", "committed steps have groups of their own")
        self._states = Findings("rollouts", "rollouts have ended, each counted once")
        self._calls = Findings("calls", "calls are whole, and go on from exactly what they say")
        self._tokens = Findings("tokens", "committed steps trained every token of their trainable calls, once")
        self._ages = Findings("staleness", "ages of trained tokens are allowed")
        self._rewards = Findings("rewards", "rewards are what their evidence says")
        self._checkpoints = Findings("checkpoints", "checkpoints are of committed steps")

    async def report(self) -> Report:
        self._steps = await self._ledger.steps()
        for place, committed in enumerate(self._steps):
            self._groups.expect(committed.step == place, f"step {place} is missing")
        await self._look_at_groups()
        for committed in self._steps:
            await self._look_at_step(committed)
        for group in await self._ledger.all_groups(Split.EVAL):
            await self._look_at_rollouts(group)
        for found in checkpoints.whole(self._saved):
            step = found.cursor["step"]
            self._checkpoints.expect(step <= len(self._steps), f"{found.path.name} is of step {step}, not committed")
        findings = (
            *(self._plan, self._groups, self._states, self._calls),
            *(self._tokens, self._ages, self._rewards, self._checkpoints),
        )
        return Report([each.check() for each in findings])

    async def _look_at_groups(self) -> None:
        """Numbers without a gap, each of the task that the plan has for it."""
        tasks, _ = load_tasks(self._config)
        training, seed = self._config.training, self._config.training.seed
        groups = await self._ledger.all_groups(Split.TRAIN)
        for number, group in enumerate(groups):
            want = training_group(tasks, number, rollouts=training.rollouts, temperature=1.0, seed=seed).group
            told = f"{group.group_id} of {group.task_id}, not {want.group_id} of {want.task_id}"
            self._plan.expect((group.group_id, group.task_id) == (want.group_id, want.task_id), told)
            await self._look_at_rollouts(group)

    async def _look_at_rollouts(self, group: Group) -> None:
        rollouts = await self._ledger.rollouts(group.group_id)
        places = [rollout.index for rollout in rollouts if rollout.valid]
        for rollout in rollouts:
            twice = rollout.valid and places.count(rollout.index) > 1
            self._states.expect(
                rollout.state in ENDED and not twice,
                f"{rollout.rollout_id} is {'valid beside another' if twice else rollout.state.value}",
            )
            if rollout.valid:
                self._look_at_reward(rollout)
            for call in await self._ledger.calls(rollout.rollout_id):
                wrong = _fault_of(call)
                self._calls.expect(not wrong, f"{call.call_id} of {call.rollout_id}: {wrong}")

    def _look_at_reward(self, rollout: Rollout) -> None:
        receipt = rollout.receipt
        holds = (
            receipt is not None
            and receipt.reward == rollout.reward
            and hashlib.sha256(receipt.content.encode()).hexdigest() == receipt.sha256
        )
        self._rewards.expect(holds, f"{rollout.rollout_id} has {rollout.reward} without a receipt that says so")

    async def _look_at_step(self, committed: CommittedStep) -> None:
        """What the step says it has trained is what its groups hold."""
        step = committed.step
        groups = [await self._members(group) for group in await self._ledger.groups(Split.TRAIN, step)]
        self._groups.expect(bool(groups), f"step {step} has no group")
        rollouts = [rollout for group in kept(self._config, groups) for rollout in group.rollouts]
        held = 0
        async for call in self._calls_of(rollouts):
            if trainable(call):
                held += len(call.completion_ids)
                newest = int(call.versions.max())
                self._ages.expect(newest <= step, f"{call.call_id}: version {newest} was trained by step {step}")
        reports = [committed.metrics, *committed.metrics.get("policies", {}).values()]
        trained = sum(report["tokens_trained"] + report["tokens_stale"] for report in reports)
        self._tokens.expect(trained == held, f"step {step} trained {trained} tokens, its rollouts hold {held}")
        allowed = self._config.training.max_staleness if self._config.training.mode == "async" else 0
        for report in reports:
            for age in report["by_age"]:
                self._ages.expect(0 <= int(age) <= allowed, f"step {step} trained tokens {age} versions old")

    async def _members(self, group: Group) -> "_Members":
        return _Members(tuple(rollout for rollout in await self._ledger.rollouts(group.group_id) if rollout.valid))

    async def _calls_of(self, rollouts: list[Rollout]) -> AsyncIterator[Call]:
        for rollout in rollouts:
            for call in await self._ledger.calls(rollout.rollout_id):
                yield call


def _fault_of(call: Call) -> str:
    """What is wrong with a call; empty where nothing is."""
    sampled = len(call.completion_ids)
    if len(call.logprobs) != sampled or len(call.versions) != sampled:
        return "its arrays differ in length"
    if (np.diff(call.versions) < 0).any():
        return "its versions go backwards"
    if not np.isfinite(call.logprobs).all() or (call.logprobs > 1e-6).any():
        return "its log-probabilities are none"
    if bool(call.inherited) != (call.parent_id is not None) or call.inherited > len(call.prompt_ids):
        return "it does not say what it goes on from"
    return ""
