"""A checkpoint is whole or not there, whatever happens while it is written."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors import SafetensorError

from longrein.errors import LearnerError
from longrein.publishing import checkpoints


def write(directory: Path) -> None:
    (directory / "adapter").mkdir()
    (directory / "model.safetensors").write_bytes(b"weights")
    (directory / "adapter" / "adapter.safetensors").write_bytes(b"adapter")


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_the_latest_is_found_by_its_number(tmp_path: Path) -> None:
    assert checkpoints.latest(tmp_path / "absent") is None
    for step in (9, 10, 2):
        checkpoints.save(tmp_path, step, write, {"step": step, "version": step + 1})
    found = checkpoints.latest(tmp_path)
    assert found is not None
    assert found.path == tmp_path / "step-000010"
    assert found.cursor == {"step": 10, "version": 11}
    assert (found.path / "adapter" / "adapter.safetensors").read_bytes() == b"adapter"


def test_pruning_keeps_the_last(tmp_path: Path) -> None:
    for step in range(4):
        checkpoints.save(tmp_path, step, write, {"step": step})
    (tmp_path / "step-000004.partial").mkdir()
    checkpoints.prune(tmp_path, 2)
    assert names(tmp_path) == ["step-000002", "step-000003"]
    checkpoints.prune(tmp_path, 5)
    assert names(tmp_path) == ["step-000002", "step-000003"]


def test_what_is_no_checkpoint_is_passed_over_and_a_damaged_one_named(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, 1, write, {"step": 1})
    (tmp_path / "step-old").mkdir()
    (tmp_path / "step-old" / "cursor.json").write_text("{}")
    found = checkpoints.latest(tmp_path)
    assert found is not None and found.cursor["step"] == 1
    for text in ('{"ste', "[]", "{}", '{"step": "1"}'):
        (tmp_path / "step-000001" / "cursor.json").write_text(text)
        with pytest.raises(LearnerError, match=r"step-000001/cursor\.json: is damaged"):
            checkpoints.latest(tmp_path)


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, 1, write, {"step": 1, "try": 1})
    checkpoints.save(tmp_path, 1, write, {"step": 1, "try": 2})
    found = checkpoints.latest(tmp_path)
    assert found is not None and found.cursor["try"] == 2
    assert names(tmp_path) == ["step-000001"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        # What torch and safetensors say of the same.
        RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_leaves_the_old_ones(tmp_path: Path, error: Exception) -> None:
    checkpoints.save(tmp_path, 1, write, {"step": 1})

    def full(directory: Path) -> None:
        write(directory)
        raise error

    said = r"step-000002 could not be written: .*(No space left|file write failed).*free some disk"
    with pytest.raises(LearnerError, match=said):
        checkpoints.save(tmp_path, 2, full, {"step": 2})
    assert names(tmp_path) == ["step-000001"]


def test_any_other_failure_leaves_the_old_ones_too(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, 1, write, {"step": 1})

    def broken(directory: Path) -> None:
        write(directory)
        raise LearnerError("no weights today")

    with pytest.raises(LearnerError, match="no weights today"):
        checkpoints.save(tmp_path, 1, broken, {"step": 1, "try": 2})
    assert names(tmp_path) == ["step-000001"]
    found = checkpoints.latest(tmp_path)
    assert found is not None and found.cursor == {"step": 1}


KILLED = """
import sys, time
from pathlib import Path
from longrein.publishing import checkpoints

def write(directory):
    (directory / "model.safetensors").write_bytes(b"half of it")
    print("writing", flush=True)
    time.sleep(60)

checkpoints.save(Path(sys.argv[1]), 2, write, {"step": 2})
"""


def test_kill_9_in_the_middle_leaves_what_was_there(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, 1, write, {"step": 1})
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "writing\n"
        os.kill(process.pid, signal.SIGKILL)
    assert names(tmp_path) == ["step-000001", "step-000002.partial"]
    found = checkpoints.latest(tmp_path)
    assert found is not None and found.path.name == "step-000001"
    began = time.time()
    checkpoints.save(tmp_path, 2, write, {"step": 2, "at": began})
    found = checkpoints.latest(tmp_path)
    assert found is not None and found.cursor["at"] == began
    assert names(tmp_path) == ["step-000001", "step-000002"]
