"""A short form of ``make chaos``: a run that is killed a few times loses and repeats nothing."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(("mode", "kills"), [("async", 14), ("sync", 8)])
def test_a_run_that_is_killed_again_and_again_loses_nothing(mode: str, kills: int) -> None:
    command = [sys.executable, "-m", "tests.chaos", "--kills", str(kills), "--mode", mode, "--seed", "7"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert ended.returncode == 0 and "nothing is wrong" in ended.stdout, ended.stdout + ended.stderr
