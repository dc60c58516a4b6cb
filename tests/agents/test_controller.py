"""Groups come out whole, retried where the fault is ours, and never late."""

import asyncio
import sqlite3
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from longrein.agents.controller import Controller, Limits, Wanted
from longrein.agents.runner import Launch, Outcome, Trial
from longrein.ledger import Ledger
from longrein.records import FailureClass, Group, Receipt, RolloutState, Split, Task

GOOD = Outcome("exited 0", Receipt("reward.txt", "1", "ab", 1.0, 1.0))
LOST = Outcome("", None, FailureClass.INFRASTRUCTURE, "sandbox: no space", retryable=True)
UNSCORED = Outcome("exited 0", None, FailureClass.INFRASTRUCTURE, "reward missing: ...", retryable=False)


@dataclass(frozen=True)
class Seen:
    calls: int = 2
    engine_error: str | None = None
    refusal: str | None = None


class ScriptedEndpoint:
    """Opens and closes rollouts; says what it is told to have seen."""

    socket = Path("/nowhere/gateway.sock")

    def __init__(self, seen: Seen = Seen()) -> None:
        self.seen = seen
        self.open: set[str] = set()
        self.seeds: dict[str, int | None] = {}

    def open_rollout(self, rollout_id: str, *, temperature: float | None, seed: int | None) -> str:
        self.open.add(rollout_id)
        self.seeds[rollout_id] = seed
        return f"key-of-{rollout_id}"

    async def close_rollout(self, rollout_id: str) -> Seen:
        self.open.discard(rollout_id)
        return self.seen


class ScriptedRunner:
    """Answers each trial by a function of its rollout's id."""

    def __init__(self, answer: Callable[[str], Awaitable[Outcome]]) -> None:
        self.answer = answer
        self.running = 0
        self.most = 0
        self.tried: list[str] = []

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def run(self, trial: Trial) -> Outcome:
        self.tried.append(trial.rollout_id)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            outcome = await self.answer(trial.rollout_id)
            if outcome.receipt:
                await trial.verifying()
            return outcome
        finally:
            self.running -= 1


def launch(task: Task, *, base_url: str, key: str) -> Launch:
    return Launch(("harness", base_url, key))


def want(size: int = 3, group: str = "g0") -> Wanted:
    task = Task("t0", Path("/nowhere"), "sha256:0", "do it")
    return Wanted(Group(group, 0, "t0", Split.TRAIN), task, size, 1.0)


def controller(
    ledger: Ledger, runner: ScriptedRunner, endpoint: ScriptedEndpoint, *, deadline_s: float = 10.0
) -> Controller:
    limits = Limits(concurrency=2, retries=2, timeout_s=5.0, deadline_s=deadline_s)
    return Controller(ledger, runner, endpoint, launch, Path("/nowhere"), limits, seed=0)


async def always(outcome: Outcome) -> Outcome:
    await asyncio.sleep(0.001)
    return outcome


async def test_all_rollouts_are_collected_within_the_concurrency(tmp_path: Path) -> None:
    ledger = await Ledger.open(tmp_path / "ledger.db")
    runner, endpoint = ScriptedRunner(lambda name: always(GOOD)), ScriptedEndpoint()
    groups = await controller(ledger, runner, endpoint).collect([want(5), want(2, "g1")])
    assert [len(group.rollouts) for group in groups] == [5, 2]
    assert all(rollout.state is RolloutState.DONE and rollout.reward == 1.0 for rollout in groups[0].rollouts)
    assert runner.most == 2 and not endpoint.open
    assert len(set(endpoint.seeds.values())) == 7
    await ledger.close()


async def test_what_the_ledger_holds_is_not_run_again(tmp_path: Path) -> None:
    ledger = await Ledger.open(tmp_path / "ledger.db")
    runner, endpoint = ScriptedRunner(lambda name: always(GOOD)), ScriptedEndpoint()
    told: list[str] = []
    await controller(ledger, runner, endpoint).collect([want(2)])
    (group,) = await controller(ledger, runner, endpoint).collect([want(3)], lambda r: told.append(r.rollout_id))
    assert len(group.rollouts) == 3 and len(runner.tried) == 3 and len(told) == 3
    await ledger.close()


async def test_our_faults_are_retried_and_then_excluded(tmp_path: Path) -> None:
    ledger = await Ledger.open(tmp_path / "ledger.db")
    bad = {"g0-00": LOST, "g0-00-retry1": GOOD, "g0-01": LOST, "g0-01-retry1": LOST, "g0-01-retry2": LOST}
    runner = ScriptedRunner(lambda name: always(bad.get(name, GOOD)))
    (group,) = await controller(ledger, runner, ScriptedEndpoint()).collect([want(3)])
    assert [rollout.rollout_id for rollout in group.rollouts] == ["g0-00-retry1", "g0-02"]
    # The one that a retry made good is no loss; the other is told by its last try.
    assert [failure.partition(":")[0] for failure in group.failures] == ["g0-01-retry2"]
    assert "no space" in group.failures[0]
    await ledger.close()


async def test_a_missing_reward_is_not_retried_and_not_scored(tmp_path: Path) -> None:
    ledger = await Ledger.open(tmp_path / "ledger.db")
    runner = ScriptedRunner(lambda name: always(UNSCORED if name == "g0-00" else GOOD))
    (group,) = await controller(ledger, runner, ScriptedEndpoint()).collect([want(2)])
    assert len(group.rollouts) == 1 and len(runner.tried) == 2
    await ledger.close()


@pytest.mark.parametrize("seen", [Seen(engine_error="the engine died"), Seen(calls=0)])
async def test_a_reward_earned_without_the_model_does_not_count(tmp_path: Path, seen: Seen) -> None:
    ledger = await Ledger.open(tmp_path / "ledger.db")
    runner = ScriptedRunner(lambda name: always(GOOD))
    (group,) = await controller(ledger, runner, ScriptedEndpoint(seen)).collect([want(1)])
    assert group.rollouts == ()
    assert len(runner.tried) == 3
    (first, *_) = await ledger.rollouts("g0")
    assert first.failure_class is FailureClass.INFRASTRUCTURE and first.reward is None
    await ledger.close()


async def test_why_no_call_was_answered(tmp_path: Path) -> None:
    ledger = await Ledger.open(tmp_path / "ledger.db")
    crashed = replace(GOOD, ending="exited 1", said="KeyError: 'OPENAI_BASE_URL'")
    runner = ScriptedRunner(lambda name: always(crashed))
    (group,) = await controller(ledger, runner, ScriptedEndpoint(Seen(calls=0))).collect([want(1)])
    assert group.failures[0].endswith("exited 1 without calling the model; it said last: KeyError: 'OPENAI_BASE_URL'")
    slow = ScriptedRunner(lambda name: always(replace(GOOD, ending="timed out", said="…")))
    (group,) = await controller(ledger, slow, ScriptedEndpoint(Seen(calls=0))).collect([want(1, "g1")])
    assert "timed out after 5 s (harness.timeout_s)" in group.failures[0]
    # A refusal is the same each time.
    refused = Seen(calls=0, refusal="400: tools: set model.tool_format")
    runner = ScriptedRunner(lambda name: always(crashed))
    (group,) = await controller(ledger, runner, ScriptedEndpoint(refused)).collect([want(1, "g2")])
    assert group.failures == (
        "g2-00: no model call: each was refused, the last with 400: tools: set model.tool_format",
    )
    await ledger.close()


async def test_the_deadline_ends_what_hangs_and_keeps_the_rest(tmp_path: Path) -> None:
    ledger = await Ledger.open(tmp_path / "ledger.db")

    async def answer(name: str) -> Outcome:
        await asyncio.sleep(3600 if name == "g0-01" else 0)
        return GOOD

    runner, endpoint = ScriptedRunner(answer), ScriptedEndpoint()
    began = time.monotonic()
    (group,) = await controller(ledger, runner, endpoint, deadline_s=0.5).collect([want(3)])
    assert time.monotonic() - began < 30
    assert [rollout.index for rollout in group.rollouts] == [0, 2]
    states = {rollout.index: rollout.state for rollout in await ledger.rollouts("g0")}
    assert states[1] is RolloutState.CANCELLED and not endpoint.open and runner.running == 0
    await ledger.close()


@pytest.mark.parametrize(("split", "hang", "kept"), [("train", 1, 3), ("train", 2, 2), ("eval", 1, 4)])
async def test_a_group_at_quorum_does_not_wait_for_stragglers(tmp_path: Path, split: str, hang: int, kept: int) -> None:
    ledger = await Ledger.open(tmp_path / "ledger.db")

    async def answer(name: str) -> Outcome:
        # The straggler of an evaluation is waited for, so it must come.
        await asyncio.sleep((1.0 if split == "eval" else 3600) if int(name[-2:]) < hang else 0)
        return GOOD

    limits = Limits(concurrency=4, retries=2, timeout_s=5.0, deadline_s=30.0, quorum=0.5, straggler_s=0.2)
    runner, endpoint = ScriptedRunner(answer), ScriptedEndpoint()
    control = Controller(ledger, runner, endpoint, launch, Path("/nowhere"), limits, seed=0)
    wanted = want(4)
    group = await control.group(replace(wanted, group=replace(wanted.group, split=Split(split))))
    assert len(group.rollouts) == kept and len(group.failures) == 4 - kept and not endpoint.open
    await ledger.close()


async def test_below_quorum_a_group_waits_to_its_deadline(tmp_path: Path) -> None:
    ledger = await Ledger.open(tmp_path / "ledger.db")

    async def answer(name: str) -> Outcome:
        await asyncio.sleep(0 if name == "g0-00" else 3600)
        return GOOD

    limits = Limits(concurrency=4, retries=2, timeout_s=5.0, deadline_s=1.0, quorum=0.5, straggler_s=0.0)
    runner = ScriptedRunner(answer)
    control = Controller(ledger, runner, ScriptedEndpoint(), launch, Path("/nowhere"), limits, seed=0)
    began = time.monotonic()
    group = await control.group(want(4))
    assert len(group.rollouts) == 1 and time.monotonic() - began >= 1.0
    await ledger.close()


@pytest.mark.parametrize(("during", "state"), [("first", RolloutState.CANCELLED), ("last", RolloutState.DONE)])
async def test_the_deadline_may_come_while_the_ledger_is_busy(tmp_path: Path, during: str, state: RolloutState) -> None:
    ledger = await Ledger.open(tmp_path / "ledger.db")
    runner = ScriptedRunner(lambda name: always(GOOD))
    await controller(ledger, runner, ScriptedEndpoint()).collect([want(1)])
    other = sqlite3.connect(tmp_path / "ledger.db")

    def busy(now: str) -> None:
        if now == during:
            other.execute("begin immediate")
            asyncio.get_running_loop().call_later(1.0, other.rollback)

    class Endpoint(ScriptedEndpoint):
        async def close_rollout(self, rollout_id: str) -> Seen:
            busy("last")
            return await super().close_rollout(rollout_id)

    # Told of the rollout that is there already, before the other one is begun.
    told = iter([lambda: busy("first")])
    working = controller(ledger, runner, Endpoint(), deadline_s=0.3)
    (group,) = await working.collect([want(2)], lambda rollout: next(told, lambda: None)())
    assert [rollout.state for rollout in await ledger.rollouts("g0")] == [RolloutState.DONE, state]
    assert len(group.rollouts) == (2 if state is RolloutState.DONE else 1)
    other.close()
    await ledger.close()


async def test_cancelling_leaves_no_rollout_unfinished(tmp_path: Path) -> None:
    ledger = await Ledger.open(tmp_path / "ledger.db")

    async def answer(name: str) -> Outcome:
        await asyncio.sleep(3600)
        return GOOD

    endpoint = ScriptedEndpoint()
    work = asyncio.create_task(controller(ledger, ScriptedRunner(answer), endpoint).collect([want(3)]))
    await asyncio.sleep(0.2)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    states = {rollout.state for rollout in await ledger.rollouts("g0")}
    assert states == {RolloutState.CANCELLED} and not endpoint.open
    await ledger.close()


async def test_a_fault_of_the_runner_itself_is_not_swallowed(tmp_path: Path) -> None:
    ledger = await Ledger.open(tmp_path / "ledger.db")

    async def answer(name: str) -> Outcome:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        await controller(ledger, ScriptedRunner(answer), ScriptedEndpoint()).collect([want(1)])
    (rollout,) = await ledger.rollouts("g0")
    assert rollout.state is RolloutState.CANCELLED and "a bug" in rollout.failure
    await ledger.close()
