"""Asynchronous against synchronous training where rollouts' times have a long tail.

Each rollout works for a log-normal time between its two model calls, ten times the median at the 99th percentile, as
tools and test suites do. Both modes train the same tiny model on the same tasks in the same order, with the same number
of rollouts at once, in real processes over the real gateway; the harness says how long its calls took.

    python -m bench.longtail [--steps 30] [--concurrency 16] [--median 1.0] [--seeds 1]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from tests.workshop import HARNESS, make_workshop

SIGMA = float(np.log(10) / 2.3263)
"""Of the logarithm: the 99th percentile is ten times the median."""

# The workshop's harness, its second call after some work, its calls' times in a file of its own.
WORK = """
import random, time
_ask = ask
def ask(messages):
    began = time.time()
    said = _ask(messages)
    print(json.dumps([began, time.time()]), flush=True)
    if len(messages) == 2:
        time.sleep(float(os.environ["MEDIAN"]) * random.lognormvariate(0.0, float(os.environ["SIGMA"])))
    return said

messages ="""


@dataclass(frozen=True, slots=True)
class Result:
    """One run.

    Attributes:
        seconds: from the first step's beginning to the last one's end.
        metrics: of each step.
        calls: (began, ended) of each model call, as the harness saw it.
    """

    seconds: float
    metrics: list[dict[str, Any]]
    calls: list[tuple[float, float]]

    @property
    def rewards(self) -> list[float]:
        return [float(line["reward"]) for line in self.metrics]


def run(root: Path, mode: str, given: argparse.Namespace, seed: int) -> Result:
    """Train once, in a directory of its own."""
    root.mkdir()
    file = make_workshop(root, steps=given.steps, groups=4, rollouts=4)
    (root / "agent.py").write_text(HARNESS.replace("\nmessages =", WORK, 1))
    config = yaml.safe_load(file.read_text())
    config["runner"] = {"concurrency": given.concurrency}
    config["harness"]["env"] |= {"MEDIAN": str(given.median), "SIGMA": str(SIGMA)}
    config["harness"]["timeout_s"] = 600.0
    config["training"] |= {
        "mode": mode,
        "max_staleness": given.max_staleness,
        "seed": seed,
        "eval_samples": 0,
        "save_every": given.steps,
    }
    config["learner"]["learning_rate"] = given.learning_rate
    config["tasks"].pop("evaluate")
    file.write_text(yaml.safe_dump(config))
    began = time.monotonic()
    log = root / "log"
    with log.open("w") as output:
        ended = subprocess.run(
            [sys.executable, "-m", "longrein.cli", "train", "--config", str(file)],
            stdout=output,
            stderr=output,
            env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"},
        )
    if ended.returncode:
        raise SystemExit(f"{mode} failed after {time.monotonic() - began:.0f} s:\n{log.read_text()[-4000:]}")
    metrics = [json.loads(line) for line in (root / "run" / "metrics.jsonl").read_text().splitlines()]
    said = [file.read_text().splitlines() for file in (root / "run" / "rollouts").glob("*/harness.stdout")]
    calls = [tuple(json.loads(line)) for lines in said for line in lines if line.startswith("[")]
    return Result(sum(float(line["seconds"]) for line in metrics), metrics, calls)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--steps", type=int, default=30)
    arguments.add_argument("--concurrency", type=int, default=16)
    arguments.add_argument("--median", type=float, default=1.0, help="seconds of work between a rollout's calls")
    arguments.add_argument("--max-staleness", type=int, default=2)
    arguments.add_argument("--learning-rate", type=float, default=0.01)
    arguments.add_argument("--seeds", type=int, default=1)
    given = arguments.parse_args()
    print(
        f"{given.steps} steps of 16 rollouts, {given.concurrency} at once; work: median {given.median:g} s, "
        f"99th percentile {10 * given.median:g} s\n"
    )
    print(
        "| seed | mode | seconds | reward, first and last fifth | pause p50 / p99, s | call p50 / p99, s | calls cut "
        "| tokens by age | too old |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="lr-") as folder:
        for seed in range(given.seeds):
            found = {mode: run(Path(folder) / f"{mode}{seed}", mode, given, seed) for mode in ("sync", "async")}
            for mode, result in found.items():
                print(row(seed, mode, result), flush=True)
            print(f"\nasync is {found['sync'].seconds / found['async'].seconds:.2f} times faster\n", flush=True)
            for mode, result in found.items():
                print(f"{mode}: {' '.join(f'{reward:.2f}' for reward in result.rewards)}")


def row(seed: int, mode: str, result: Result) -> str:
    fifth = max(1, len(result.rewards) // 5)
    first, last = np.mean(result.rewards[:fifth]), np.mean(result.rewards[-fifth:])
    pauses = [line["seconds_drain"] + line["seconds_update"] + line["seconds_publish"] for line in result.metrics]
    took = [ended - began for began, ended in result.calls]
    ages: dict[str, int] = {}
    for line in result.metrics:
        for age, report in line["by_age"].items():
            ages[age] = ages.get(age, 0) + report["tokens"]
    shown = ", ".join(f"{age}: {ages[age]:,}" for age in sorted(ages, key=int))
    cut, stale = (sum(line[key] for line in result.metrics) for key in ("calls_cut", "tokens_stale"))
    times = f"{result.seconds:.0f} | {first:.2f}, {last:.2f} | {_quantiles(pauses)} | {_quantiles(took)}"
    return f"| {seed} | {mode} | {times} | {cut} | {shown} | {stale} |"


def _quantiles(values: list[float]) -> str:
    middle, high = np.quantile(values, [0.5, 0.99])
    return f"{middle:.2f} / {high:.2f}"


if __name__ == "__main__":
    main()
