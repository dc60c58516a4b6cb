"""Turns groups that should exist into rollouts that do: queues, runs, retries, gives up in time.

Invariant: every rollout this starts is ``done``, ``failed`` or ``cancelled`` in the ledger when ``group`` returns,
raises or is cancelled; nothing waits past the deadline.
"""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from longrein.agents.runner import Launch, Outcome, Runner, Trial
from longrein.ledger import Ledger
from longrein.records import FailureClass, Group, Rollout, RolloutState, Split, Task
from longrein.waits import waiting


class Use(Protocol):
    """What the model endpoint saw of a rollout."""

    @property
    def calls(self) -> int:
        """Model calls answered."""
        ...

    @property
    def engine_error(self) -> str | None:
        """The first failure on our side of the endpoint, if any."""
        ...

    @property
    def refusal(self) -> str | None:
        """The last request that was refused for what it asked, if any: status and message."""
        ...


class Endpoint(Protocol):
    """The model endpoint, as the controller sees it (the gateway is one)."""

    @property
    def socket(self) -> Path: ...

    def open_rollout(self, rollout_id: str, *, temperature: float | None, seed: int | None) -> str: ...

    async def close_rollout(self, rollout_id: str) -> Use: ...


class LaunchFactory(Protocol):
    """Fills in a harness's command line for one task."""

    def __call__(self, task: Task, *, base_url: str, key: str) -> Launch: ...


@dataclass(frozen=True, slots=True)
class Wanted:
    """A group to be collected: ``size`` valid rollouts of ``task``, sampled at ``temperature``."""

    group: Group
    task: Task
    size: int
    temperature: float


@dataclass(frozen=True, slots=True)
class Collected:
    """A group as it came out.

    Attributes:
        rollouts: the valid ones, by index.
        failures: of each that is missing, what its last try ended with.
    """

    group: Group
    task: Task
    rollouts: tuple[Rollout, ...]
    failures: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """How much at once, how often again, how long.

    Attributes:
        deadline_s: of a group, from when its first rollout starts.
        quorum: share of a training group's rollouts that makes it count, two at least.
        straggler_s: how long a training group waits for the rest from when it has so many; None is to its deadline.
    """

    concurrency: int
    retries: int
    timeout_s: float
    deadline_s: float
    quorum: float = 1.0
    straggler_s: float | None = None

    def enough(self, size: int) -> float:
        """Valid rollouts of a group of ``size`` that make it count."""
        return max(2, self.quorum * size)


class Controller:
    """Collects groups of rollouts over one runner and one model endpoint."""

    # The port inside a sandbox belongs to that sandbox alone, so one number serves all of them.
    GATEWAY_PORT = 8080

    def __init__(
        self,
        ledger: Ledger,
        runner: Runner,
        endpoint: Endpoint,
        launch: LaunchFactory,
        evidence: Path,
        limits: Limits,
        seed: int,
        base_url: str | None = None,
    ) -> None:
        """``base_url`` is what harnesses are told where the sandbox shares the host's network; None is the sandbox's
        own port."""
        self._ledger = ledger
        self._runner = runner
        self._endpoint = endpoint
        self._launch = launch
        self._evidence = evidence
        self._limits = limits
        self._seed = seed
        self._base_url = base_url or f"http://127.0.0.1:{self.GATEWAY_PORT}"
        self._slots = asyncio.Semaphore(limits.concurrency)

    async def collect(
        self, wanted: Sequence[Wanted], finished: Callable[[Rollout], None] = lambda rollout: None
    ) -> list[Collected]:
        """Several groups at once, as ``group`` does."""
        tasks = [asyncio.create_task(self.group(want, finished)) for want in wanted]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            await _end(tasks)

    async def group(self, want: Wanted, finished: Callable[[Rollout], None] = lambda rollout: None) -> Collected:
        """Run what the ledger does not hold yet of a group, and return all of it.

        ``finished`` is told of each rollout as it ends, those found in the ledger included.
        """
        await self._ledger.add_group(want.group)
        begun = asyncio.Event()
        missing = await self._missing(want, finished)
        tasks = [asyncio.create_task(self._rollout(want, rollout, finished, begun)) for rollout in missing]
        try:
            if tasks:
                await begun.wait()
                await self._closed(want, tasks)
        finally:
            await _end(tasks)
        for task in tasks:
            if not task.cancelled() and (error := task.exception()):
                raise error
        return await self.recorded(want)

    async def _closed(self, want: Wanted, tasks: "Sequence[asyncio.Task[Rollout]]") -> None:
        """Wait until all of a group's rollouts have ended, one has failed on our side, or it need wait no longer."""
        loop, limits, pending = asyncio.get_running_loop(), self._limits, set(tasks)
        until, at_quorum = loop.time() + limits.deadline_s, False
        while pending and (left := until - loop.time()) > 0:
            done, pending = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if any(task.exception() for task in done):
                return
            if limits.straggler_s is None or want.group.split is not Split.TRAIN or at_quorum:
                continue
            # Those that the ledger held before have no task.
            valid = want.size - len(tasks) + sum(task.done() and task.result().valid for task in tasks)
            if at_quorum := valid >= limits.enough(want.size):
                until = min(until, loop.time() + limits.straggler_s)

    async def _missing(self, want: Wanted, finished: Callable[[Rollout], None]) -> list[Rollout]:
        recorded = await self._ledger.rollouts(want.group.group_id)
        valid = {rollout.index: rollout for rollout in recorded if rollout.valid}
        for rollout in valid.values():
            finished(rollout)
        return [
            _queued(want, index, sum(r.index == index for r in recorded))
            for index in range(want.size)
            if index not in valid
        ]

    async def recorded(self, want: Wanted) -> Collected:
        """A group as the ledger has it; nothing is run."""
        recorded = await self._ledger.rollouts(want.group.group_id)
        valid = {rollout.index: rollout for rollout in recorded if rollout.valid}
        last = {r.index: r for r in recorded if r.index not in valid}
        failures = [f"{r.rollout_id}: {r.failure or r.state.value}" for r in last.values()]
        return Collected(want.group, want.task, tuple(valid[i] for i in sorted(valid)), tuple(failures))

    async def _rollout(
        self, want: Wanted, rollout: Rollout, finished: Callable[[Rollout], None], begun: asyncio.Event
    ) -> Rollout:
        """One rollout, with its retries. Slots are given in the order in which they were asked for."""
        async with self._slots:
            begun.set()
            for _ in range(self._limits.retries + 1):
                ended, retryable = await self._attempt(want, rollout)
                if ended.valid or not retryable:
                    break
                rollout = _queued(want, rollout.index, rollout.attempt + 1)
            finished(ended)
            return ended

    async def _attempt(self, want: Wanted, rollout: Rollout) -> tuple[Rollout, bool]:
        running = replace(rollout, state=RolloutState.RUNNING, started_at=time.time())
        last = running

        async def verifying() -> None:
            nonlocal last
            last = replace(running, state=RolloutState.VERIFYING)
            await self._ledger.move(last)

        key: str | None = None
        use: Use | None = None
        try:
            await self._ledger.add_rollout(rollout)
            await self._ledger.move(running)
            key = self._endpoint.open_rollout(
                rollout.rollout_id, temperature=want.temperature, seed=_seed(self._seed, rollout.rollout_id)
            )
            async with waiting(f"rollout {rollout.rollout_id} to end", None):
                outcome = await self._runner.run(self._trial(want.task, rollout.rollout_id, key, verifying))
            use = await self._endpoint.close_rollout(rollout.rollout_id)
            ended = _ended(last, outcome, use, self._time_limit(want.task))
            if ended.state is RolloutState.DONE and last.state is RolloutState.RUNNING:
                await verifying()
            await self._ledger.move(ended)
            silent = use.calls == 0 and use.refusal is None
            return ended, outcome.retryable or use.engine_error is not None or silent
        except BaseException as error:
            reason = "cancelled" if isinstance(error, asyncio.CancelledError) else f"stopped by {error!r}"
            await self._ledger.cancel(rollout.rollout_id, reason, time.time())
            raise
        finally:
            if key is not None and use is None:
                await self._endpoint.close_rollout(rollout.rollout_id)

    def _time_limit(self, task: Task) -> str:
        """How long a harness may run on a task, and who says so."""
        if task.agent_timeout_s:
            return f"{task.agent_timeout_s:g} s ({task.path / 'task.toml'}: [agent] timeout_sec)"
        return f"{self._limits.timeout_s:g} s (harness.timeout_s)"

    def _trial(self, task: Task, rollout_id: str, key: str, verifying: Callable[[], Awaitable[None]]) -> Trial:
        return Trial(
            rollout_id=rollout_id,
            task=task,
            launch=self._launch(task, base_url=self._base_url, key=key),
            gateway_socket=self._endpoint.socket,
            gateway_port=self.GATEWAY_PORT,
            timeout_s=task.agent_timeout_s or self._limits.timeout_s,
            evidence=self._evidence / rollout_id,
            verifying=verifying,
        )


async def _end(tasks: "Sequence[asyncio.Task[Any]]") -> None:
    """Cancel what still runs and see it through: a sandbox must be gone before its rollout is."""
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


def _queued(want: Wanted, index: int, attempt: int) -> Rollout:
    return Rollout(
        rollout_id=f"{want.group.group_id}-{index:02d}" + (f"-retry{attempt}" if attempt else ""),
        group_id=want.group.group_id,
        task_id=want.task.task_id,
        split=want.group.split,
        index=index,
        attempt=attempt,
        temperature=want.temperature,
    )


def _seed(seed: int, rollout_id: str) -> int:
    """Each rollout samples its own stream, the same one whenever it is run."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{rollout_id}".encode()).digest()[:6], "big")


def _ended(rollout: Rollout, outcome: Outcome, use: Use, time_limit: str) -> Rollout:
    """The rollout's last state. What failed on our side of the endpoint is never the agent's fault."""
    ended = replace(rollout, ending=outcome.ending, ended_at=time.time())
    infrastructure = use.engine_error
    if infrastructure is None and use.calls == 0 and outcome.ending:
        infrastructure = _no_call(outcome, use, time_limit)
    if infrastructure is not None:
        return replace(
            ended, state=RolloutState.FAILED, failure_class=FailureClass.INFRASTRUCTURE, failure=infrastructure
        )
    if outcome.receipt is None:
        return replace(ended, state=RolloutState.FAILED, failure_class=outcome.failure_class, failure=outcome.failure)
    if outcome.failure_class is None:
        return replace(ended, state=RolloutState.DONE, reward=outcome.receipt.reward, receipt=outcome.receipt)
    return replace(
        ended,
        state=RolloutState.FAILED,
        failure_class=outcome.failure_class,
        failure=outcome.failure,
        reward=outcome.receipt.reward,
        receipt=outcome.receipt,
    )


def _no_call(outcome: Outcome, use: Use, time_limit: str) -> str:
    """Why no call was answered, as far as it can be known from here."""
    if use.refusal is not None:
        return f"no model call: each was refused, the last with {use.refusal}"
    ending = f"{outcome.ending} after {time_limit}" if outcome.ending == "timed out" else outcome.ending
    return f"no model call: the harness {ending} without calling the model; it said last: {outcome.said}"
