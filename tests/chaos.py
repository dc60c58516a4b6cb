"""Kills a training run again and again, then proves from what is left that nothing was lost and nothing counted twice.

Each life of the run is a process of its own, forked from one that has imported everything. It is killed (SIGKILL) when
it passes a certain point of the code for the n-th time, or at a random moment; meanwhile processes under it are killed
too: harnesses, sandboxes and their keepers, verifiers. At the end the run is left alone for two more steps. Then:

- ``longrein audit`` finds nothing wrong;
- every call whose reply's last byte was about to be sent is in the ledger;
- the weights are those that the recorded batches give when they are learned from once, in order;
- no process that names the run's directory is left.

    python -m tests.chaos [--kills 200] [--seed 0] [--mode async]
"""

import argparse
import asyncio
import functools
import inspect
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from safetensors.torch import load_file

import longrein.train
from longrein.agents.controller import Collected, Controller
from longrein.agents.process import ProcessRunner
from longrein.audit import audit
from longrein.batches import assemble, kept
from longrein.calls.gateway import Gateway
from longrein.calls.sending import Delivery, _Connection
from longrein.config import Config
from longrein.config_file import load
from longrein.engines.embedded import EmbeddedEngine
from longrein.engines.weights import local_directory
from longrein.learning.joint import open_learner
from longrein.learning.learner import EmbeddedLearner
from longrein.ledger import Ledger
from longrein.publishing import checkpoints
from longrein.records import Split
from longrein.run import load_tasks
from longrein.rundir import RunDirectory
from tests.workshop import make_workshop

POINTS: dict[str, tuple[Any, str]] = {
    "a call is recorded": (Ledger, "record"),
    "a delivery is corrected": (Ledger, "deliver"),
    "a rollout moves": (Ledger, "move"),
    "a rollout is queued": (Ledger, "add_rollout"),
    "a group begins": (Ledger, "add_group"),
    "a step takes its groups": (Ledger, "take"),
    "a step is committed": (Ledger, "commit_step"),
    "a reply ends": (_Connection, "end"),
    "a reply is followed": (Delivery, "__call__"),
    "a trial runs": (ProcessRunner, "run"),
    "a group is collected": (Controller, "group"),
    "the gate closes": (Gateway, "pause"),
    "the gate opens": (Gateway, "resume"),
    "an update": (EmbeddedLearner, "update"),
    "weights are served": (EmbeddedEngine, "publish"),
    "a checkpoint is saved": (checkpoints, "save"),
    "a file of it is flushed": (checkpoints, "_flush"),
    "old checkpoints are removed": (checkpoints, "prune"),
    "metrics are written": (RunDirectory, "append_metrics"),
    "metrics are rewritten": (RunDirectory, "rewrite_metrics"),
    "unfinished rollouts are cancelled": (Ledger, "cancel_unfinished"),
}

LIFE_S = 7.0
"""Longest time a life is given to come to its point."""

END_S = 180.0
"""Longest time the last, undisturbed life may take."""

_answering: ContextVar[Any] = ContextVar("answering")


@dataclass
class Plan:
    """How one life ends: at a point, or after a time.

    Attributes:
        point: name and whether before or after it; None for a time.
        passes: how often the point is passed before.
        seconds: until it is killed wherever it is.
        others: seconds at which a process under it is killed.
    """

    point: tuple[str, str] | None
    passes: int
    seconds: float
    others: list[float]


@dataclass
class Report:
    """What was done."""

    kills: Counter[str] = field(default_factory=Counter)
    points: Counter[str] = field(default_factory=Counter)
    lives: int = 0
    ended: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        return self.kills.total()


def armed(point: tuple[str, str], passes: int) -> None:
    """Make this process kill itself when it has passed ``point`` so often."""
    name, when = point
    owner, attribute = POINTS[name]
    whole = getattr(owner, attribute)
    left = passes

    def strike(at: str) -> None:
        nonlocal left
        if at == when:
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    @functools.wraps(whole)
    async def later(*args: Any, **kwargs: Any) -> Any:
        strike("before")
        found = await whole(*args, **kwargs)
        strike("after")
        return found

    @functools.wraps(whole)
    def now(*args: Any, **kwargs: Any) -> Any:
        strike("before")
        found = whole(*args, **kwargs)
        strike("after")
        return found

    setattr(owner, attribute, later if inspect.iscoroutinefunction(whole) else now)


def witnessed(file: Path) -> None:
    """Note each call of which the last byte is about to be sent; what is written survives the writer's death."""
    handle = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    deliver, end = Delivery.__call__, _Connection.end

    async def delivering(self: Delivery, *args: Any) -> None:
        _answering.set(self._answer)
        await deliver(self, *args)

    async def ending(self: _Connection, body: bytes) -> None:
        answer = _answering.get(None)
        if answer is not None and answer.reply is not None:
            os.write(handle, f"{answer.call_id}\n".encode())
        await end(self, body)

    Delivery.__call__ = delivering  # type: ignore[method-assign]
    _Connection.end = ending  # type: ignore[method-assign]


def live(config: Config, plan: Plan | None, root: Path) -> int:
    """A life of the run, in a new process; its id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        with (root / "log").open("a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        witnessed(root / "witness")
        if plan is not None and plan.point is not None:
            armed(plan.point, plan.passes)
        asyncio.run(longrein.train.train(config))
        status = 0
    except BaseException as error:
        print(f"ENDED BY {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(status)


def descendants(of: int) -> list[int]:
    """Processes under a process."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            parents.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    found, left = [], [of]
    while left:
        below = parents.get(left.pop(), [])
        found += below
        left += below
    return found


def kill_one_under(process: int, chance: random.Random) -> str | None:
    """Kill a process under ``process``; what it was."""
    below = descendants(process)
    if not below:
        return None
    chosen = chance.choice(below)
    try:
        words = Path(f"/proc/{chosen}/cmdline").read_bytes().split(b"\0")
        os.kill(chosen, signal.SIGKILL)
    except OSError:
        return None
    return _kind([word.decode(errors="replace") for word in words])


def _kind(words: list[str]) -> str:
    line = " ".join(words)
    marks = {"agent.py": "harness", "test.sh": "verifier", "bwrap": "sandbox", "keeper": "keeper", "relay": "relay"}
    for mark, kind in marks.items():
        if mark in line:
            return kind
    return Path(words[0]).name or "other"


def ended(process: int, seconds: float) -> int | None:
    """The wait status of a child, None while it lives."""
    until = time.monotonic() + seconds
    while True:
        pid, status = os.waitpid(process, os.WNOHANG)
        if pid:
            return status
        if time.monotonic() > until:
            return None
        time.sleep(0.01)


def planned(chance: random.Random, number: int) -> Plan:
    """Points in turn, before and after; every third life ends at a random moment."""
    names = [(name, when) for name in POINTS for when in ("before", "after")]
    random.Random(number // len(names)).shuffle(names)
    others = sorted(chance.uniform(0.5, LIFE_S) for _ in range(chance.randrange(5)))
    if number % 3 == 2:
        return Plan(None, 0, chance.uniform(0.2, LIFE_S), others)
    return Plan(names[number % len(names)], chance.choice([0, 0, 1, 2, 5, 12]), LIFE_S, others)


def kill_again_and_again(config: Config, root: Path, kills: int, seed: int) -> Report:
    """Life after life, until there were so many kills."""
    chance = random.Random(seed)
    report = Report()
    while report.total < kills:
        plan = planned(chance, report.lives)
        report.lives += 1
        process, began = live(config, plan, root), time.monotonic()
        status = None
        for at in (*plan.others, plan.seconds):
            if at <= plan.seconds and status is None:
                status = ended(process, max(0.0, began + at - time.monotonic()))
                if status is None and at < plan.seconds and (kind := kill_one_under(process, chance)):
                    report.kills[kind] += 1
        if status is None:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            report.kills["run, at a random moment"] += 1
        elif os.WIFSIGNALED(status) and plan.point is not None:
            report.kills["run, at a point"] += 1
            report.points[" ".join(plan.point)] += 1
        else:
            report.ended.append(_last_words(root / "log"))
    return report


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("ENDED BY")]
    return lines[-1] if lines else "the run was finished"


async def check(config: Config, root: Path) -> list[str]:
    """Everything that is not as it should be."""
    wrong = [f"audit: {line}" for line in (await audit(config)).failures().splitlines()]
    ledger = await Ledger.open(config.output.dir / "ledger.db")
    try:
        recorded = {
            call.call_id
            for split in (Split.TRAIN, Split.EVAL)
            for group in await ledger.all_groups(split)
            for rollout in await ledger.rollouts(group.group_id)
            for call in await ledger.calls(rollout.rollout_id)
        }
        lost = set((root / "witness").read_text().split()) - recorded
        wrong += [f"the ledger lacks {call_id}, whose reply was sent" for call_id in sorted(lost)]
        wrong += await _other_weights(config, ledger)
    finally:
        await ledger.close()
    wrong += [f"process {process} is left" for process in _left(root)]
    return wrong


async def _other_weights(config: Config, ledger: Ledger) -> list[str]:
    """Learn from the recorded batches once, in order, and compare."""
    last = checkpoints.latest(config.output.dir / "checkpoints")
    assert last is not None
    tasks = {task.task_id: task for task in load_tasks(config)[0]}
    model = local_directory(config.model.path, config.model.revision)
    learner = open_learner(model, config.learner, config.algorithm, config.training.steps, ["policy"])
    start = {name: tensor.clone() for name, tensor in learner.weights("policy").items()}
    for step in range(last.cursor["step"]):
        groups = []
        for group in await ledger.groups(Split.TRAIN, step):
            rollouts = sorted(await ledger.rollouts(group.group_id), key=lambda rollout: rollout.index)
            valid = tuple(rollout for rollout in rollouts if rollout.valid)
            groups.append(Collected(group, tasks[group.task_id], valid, ()))
        learner.update(await assemble(config, ledger, kept(config, groups), step))
    (file,) = last.path.glob("**/model.safetensors")
    saved, learned = load_file(file), learner.weights("policy")
    learner.close()
    apart = max(float((learned[name] - saved[name]).abs().max()) for name in saved)
    moved = max(float((start[name] - saved[name]).abs().max()) for name in saved)
    print(f"weights learned again from the ledger differ by {apart:.2g}; training moved them by {moved:.2g}")
    return [] if apart <= 1e-3 * moved else [f"weights learned again differ by {apart:g} of {moved:g}"]


def _left(root: Path) -> Iterator[str]:
    """Processes that name a file of the run."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if f"{root}/" in line:
                yield f"{entry.name}: {line[:100]}"


def storm(root: Path, kills: int, seed: int, mode: str, *, steps: int = 2) -> tuple[Report, list[str]]:
    """The whole of it: what was done, and what is wrong afterwards."""
    file = make_workshop(root, groups=2, rollouts=3)
    base = [f"training.mode={mode}", "training.max_staleness=2", "training.save_every=2", "training.eval_samples=0"]
    base += ["training.nothing_learned=1000000", "tasks.evaluate=null", "output.tensorboard=false"]
    endless = load(file, [*base, "training.steps=1000000"])
    report = kill_again_and_again(endless, root, kills, seed)
    made = asyncio.run(_steps(endless))
    config = load(file, [*base, f"training.steps={made + steps}"])
    status = ended(live(config, None, root), END_S)
    if status is None:
        return report, [f"the last life did not end within {END_S:g} s"]
    if status:
        return report, [f"the last life ended with {status}: {_last_words(root / 'log')}"]
    return report, asyncio.run(check(config, root))


async def _steps(config: Config) -> int:
    ledger = await Ledger.open(config.output.dir / "ledger.db")
    try:
        return len(await ledger.steps())
    finally:
        await ledger.close()


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--kills", type=int, default=200)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--mode", choices=["sync", "async"], default="async")
    arguments.add_argument("--keep", type=Path, help="directory to work in and leave")
    given = arguments.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lr-chaos-") as folder:
        root = given.keep or Path(folder)
        report, wrong = storm(root, given.kills, given.seed, given.mode)
    spent = time.monotonic() - began
    print(f"{given.mode}, seed {given.seed}: {report.total} kills in {report.lives} lives, {spent:.0f} s\n")
    for counted in (report.kills, report.points, Counter(report.ended)):
        print("".join(f"{count:4d}  {name}\n" for name, count in counted.most_common()))
    for line in wrong:
        print(f"WRONG: {line}")
    print("nothing is wrong" if not wrong else f"{len(wrong)} things are wrong")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
