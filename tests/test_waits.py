"""Every wait has a name and an end, and can be asked for."""

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from longrein import waits
from longrein.errors import DeadlineExceeded
from longrein.waits import Watch, report, waiting
from tests.workshop import make_workshop, read_metrics


async def test_a_wait_ends_at_its_deadline_and_says_what_it_was_for() -> None:
    with pytest.raises(DeadlineExceeded, match=r"^Waited 0\.01 s \(training\.x\) for the cows to come home\.$"):
        async with waiting("the cows to come home", 0.01, "training.x"):
            await asyncio.sleep(10)
    assert report() == []


async def test_a_timeout_inside_is_not_the_waits_own() -> None:
    with pytest.raises(TimeoutError):
        async with waiting("something", 5):
            raise TimeoutError
    with pytest.raises(TimeoutError):
        async with waiting("something", None), asyncio.timeout(0.01):
            await asyncio.sleep(10)


async def test_waits_are_listed_the_longest_first() -> None:
    async with waiting("the first", None), waiting("the second", 7):
        first, second = report()
        assert first == "0 s for the first" and second == "0 s of 7 for the second"


async def test_a_long_wait_is_told_of_again_when_it_has_doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "LONG_S", 0.2)
    said: list[str] = []
    async with Watch(said.append), waiting("the cows", None):
        await asyncio.sleep(5.5)
    # After 1 s, after 2 and after 4.
    assert 2 <= len(said) <= 3 and all(line.endswith("s for the cows") for line in said)


async def test_a_loop_that_is_stuck_shows_where(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(waits, "STUCK_S", 0.3)
    async with Watch(lambda line: None):
        await asyncio.sleep(0.05)
        time.sleep(1.0)
    said = capfd.readouterr().err
    assert said.count("the event loop has not turned for 0.3 s") == 1
    assert "test_a_loop_that_is_stuck_shows_where" in said


def test_sigusr1_tells_who_waits_for_what_and_the_run_goes_on(tmp_path: Path) -> None:
    config = make_workshop(tmp_path, steps=2)
    command = [sys.executable, "-m", "longrein.cli", "train", "--config", str(config)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as run:
        deadline = time.monotonic() + 120
        while not any((tmp_path / "run" / "rollouts").glob("g*")):
            assert run.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        run.send_signal(signal.SIGUSR1)
        assert run.stderr is not None
        said = run.stderr.read()
        assert run.wait(timeout=120) == 0, said
    assert " waits:" in said and "groups of step 1" in said and "for rollout g000000-0" in said
    assert "task longrein-" in said and "most recent call first" in said


def test_an_update_that_takes_too_long_ends_the_run_and_changes_nothing(tmp_path: Path) -> None:
    config = make_workshop(tmp_path, steps=1)
    command = [sys.executable, "-m", "longrein.cli", "train", "--config", str(config)]
    ended = subprocess.run([*command, "--set", "training.update_s=0.001"], capture_output=True, text=True, timeout=240)
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    assert "Waited 0.001 s (training.update_s) for the update of step 1." in ended.stderr
    assert read_metrics(tmp_path) == []
    again = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert again.returncode == 0 and len(read_metrics(tmp_path)) == 1, again.stderr
