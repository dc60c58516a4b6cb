"""Small tasks, harnesses that are shell or Python text, a scripted gateway, and a look at what is left behind."""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from longrein.agents.process import ProcessRunner
from longrein.agents.runner import Launch, Outcome, Preload, Trial
from longrein.config import RunnerSection
from longrein.records import RewardProfile, Task

PORT = 8080
JUDGE = """#!/bin/bash
if [ "$(cat /app/answer.txt)" = right ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


def make_task(
    directory: Path,
    *,
    test: str = JUDGE,
    files: Mapping[str, str] | None = None,
    dockerfile: str | None = None,
    verifier_timeout_s: float = 30.0,
) -> Task:
    """A task directory with one verifier script, and environment files by name."""
    for name in ("environment", "tests"):
        (directory / name).mkdir(parents=True, exist_ok=True)
    (directory / "tests" / "test.sh").write_text(test)
    for name, content in (files or {}).items():
        (directory / "environment" / name).write_text(content)
    if dockerfile is not None:
        (directory / "environment" / "Dockerfile").write_text(dockerfile)
    return Task("small", directory, "sha256:0", "do it", None, verifier_timeout_s, profile=RewardProfile())


async def nothing() -> None:
    """The default for ``verifying``."""


def make_trial(
    directory: Path,
    launch: Launch,
    task: Task | None = None,
    *,
    timeout_s: float = 30.0,
    verifying: Callable[[], Awaitable[None]] = nothing,
    name: str = "rollout",
) -> Trial:
    return Trial(
        rollout_id=name,
        task=task or make_task(directory / "task"),
        launch=launch,
        gateway_socket=directory / "gateway.sock",
        gateway_port=PORT,
        timeout_s=timeout_s,
        evidence=directory / "evidence" / name,
        verifying=verifying,
    )


def shell(script: str, **env: str) -> Launch:
    return Launch(("/bin/bash", "-c", script), env)


def python(script: str, *, preload: Preload | None = None, **env: str) -> Launch:
    """A harness for this interpreter, whose directories are shown in the sandbox."""
    return Launch((sys.executable, "-c", script), env, {}, preload, (Path(sys.prefix), Path(sys.base_prefix)))


@asynccontextmanager
async def running(**settings: object) -> AsyncIterator[ProcessRunner]:
    """An open runner; afterwards nothing of it may be left."""
    before = mounts()
    runner = ProcessRunner(RunnerSection.model_validate(settings))
    await runner.open()
    try:
        yield runner
    finally:
        await runner.close()
        await gone(descendants(os.getpid()))
        assert mounts() == before


async def run(trial: Trial, **settings: object) -> Outcome:
    """One trial on a runner of its own."""
    async with running(**settings) as runner:
        return await runner.run(trial)


def said(trial: Trial, stream: str = "stdout") -> str:
    """What the harness printed."""
    return (trial.evidence / f"harness.{stream}").read_text()


def mounts() -> str:
    return Path("/proc/self/mountinfo").read_text()


def descendants(pid: int) -> set[int]:
    """Every living process that comes from ``pid``."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if state != "Z":
                parents[int(entry.name)] = int(parent)
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


async def gone(pids: set[int], within_s: float = 30.0) -> None:
    """Wait until none of ``pids`` is alive."""
    deadline = time.monotonic() + within_s
    while alive := {pid for pid in pids if _alive(pid)}:
        commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in alive if _alive(pid)]
        assert time.monotonic() < deadline, f"still alive: {commands}"
        await asyncio.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
