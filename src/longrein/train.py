"""The training loop, read top to bottom.

A step: take groups of rollouts that are complete, close the gate, update on their calls, serve the new weights, open
the gate. The harness notices nothing, and in ``async`` mode further rollouts go on all the while. The ledger holds what
was collected and the checkpoint what was learned; a run that stops at any point goes on from the last checkpoint and
re-uses every rollout recorded since.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from longrein.agents.controller import Collected
from longrein.batches import assemble, at_quorum, kept, reward_of
from longrein.collecting import Collecting
from longrein.config import Config
from longrein.errors import ConfigError, DeadlineExceeded, LedgerError, NoResult, NothingLearned
from longrein.identity import flat
from longrein.learning.batch import TrainBatch
from longrein.learning.figures import UpdateReport
from longrein.ledger import CommittedStep
from longrein.plan import evaluation_groups
from longrein.progress import Display
from longrein.publishing import checkpoints
from longrein.publishing.publish import publish
from longrein.records import Rollout
from longrein.report import Comparison, Evaluation, draw_curve, table, write_report
from longrein.run import Run, opened
from longrein.trouble import troubles
from longrein.waits import waiting


async def train(config: Config) -> str:
    """Train to ``training.steps``, or go on where a run in ``output.dir`` stopped; return the result as markdown.

    Raises:
        LongreinError: in one paragraph, what cannot go on and why.
    """
    with Display(config.training.steps) as display:
        async with opened(config, display) as run:
            step = await resume(run)
            await evaluate(run, 0, step)
            bad = 0
            async with Collecting(run) as collecting:
                while step < config.training.steps:
                    metrics = await train_step(run, collecting, step)
                    step += 1
                    bad = bad + 1 if metrics["troubles"] else 0
                    if bad >= config.training.nothing_learned:
                        raise NothingLearned(_given_up(bad, metrics))
                    if config.training.eval_every and step % config.training.eval_every == 0:
                        await evaluate(run, step, step)
            await evaluate(run, step, step)
            return await conclude(run, step)


async def evaluate_only(config: Config) -> str:
    """Score the held-out tasks with the weights of the run's last checkpoint, or the starting ones."""
    if config.tasks.evaluate is None:
        raise ConfigError("key 'tasks.evaluate' names no held-out tasks. Add a directory or a catalog of them.")
    with Display(config.training.steps) as display:
        async with opened(config, display) as run:
            step = await resume(run)
            await evaluate(run, step, step)
            lines = ["| held-out tasks | reward | 95 % interval | samples |", "|---|---|---|---|"]
            for label, temperature, samples in _evaluations(config):
                found = await read_evaluation(run, step, label, samples, temperature)
                low, high = found.interval()
                lines.append(f"| {label} | {found.mean:.2f} | [{low:.2f}, {high:.2f}] | {found.samples} |")
            return "\n".join(lines)


async def resume(run: Run) -> int:
    """Restore weights, optimizer and cursor; return the step to go on with."""
    left = await run.ledger.cancel_unfinished("the process that ran it stopped", time.time())
    found = checkpoints.latest(run.directory.checkpoints)
    recorded = await run.ledger.steps()
    step = int(found.cursor["step"]) if found is not None else 0
    if found is not None and [committed.step for committed in recorded[:step]] != list(range(step)):
        raise LedgerError(
            f"{run.directory.ledger}: knows of {len(recorded)} steps, but {found.path.name} was saved after {step}. It "
            "was cut off, or is not the ledger of these checkpoints. Put it back, or use a new output.dir."
        )
    # What comes after the checkpoint is done again.
    run.directory.rewrite_metrics(recorded[:step])
    if found is None:
        if recorded or left:
            run.display.say("going on from the start: no checkpoint was saved; recorded rollouts are used again")
        return 0
    await run.compute(run.learner.load, found.path)
    await publish(run.learner, run.engine, step, run.compute)
    run.display.say(f"going on after step {step} of {run.config.training.steps} ({found.path.name})")
    return step


async def train_step(run: Run, collecting: Collecting, step: int) -> dict[str, Any]:
    """One step; returns its metrics."""
    training, began = run.config.training, time.monotonic()
    groups = await collect(run, collecting, step)
    collected = time.monotonic()
    batch = await assemble(run.config, run.ledger, kept(run.config, groups), step)
    assembled = time.monotonic()
    cut = await run.gateway.pause(run.config.gateway.drain_s)
    drained = time.monotonic()
    try:
        report = await update(run, batch)
        updated = time.monotonic()
        async with waiting(f"weights {step + 1} to be served", training.publish_s, "training.publish_s"):
            await publish(run.learner, run.engine, step + 1, run.compute)
    finally:
        run.gateway.resume()
    published = time.monotonic()
    tell_stale(run, batch, report)
    seconds = {
        "seconds": published - began,
        "seconds_collect": collected - began,
        "seconds_drain": drained - assembled,
        "seconds_update": updated - drained,
        "seconds_publish": published - updated,
        "seconds_save": 0.0,
    }
    calls = [call for rollout in batch.rollouts for call in rollout.calls]
    metrics = {
        "step": step,
        "version": step + 1,
        **_rollout_metrics(groups, batch),
        "groups_under_way": collecting.under_way,
        "calls_cut": cut,
        **asdict(report),
        "troubles": troubles(report, calls, training.mismatch),
        **seconds,
    }
    # Before the checkpoint: wherever we are stopped, the ledger knows every step that a checkpoint holds.
    await run.ledger.commit_step(CommittedStep(step, step + 1, metrics, time.time()))
    last = step + 1 == run.config.training.steps
    if last or (step + 1) % run.config.training.save_every == 0:
        await save(run, step + 1)
        ended = time.monotonic()
        metrics |= {"seconds": ended - began, "seconds_save": ended - published}
        await run.ledger.commit_step(CommittedStep(step, step + 1, metrics, time.time()))
    write_metrics(run, metrics)
    run.display.step(metrics)
    return metrics


async def collect(run: Run, collecting: Collecting, step: int) -> list[Collected]:
    """The step's groups.

    Raises:
        NoResult: no rollout has a reward.
    """
    groups = await collecting.take(step)
    tell_tampered(run, groups)
    tell_failures(run, f"step {step + 1}", groups)
    for group in groups:
        if not at_quorum(run.config, group):
            run.display.say(f"group {group.group.group_id} ({group.task.task_id}) is below quorum and left out")
    return groups


def tell_failures(run: Run, what: str, groups: Sequence[Collected]) -> None:
    """Say which rollouts are excluded, and why, alike ones together.

    Raises:
        NoResult: all are.
    """
    alike: dict[str, list[str]] = {}
    for group in groups:
        for failure in group.failures:
            rollout_id, _, reason = failure.partition(": ")
            alike.setdefault(reason.replace(rollout_id, "*"), []).append(rollout_id)
    for reason, ids in alike.items():
        run.display.say(f"excluded {len(ids)} ({', '.join(ids[:3])}{', …' if len(ids) > 3 else ''}): {reason}")
    if alike and not any(group.rollouts for group in groups):
        reason, ids = max(alike.items(), key=lambda item: len(item[1]))
        raise NoResult(
            f"{what}: none of its {sum(map(len, alike.values()))} rollouts gave a reward, so there is nothing to go on "
            f"with. {len(ids)} ended with: {reason}. What harness and verifier printed is in {run.directory.rollouts}; "
            "the same command tries again, and `longrein harness probe` tries one alone."
        )


def tell_tampered(run: Run, groups: Sequence[Collected]) -> None:
    """Say whose reward counts although the harness may have swayed its verifier."""
    for rollout in _tampered(groups):
        lines = rollout.receipt.tampered if rollout.receipt is not None else ()
        run.display.say(f"TAMPERED: {rollout.rollout_id}, reward {rollout.reward:g}: {'; '.join(lines)}")


def _tampered(groups: Sequence[Collected]) -> list[Rollout]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return [rollout for rollout in rollouts if rollout.receipt is not None and rollout.receipt.tampered]


def tell_stale(run: Run, batch: TrainBatch, report: UpdateReport) -> None:
    """Say which rollouts have tokens that were too old to be trained."""
    if report.tokens_stale and batch.max_staleness is not None:
        oldest = batch.version - batch.max_staleness
        names = [
            rollout.rollout_id
            for rollout in batch.rollouts
            if any(call.train and call.delivered and (call.versions < oldest).any() for call in rollout.calls)
        ]
        run.display.say(
            f"step {batch.version + 1}: {report.tokens_stale} tokens of {len(names)} rollouts ({', '.join(names[:3])}"
            f"{', …' if len(names) > 3 else ''}) are older than {batch.max_staleness} versions and left out"
        )


async def update(run: Run, batch: TrainBatch) -> UpdateReport:
    """One update on the compute thread. Cancelled, it ends between micro-batches and changes no weight."""
    training = run.config.training
    with run.display.phase("update", 1) as phase:
        loop = asyncio.get_running_loop()

        def progress(done: int, total: int) -> None:
            loop.call_soon_threadsafe(phase.reach, done, total, "micro-batches")

        work = asyncio.ensure_future(run.compute(run.learner.update, batch, progress, run.stopping.is_set))
        try:
            async with waiting(f"the update of step {batch.version + 1}", training.update_s, "training.update_s"):
                return await asyncio.shield(work)
        except (asyncio.CancelledError, DeadlineExceeded):
            run.stopping.set()
            done, _ = await asyncio.wait([work], timeout=training.publish_s)
            for each in done:
                each.exception()
            raise


async def save(run: Run, step: int) -> None:
    """A checkpoint of everything the next step needs."""
    with run.display.phase("save", 1):
        async with waiting(f"checkpoint {step} to be written", run.config.training.publish_s, "training.publish_s"):
            await run.compute(
                checkpoints.save, run.directory.checkpoints, step, run.learner.save, {"step": step, "version": step}
            )
        checkpoints.prune(run.directory.checkpoints, run.config.training.keep_checkpoints)


async def evaluate(run: Run, at: int, step: int) -> None:
    """Held-out rewards of the weights after ``at`` steps, sampled and greedy. What is recorded is not run again; once
    training has moved on (``step`` beyond ``at``), nothing more can be added."""
    if not run.held_out or at != step:
        return
    for label, temperature, samples in _evaluations(run.config):
        wanted = evaluation_groups(run.held_out, at, samples=samples, temperature=temperature, label=label)
        rewards: list[float] = []
        with run.display.phase(f"eval {label}", len(wanted) * samples) as phase:

            def finished(rollout: Rollout, phase: Any = phase, rewards: list[float] = rewards) -> None:
                if rollout.reward is not None:
                    rewards.append(rollout.reward)
                phase.advance(f"rollouts, reward {sum(rewards) / max(len(rewards), 1):.2f}")

            groups = await run.controller.collect(wanted, finished)
        tell_tampered(run, groups)
        tell_failures(run, f"evaluation {label} after {at} steps", groups)
        found = await read_evaluation(run, at, label, samples, temperature)
        low, high = found.interval()
        run.display.say(f"held-out after {at} steps, {label}: {found.mean:.2f} [{low:.2f}, {high:.2f}]")


async def read_evaluation(run: Run, at: int, label: str, samples: int, temperature: float) -> Evaluation:
    """The recorded rewards of one evaluation."""
    rewards: dict[str, list[float]] = {}
    for want in evaluation_groups(run.held_out, at, samples=samples, temperature=temperature, label=label):
        rollouts = await run.ledger.rollouts(want.group.group_id)
        valid = [reward_of(rollout) for rollout in rollouts if rollout.valid]
        if valid:
            rewards[want.task.task_id] = valid
    return Evaluation(at, label, rewards)


async def conclude(run: Run, step: int) -> str:
    """Write the report and the curve of the run after ``step`` steps; return the table."""
    steps = [committed.metrics for committed in await run.ledger.steps() if committed.step < step]
    every = run.config.training.eval_every
    moments = sorted({0, step, *(range(every, step, every) if every else ())})
    evaluations: list[Evaluation] = []
    comparisons = []
    for label, temperature, samples in _evaluations(run.config) if run.held_out else []:
        found = [await read_evaluation(run, at, label, samples, temperature) for at in moments]
        evaluations += found
        comparisons.append(Comparison(label, found[0], found[-1]))
    write_report(run.directory.report, comparisons, steps)
    draw_curve(run.directory.curve, steps, evaluations)
    run.display.say(f"written: {run.directory.report}, {run.directory.curve}")
    return table(comparisons) if comparisons else run.directory.report.read_text()


def write_metrics(run: Run, metrics: dict[str, Any]) -> None:
    """The step's line in ``metrics.jsonl`` and its points in TensorBoard."""
    run.directory.append_metrics(metrics)
    if run.board is not None:
        for key, value in flat(metrics).items():
            if isinstance(value, int | float):
                run.board.add_scalar(key.replace(".", "/"), float(value), metrics["step"])
        run.board.flush()


def _evaluations(config: Config) -> list[tuple[str, float, int]]:
    """(label, temperature, samples per task) of each held-out evaluation."""
    temperature = config.sampling.temperature
    sampled = (
        [(f"T={temperature:g}", temperature, config.training.eval_samples)] if config.training.eval_samples else []
    )
    return [*sampled, ("greedy", 0.0, 1)]


def _rollout_metrics(groups: Sequence[Collected], batch: TrainBatch) -> dict[str, Any]:
    rewards = [reward_of(rollout) for group in groups for rollout in group.rollouts]
    calls = [call for group in batch.groups for rollout in group.rollouts for call in rollout.calls]
    causes = Counter(call.cause.value for call in calls)
    endings = [rollout.ending for group in groups for rollout in group.rollouts]
    return {
        "reward": sum(rewards) / len(rewards) if rewards else 0.0,
        "groups_collected": len(groups),
        "rollouts": len(rewards),
        "rollouts_cut_off": sum(rollout.cut_off for rollout in batch.rollouts),
        "rollouts_excluded": sum(len(group.failures) for group in groups),
        "rollouts_tampered": len(_tampered(groups)),
        "harness_failures": sum(ending != "exited 0" for ending in endings),
        "calls": len(calls),
        **{f"calls_{cause.replace(' ', '_')}": count for cause, count in sorted(causes.items())},
    }


def _given_up(steps: int, metrics: dict[str, Any]) -> str:
    return (
        f"{steps} steps in a row (training.nothing_learned) went wrong. The last: {'; '.join(metrics['troubles'])}. "
        "Look at rollouts/ for what the harness did; where nothing is learned, usual causes are tasks that are always "
        "or never solved (no contrast within a group), replies the harness cannot parse, or a reward that does not "
        "depend on them."
    )
