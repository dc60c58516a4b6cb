"""Task order is a function of seed and number; the report says what was measured."""

from pathlib import Path
from typing import Any

import pytest

from longrein.plan import training_group
from longrein.records import Task
from longrein.report import Comparison, Evaluation, draw_curve, table, write_report

STEP: dict[str, Any] = {"learned": True, "why_not": "", "rollouts_excluded": 0}


def tasks(count: int) -> list[Task]:
    return [Task(f"t{i}", Path("/nowhere"), f"sha256:{i}", "do it") for i in range(count)]


def names(count: int, seed: int = 0) -> list[str]:
    wanted = [training_group(tasks(6), number, rollouts=2, temperature=1.0, seed=seed) for number in range(count)]
    assert len({want.group.group_id for want in wanted}) == count
    return [want.task.task_id for want in wanted]


def test_every_epoch_holds_each_task_once() -> None:
    order = names(12)
    assert sorted(order[:6]) == sorted(order[6:]) == [f"t{i}" for i in range(6)]
    assert order[:6] != order[6:]


def test_the_order_is_the_seeds() -> None:
    assert names(12, seed=1) == names(12, seed=1) != names(12, seed=2)


def evaluation(step: int, *rewards: float) -> Evaluation:
    return Evaluation(step, "T=1", {f"t{i}": [reward, reward] for i, reward in enumerate(rewards)})


def test_the_interval_is_over_tasks() -> None:
    same = evaluation(0, 0.5, 0.5, 0.5)
    assert same.interval() == (0.5, 0.5)
    mixed = evaluation(0, 0.0, 1.0, 0.0, 1.0)
    low, high = mixed.interval()
    assert low < mixed.mean == 0.5 < high
    assert mixed.samples == 8


def test_table_report_and_curve(tmp_path: Path) -> None:
    before, after = evaluation(0, 0.0, 0.5), evaluation(4, 1.0, 1.0)
    comparison = Comparison("T=1", before, after)
    assert "| T=1 | 0.25 [0.00, 0.50] | 1.00 [1.00, 1.00] | 2 | 4 / 4 |" in table([comparison])
    steps = [STEP | {"step": step, "reward": 0.2 * step, "seconds": 30.0} for step in range(4)]
    write_report(tmp_path / "report.md", [comparison], steps)
    told = (tmp_path / "report.md").read_text()
    assert "2.0 minutes" in told and "nothing was learned" not in told and "left out" not in told
    steps[1] |= {"learned": False, "why_not": "no contrast", "rollouts_excluded": 3}
    write_report(tmp_path / "report.md", [comparison], steps)
    told = (tmp_path / "report.md").read_text()
    assert "In 1 of them nothing was learned; the last time: no contrast." in told
    assert "3 rollouts gave no reward" in told
    draw_curve(tmp_path / "curve.png", steps, [before, after])
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


@pytest.mark.parametrize("steps", [[], [STEP | {"step": 0, "reward": 0.0, "seconds": 1.0}]])
def test_a_run_without_held_out_tasks_still_reports(tmp_path: Path, steps: list[dict[str, Any]]) -> None:
    write_report(tmp_path / "report.md", [], steps)
    draw_curve(tmp_path / "curve.png", steps, [])
    assert "No held-out tasks" in (tmp_path / "report.md").read_text()
