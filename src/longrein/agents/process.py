"""The ``process`` runner: harness and verifier run on this machine, one sandbox per trial.

A trial goes: make the sandbox, prepare the task's environment, start the harness, and when it ends or its time is up
kill every process; then bring the tests in, run them without network, kill again, read the reward, take everything
down. The verifier meets the harness's files, never its processes.

What an outcome means (``retryable`` in brackets):

- The harness exited, crashed or timed out: it is verified all the same, and its reward counts.
- The sandbox could not be made, or died; a RUN of the task's Dockerfile failed; this machine is out of disk, files or
  processes: infrastructure (retry).
- The verifier timed out, or left no usable reward: infrastructure (no retry; it would do the same again).
- The harness's program cannot be started, or the Dockerfile is not understood: infrastructure (no retry).
"""

import asyncio
import logging
import resource
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

from longrein.agents import plain, rewards
from longrein.agents.dockerfile import Command, Copy, Directory, Environment, read_environment
from longrein.agents.output import Captured
from longrein.agents.place import Place
from longrein.agents.preload import PreloadServers
from longrein.agents.relay import relayed
from longrein.agents.runner import Outcome, Trial
from longrein.agents.sandbox import Sandbox, Warden, check_sandbox
from longrein.config import RunnerSection
from longrein.errors import HarnessError, RewardError, SandboxError, SandboxUnavailable, TaskError
from longrein.records import FailureClass, Receipt

BUILD_S = 600.0
# Of every repository of the task's own: nothing is left that HEAD does not lead back to.
HEAD_ALONE = """
set -e
find / -xdev -type d -name .git -prune | while read -r git; do
    cd "$git"
    export GIT_DIR="$git"
    head=$(git symbolic-ref -q HEAD || true)
    for remote in $(git remote); do git remote remove "$remote"; done
    git for-each-ref --format='%(refname)' | while read -r ref; do
        test "$ref" = "$head" || git update-ref -d "$ref"
    done
    rm -rf ORIG_HEAD FETCH_HEAD MERGE_HEAD CHERRY_PICK_HEAD REVERT_HEAD AUTO_MERGE lost-found logs
    if git rev-parse -q --verify HEAD > /dev/null; then git repack -adq; fi
    git prune --expire=now
done
"""
TIMED_OUT = "timed out"

log = logging.getLogger(__name__)


class ProcessRunner:
    """A ``Runner`` on this machine."""

    def __init__(self, section: RunnerSection) -> None:
        self._section = section
        self._warden: Warden | None = None
        self._preloads: PreloadServers | None = None
        self._opening = asyncio.Lock()

    async def open(self) -> None:
        """Raises SandboxUnavailable where sandboxes are asked for and cannot be made."""
        if self._section.sandbox == "none":
            await asyncio.to_thread(plain.reap)
        else:
            # Each rollout that ends hands us its files open, and many may end at once.
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            await self._sandboxes()

    async def close(self) -> None:
        if self._preloads is not None:
            self._preloads.close()
        if self._warden is not None:
            await self._warden.close()

    async def run(self, trial: Trial) -> Outcome:
        """Run one trial. What goes wrong is in the outcome; only cancellation and ``trial.verifying`` raise."""
        attempt = _Attempt(self._section, trial)
        try:
            async with self._place(trial) as place:
                return await attempt.run(place)
        except SandboxUnavailable as error:
            return attempt.failed(f"sandbox unavailable: {error}")
        except SandboxError as error:
            return attempt.failed(f"sandbox failed: {error}", retryable=True)
        except TaskError as error:
            return attempt.failed(f"task unusable: {error}")
        except HarnessError as error:
            return attempt.failed(f"harness {error}")
        except OSError as error:
            return attempt.failed(f"machine refused: {error}", retryable=True)

    @asynccontextmanager
    async def _place(self, trial: Trial) -> AsyncIterator[Place]:
        place: Place
        if self._section.sandbox == "none":
            place = plain.PlainPlace(self._section, (trial.task.workdir, *trial.launch.files))
        else:
            warden, preloads = await self._sandboxes()
            place = await Sandbox.open(warden, self._section, trial.launch, preloads)
        try:
            yield place
        finally:
            await _whatever_happens(place.close())

    async def _sandboxes(self) -> tuple[Warden, PreloadServers]:
        async with self._opening:
            if self._warden is None or self._preloads is None or not self._warden.alive:
                if self._warden is not None:
                    log.warning("the sandbox warden died; starting another")
                    await self.close()
                self._warden = await Warden.start()
                self._preloads = PreloadServers(self._warden.fork, self._section.network == "host")
            return self._warden, self._preloads


async def _whatever_happens(ending: Coroutine[object, object, None]) -> None:
    """See ``ending`` through even if we are cancelled meanwhile."""
    task = asyncio.ensure_future(ending)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


class _Attempt:
    """One trial in one place."""

    def __init__(self, section: RunnerSection, trial: Trial) -> None:
        self._section = section
        self._trial = trial
        self._ending = ""
        self._said = ""
        self._seconds: dict[str, float] = {}
        self._tampered: list[str] = []
        self._began = time.monotonic()

    def failed(self, failure: str, *, retryable: bool = False) -> Outcome:
        if self._tampered:
            failure += f"; tampered with: {'; '.join(self._tampered)}"
        return Outcome(
            ending=self._ending,
            failure_class=FailureClass.INFRASTRUCTURE,
            failure=failure,
            retryable=retryable,
            seconds=self._seconds,
            said=self._said,
            tampered=tuple(self._tampered),
        )

    async def run(self, place: Place) -> Outcome:
        evidence = self._trial.evidence
        self._seconds["start"] = time.monotonic() - self._began
        await asyncio.to_thread(_fresh, evidence)
        with self._timed("start"):
            environment = await self._prepare(place)
        await self._harness(place, environment)
        await self._trial.verifying()
        return await self._verify(place, environment)

    async def _prepare(self, place: Place) -> Environment:
        """The task's environment, and the files the harness wants."""
        task, launch = self._trial.task, self._trial.launch
        environment = await asyncio.to_thread(read_environment, task.path / "environment", task.workdir)
        if environment.notes:
            (self._trial.evidence / "notes.txt").write_text("\n".join(environment.notes) + "\n")
        await place.make(task.workdir)
        building = False
        for step in environment.steps:
            # What is copied over the host's directories shows from the next phase on.
            if building and isinstance(step, Copy):
                await place.stop()
                building = False
            if isinstance(step, Directory):
                await place.make(step.path)
            elif isinstance(step, Copy):
                await place.put(step.path, step.source, step.mode)
            else:
                if not building:
                    await place.start("build", None)
                building = True
                await self._build(place, step)
        if self._section.git_history == "head":
            if not building:
                await place.start("build", None)
            building = True
            await self._build(place, Command("runner.git_history: head", ("/bin/sh", "-c", HEAD_ALONE), "/", {}))
        if building:
            await place.stop()
        for path, content in launch.files.items():
            await place.put(path, content)
        if self._section.verifier_sees == "workdir" and task.workdir == "/":
            raise TaskError(
                f"{task.path}: runner.verifier_sees is workdir, but the task works in /. Give it a WORKDIR."
            )
        await place.watch(task.workdir)
        return environment

    async def _build(self, place: Place, step: Command) -> None:
        captured = Captured(self._section.output_kb * 1024)
        env = {**place.env("build"), **step.env}
        try:
            async with asyncio.timeout(BUILD_S):
                ending = await place.run(step.argv, env, step.cwd, captured.stdout.write_end, captured.stderr.write_end)
            last = await captured.save(self._trial.evidence, "build")
        except TimeoutError:
            raise SandboxError(f"{step.line}: not done after {BUILD_S:.0f} s") from None
        finally:
            captured.close()
        if ending != "exited 0":
            raise SandboxError(f"{step.line}: {ending}: {last}")

    async def _harness(self, place: Place, environment: Environment) -> None:
        trial, launch = self._trial, self._trial.launch
        argv = [place.map(word) for word in launch.argv]
        own = {name: place.map(value) for name, value in {**trial.task.env, **launch.env}.items()}
        env = {**place.env("agent"), **environment.env, **own}
        captured = Captured(self._section.output_kb * 1024)
        try:
            with self._timed("start"):
                listener = await place.start("agent", trial.gateway_port)
            async with relayed(listener, trial.gateway_socket):
                with self._timed("harness"):
                    stdout, stderr = captured.stdout.write_end, captured.stderr.write_end
                    running = place.run(argv, env, trial.task.workdir, stdout, stderr, launch.preload)
                    self._ending = await _in_time(running, trial.timeout_s)
                with self._timed("stop"):
                    await place.stop()
            self._said = await captured.save(trial.evidence, "harness")
            for name in ("agent", "artifacts"):
                await place.fetch(name, trial.evidence / name)
        finally:
            captured.close()

    async def _verify(self, place: Place, environment: Environment) -> Outcome:
        task, evidence = self._trial.task, self._trial.evidence
        captured = Captured(self._section.output_kb * 1024)
        try:
            with self._timed("verifier"):
                await place.start("verifier", None)
                env = {**place.env("verifier"), **environment.env, **task.env}
                self._tampered += await place.tampered(env)
                argv = await self._bring_tests(place)
                stdout, stderr = captured.stdout.write_end, captured.stderr.write_end
                ending = await _in_time(place.run(argv, env, task.workdir, stdout, stderr), task.verifier_timeout_s)
            with self._timed("stop"):
                if ending != TIMED_OUT:
                    self._tampered += await place.survivors()
                await place.stop()
                last = await captured.save(evidence, "verifier")
                await place.fetch("verifier", evidence / "verifier")
        except HarnessError as error:
            return self.failed(f"verifier {error}")
        finally:
            captured.close()
        if ending == TIMED_OUT:
            return self.failed(f"verifier timed out: after {task.verifier_timeout_s:g} s: {last}")
        try:
            receipt = await asyncio.to_thread(rewards.read_reward, evidence / "verifier", task.profile)
        except RewardError as error:
            return self.failed(f"no reward: {error} (the verifier {ending}: {last})")
        return self._judged(receipt)

    def _judged(self, receipt: Receipt) -> Outcome:
        """The outcome of a verifier that gave a good reward."""
        tampered = tuple(self._tampered)
        profile = self._trial.task.profile
        if self._trial.task.metadata.get("canary") and receipt.raw > profile.raw_range[0]:
            return self.failed(
                f"REWARDS ARE BEING HACKED: a canary, which cannot be solved, was rewarded {receipt.raw:g}"
            )
        if tampered and self._section.tampered == "exclude":
            return self.failed(f"excluded (runner.tampered), with a reward of {receipt.reward:g}")
        receipt = replace(receipt, tampered=tampered)
        return Outcome(ending=self._ending, receipt=receipt, seconds=self._seconds, said=self._said, tampered=tampered)

    async def _bring_tests(self, place: Place) -> list[str]:
        """Copy the task's tests to /tests; the command line that runs them."""
        tests = self._trial.task.path / "tests"
        for file in sorted(tests.rglob("*")):
            if file.is_file() and not file.is_symlink():
                mode = file.stat().st_mode & 0o777
                executable = 0o755 if file == tests / "test.sh" else 0
                await place.put(f"/tests/{file.relative_to(tests).as_posix()}", file, mode | executable)
        if not (tests / "test.sh").is_file():
            raise TaskError(f"{tests / 'test.sh'}: is missing; it must judge what the harness left and write a reward.")
        script = place.map("/tests/test.sh")
        with (tests / "test.sh").open("rb") as content:
            return [script] if content.read(2) == b"#!" else ["/bin/sh", script]

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.monotonic() - began


async def _in_time(running: Awaitable[str], timeout_s: float) -> str:
    """How a program ended, or that it had not."""
    try:
        async with asyncio.timeout(timeout_s):
            return await running
    except TimeoutError:
        return TIMED_OUT


def _fresh(evidence: Path) -> None:
    """A directory without what an earlier, interrupted run of the same rollout left: its reward is not ours."""
    evidence.mkdir(parents=True, exist_ok=True)
    for name in ("agent", "artifacts", "verifier"):
        shutil.rmtree(evidence / name, ignore_errors=True)
    (evidence / "verifier").mkdir()


def check(section: RunnerSection) -> str:
    """Make a small sandbox for real; a line about it. Raises SandboxUnavailable with what to do."""
    if section.sandbox == "none":
        return "none: harnesses run in plain directories, without isolation"
    # A thread of its own has no event loop yet, whoever calls.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, check_sandbox(section)).result()
