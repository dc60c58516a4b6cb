"""A catalog pins tasks, and refuses them once they have changed."""

from pathlib import Path

import pytest
import yaml

from longrein.agents.catalog import load_catalog, write_catalog
from longrein.errors import DigestMismatch, TaskError
from longrein.records import RewardProfile
from tests.agents.task_directory import make_task

PROFILE = RewardProfile("score", 2.0, -1.0, (0.0, 5.0))


def make_tasks(root: Path, *names: str) -> Path:
    for name in names:
        make_task(root / name)
    return root


def test_a_directory_is_pinned_on_the_spot_in_order(tmp_path: Path) -> None:
    (make_tasks(tmp_path, "b", "a", "c") / "README.md").write_text("not a task\n")
    (tmp_path / ".git").mkdir()
    tasks = load_catalog(tmp_path, PROFILE)
    assert [task.task_id for task in tasks] == ["a", "b", "c"]
    assert all(task.profile == PROFILE for task in tasks)


def test_a_written_catalog_brings_back_the_same_tasks(tmp_path: Path) -> None:
    tasks = load_catalog(make_tasks(tmp_path / "tasks", "a", "b"), PROFILE)
    beside, elsewhere = tmp_path / "catalog.yaml", tmp_path / "run" / "catalog.yaml"
    elsewhere.parent.mkdir()
    for file in (beside, elsewhere):
        write_catalog(tasks, file)
        assert load_catalog(file, RewardProfile()) == tasks
        assert [path.name for path in file.parent.iterdir() if path.name.startswith(".")] == []
    assert [entry["path"] for entry in yaml.safe_load(beside.read_text())["tasks"]] == ["tasks/a", "tasks/b"]
    tmp_path.rename(tmp_path.with_name("moved"))
    moved = tmp_path.with_name("moved") / "catalog.yaml"
    assert [task.digest for task in load_catalog(moved, PROFILE)] == [task.digest for task in tasks]


def test_a_changed_task_is_refused_with_both_digests(tmp_path: Path) -> None:
    tasks = load_catalog(make_tasks(tmp_path / "tasks", "a", "b"), PROFILE)
    write_catalog(tasks, tmp_path / "catalog.yaml")
    (tmp_path / "tasks" / "b" / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    with pytest.raises(DigestMismatch) as caught:
        load_catalog(tmp_path / "catalog.yaml", PROFILE)
    found = load_catalog(tmp_path / "tasks", PROFILE)[1].digest
    assert all(part in str(caught.value) for part in ("'b'", tasks[1].digest, found, "write the digest"))


def test_an_entry_may_name_the_task_and_its_reward(tmp_path: Path) -> None:
    (task,) = load_catalog(make_tasks(tmp_path / "tasks", "a"), PROFILE)
    entry = {"id": "greet", "revision": "r7", "path": "tasks/a", "digest": task.digest, "reward": {"scale": 3.0}}
    (tmp_path / "catalog.yaml").write_text(yaml.safe_dump({"tasks": [entry]}))
    (named,) = load_catalog(tmp_path / "catalog.yaml", PROFILE)
    assert (named.task_id, named.revision, named.profile) == ("greet", "r7", RewardProfile(scale=3.0))
    write_catalog([named], tmp_path / "again.yaml")
    assert load_catalog(tmp_path / "again.yaml", PROFILE) == (named,)


def test_what_is_no_catalog_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (task,) = load_catalog(make_tasks(tmp_path / "tasks", "a"), PROFILE)
    good = {"id": "a", "path": "tasks/a", "digest": task.digest}
    cases: dict[str, tuple[object, str]] = {
        "twice.yaml": ({"tasks": [good, good]}, "'a' is given twice"),
        "none.yaml": ({"tasks": []}, "holds no tasks"),
        "list.yaml": ([good], "is not a catalog"),
        "short.yaml": ({"tasks": [{"id": "a", "path": "tasks/a"}]}, r"'tasks.0.digest'"),
        "odd.yaml": ({"tasks": [{**good, "colour": 1}]}, r"'tasks.0.colour'"),
        "range.yaml": ({"tasks": [{**good, "reward": {"raw_range": [1.0, 0.0]}}]}, r"'tasks.0.reward.raw_range'"),
        "gone.yaml": ({"tasks": [{**good, "path": "tasks/b"}]}, "is not a directory"),
    }
    for name, (tree, says) in cases.items():
        (tmp_path / name).write_text(yaml.safe_dump(tree))
        with pytest.raises(TaskError, match=says):
            load_catalog(tmp_path / name, PROFILE)
    (tmp_path / "bad.yaml").write_text("tasks: [")
    for path, says in (
        (tmp_path / "bad.yaml", "not valid YAML"),
        (tmp_path / "empty", "holds no tasks"),
        (tmp_path / "absent", "does not exist"),
        (tmp_path / "tasks" / "a", "is itself a task"),
    ):
        with pytest.raises(TaskError, match=says):
            load_catalog(path, PROFILE)
