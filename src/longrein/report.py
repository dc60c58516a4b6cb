"""The result of a run: before and after on held-out tasks, with intervals, and the learning curve.

An interval is the 95 % percentile bootstrap over tasks (tasks, not samples, are what was drawn), 10,000 resamples with
a fixed seed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longrein.rundir import write_whole


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Held-out rewards at one moment and temperature: task id → one reward per sample."""

    step: int
    label: str
    rewards: Mapping[str, Sequence[float]]

    @property
    def mean(self) -> float:
        """Mean over tasks of the task's mean reward."""
        return float(self._task_means().mean())

    @property
    def samples(self) -> int:
        return sum(len(rewards) for rewards in self.rewards.values())

    def interval(self) -> tuple[float, float]:
        """95 % percentile bootstrap over tasks."""
        means = self._task_means()
        draws = np.random.default_rng(0).integers(0, len(means), size=(10_000, len(means)))
        low, high = np.percentile(means[draws].mean(axis=1), [2.5, 97.5])
        return float(low), float(high)

    def _task_means(self) -> NDArray[np.float64]:
        return np.array([sum(rewards) / len(rewards) for rewards in self.rewards.values() if rewards] or [float("nan")])


@dataclass(frozen=True, slots=True)
class Comparison:
    """One line of the table: the same tasks and temperature, before and after."""

    label: str
    before: Evaluation
    after: Evaluation


def table(comparisons: Sequence[Comparison]) -> str:
    """A markdown table."""
    lines = ["| held-out tasks | before | after | tasks | samples each time |", "|---|---|---|---|---|"]
    for row in comparisons:
        tasks = len(row.after.rewards)
        lines.append(
            f"| {row.label} | {_cell(row.before)} | {_cell(row.after)} | {tasks} "
            f"| {row.before.samples} / {row.after.samples} |"
        )
    return "\n".join(lines)


def _cell(evaluation: Evaluation) -> str:
    low, high = evaluation.interval()
    return f"{evaluation.mean:.2f} [{low:.2f}, {high:.2f}]"


def write_report(file: Path, comparisons: Sequence[Comparison], steps: Sequence[Mapping[str, Any]]) -> None:
    """``report.md``: the table, the training figures, and how to read them."""
    parts = ["# Result", "", table(comparisons) if comparisons else "No held-out tasks were configured.", ""]
    if comparisons:
        parts += ["Mean reward; in brackets the 95 % bootstrap interval over tasks.", ""]
    if steps:
        seconds = sum(step["seconds"] for step in steps)
        parts += [
            f"Training reward: {steps[0]['reward']:.2f} in the first step, {steps[-1]['reward']:.2f} in the last; "
            f"{len(steps)} steps, {seconds / 60:.1f} minutes of training (evaluations not counted).",
            "",
            *_troubles(steps),
            "![learning curve](curve.png)",
            "",
        ]
    write_whole(file, "\n".join(parts))


def _troubles(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a reader should know before believing the rest."""
    idle = [step for step in steps if not step["learned"]]
    excluded = sum(step["rollouts_excluded"] for step in steps)
    lines = []
    if idle:
        lines.append(f"In {len(idle)} of them nothing was learned; the last time: {idle[-1]['why_not']}.")
    if excluded:
        lines.append(f"{excluded} rollouts gave no reward and were left out; `rollouts/` has what they printed.")
    if tampered := sum(step.get("rollouts_tampered", 0) for step in steps):
        lines.append(
            f"**In {tampered} rollouts the harness did what may sway its verifier, and their rewards count**; the "
            "ledger's receipts say what (docs/security.md)."
        )
    return [line for text in lines for line in (text, "")]


def draw_curve(file: Path, steps: Sequence[Mapping[str, Any]], evaluations: Sequence[Evaluation]) -> None:
    """``curve.png``: training reward per step, held-out reward with its interval where it was measured."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(
        [step["step"] + 1 for step in steps],
        [step["reward"] for step in steps],
        color="#2f6f9f",
        marker="o",
        markersize=4,
        label="training tasks, mean of the step",
    )
    for label, color, beside in (("T=1", "#c2571a", 0.4), ("greedy", "#6b8f3a", 0.6)):
        points = [evaluation for evaluation in evaluations if evaluation.label == label]
        if not points:
            continue
        means = [point.mean for point in points]
        bounds = [point.interval() for point in points]
        errors = [
            [max(mean - low, 0.0) for mean, (low, _) in zip(means, bounds, strict=True)],
            [max(high - mean, 0.0) for mean, (_, high) in zip(means, bounds, strict=True)],
        ]
        axes.errorbar(
            [point.step + beside for point in points],
            means,
            yerr=errors,
            fmt="s",
            color=color,
            capsize=4,
            label=f"held-out tasks, {label}",
        )
    axes.set_xlabel("training step")
    axes.set_ylabel("mean reward")
    axes.set_ylim(-0.03, 1.03)
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", frameon=False)
    aside = file.with_name(file.name + ".partial")
    figure.savefig(aside, format="png", dpi=130)
    aside.replace(file)
