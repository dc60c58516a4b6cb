"""What a person watches: bars on a terminal, plain lines elsewhere, one line per step in both."""

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class Phase:
    """One bar. ``advance`` it; the note behind it says how things stand."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def advance(self, note: str = "", by: float = 1.0) -> None:
        self._progress.update(self._task, advance=by, note=note)

    def reach(self, done: int, total: int, note: str = "") -> None:
        self._progress.update(self._task, completed=done, total=total, note=note)


class Display:
    """Bars while something runs, and lines that stay."""

    def __init__(self, steps: int) -> None:
        # Standard error, so that standard output stays clean for what a command prints as its result.
        self._console = Console(stderr=True, highlight=False)
        self._progress = Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=self._console,
            disable=not sys.stderr.isatty(),
            transient=True,
        )
        self._steps = steps
        self._began = time.monotonic()
        self._spent: list[float] = []

    def __enter__(self) -> "Display":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """A line that stays, with the time since the start."""
        elapsed = int(time.monotonic() - self._began)
        self._console.print(f"[{elapsed // 60:3d}:{elapsed % 60:02d}] {text}", markup=False, soft_wrap=True)

    @contextmanager
    def phase(self, name: str, total: int) -> Iterator[Phase]:
        """A bar for as long as the block runs."""
        task = self._progress.add_task(name, total=total, note="")
        try:
            yield Phase(self._progress, task)
        finally:
            self._progress.remove_task(task)

    def step(self, metrics: Mapping[str, Any]) -> None:
        """The line of one training step."""
        self._spent.append(metrics["seconds"])
        recent = self._spent[-3:]
        left = (self._steps - metrics["step"] - 1) * sum(recent) / len(recent)
        self.say(
            f"step {metrics['step'] + 1}/{self._steps}  reward {metrics['reward']:.2f}  "
            f"groups {metrics['groups_with_contrast']}/{metrics['groups']} with contrast  "
            f"tokens {metrics['tokens_trained'] if metrics['learned'] else 0:,} trained, "
            f"{metrics['tokens_flat'] / max(metrics['tokens_forest'], 1):.1f}x shared  "
            f"{metrics['seconds']:.0f} s  left ~{left / 60:.1f} min"
            + _harness_failures(metrics)
            + "".join(f"\n       TROUBLE: {trouble}" for trouble in metrics["troubles"])
        )


def _harness_failures(metrics: Mapping[str, Any]) -> str:
    failed = metrics.get("harness_failures", 0)
    return f"  ({failed} of {metrics['rollouts']} harnesses did not exit with 0)" if failed else ""
