"""A whole run whose learner is on two ranks, and its resumption in one process and on two again."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.workshop import make_workshop, read_metrics

RANKS = ["--set", "learner.kind=fsdp", "--set", "learner.ranks=2"]


def longrein(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "longrein.cli", *map(str, arguments)], capture_output=True, text=True, timeout=300
    )


def ranks_of(parent: int) -> list[int]:
    """Process ids of the ranks that a process has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            above = int(stat.read_text().rpartition(")")[2].split()[1])
            command = (stat.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if above == parent and b"longrein.learning.fsdp" in command:
            found.append(int(stat.parent.name))
    return found


def test_a_run_on_two_ranks_trains_and_is_gone_on_with(tmp_path: Path) -> None:
    config = make_workshop(tmp_path, steps=2)
    ended = longrein("train", "--config", config, *RANKS)
    assert ended.returncode == 0, ended.stderr
    assert "on 2 ranks over gloo" in ended.stderr
    metrics = read_metrics(tmp_path)
    assert [line["step"] for line in metrics] == [0, 1] and all(line["learned"] for line in metrics)
    # What is published is what is trained: the engine in the parent and the learner on its ranks agree.
    assert all(float(str(line["logprob_difference_max"])) < 1e-3 for line in metrics)
    start = load_file(tmp_path / "model" / "model.safetensors")
    final = load_file(next((tmp_path / "run" / "checkpoints").glob("step-000002/**/model.safetensors")))
    assert start.keys() >= final.keys() and any(not torch.equal(start[name].float(), final[name]) for name in final)
    # One process goes on, and then two again.
    for steps, ways in ((3, []), (4, RANKS)):
        again = longrein("train", "--config", config, *ways, "--set", f"training.steps={steps}")
        assert again.returncode == 0 and f"going on after step {steps - 1} of {steps}" in again.stderr, again.stderr
    assert [line["step"] for line in read_metrics(tmp_path) if line["learned"]] == [0, 1, 2, 3]


def test_a_killed_run_leaves_no_rank(tmp_path: Path) -> None:
    config = make_workshop(tmp_path, steps=2)
    command = [sys.executable, "-m", "longrein.cli", "train", "--config", str(config), *RANKS]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as run:
        deadline = time.monotonic() + 120
        while not read_metrics(tmp_path):
            assert run.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        ranks = ranks_of(run.pid)
        assert len(ranks) == 2
        os.kill(run.pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{rank}/cmdline").exists() and Path(f"/proc/{rank}/cmdline").read_bytes() for rank in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (["--set", "learner.ranks=2"], "needs learner.kind: fsdp"),
        ([*RANKS, "--set", "learner.forest=walk"], "learner.forest: packed"),
        ([*RANKS, "--set", "algorithm={capo: {form: neurons}}"], "does not compute algorithm.capo"),
    ],
)
def test_what_ranks_do_not_compute_is_told_before_anything_is_written(
    tmp_path: Path, change: list[str], says: str
) -> None:
    config = make_workshop(tmp_path)
    ended = longrein("doctor", "--config", config, *change)
    checks = json.loads(ended.stdout)["checks"]
    assert not checks["learner"]["ok"] and says in checks["learner"]["detail"]
