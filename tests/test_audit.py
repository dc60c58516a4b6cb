"""An audit of a sound run finds nothing; each thing that a ledger should not say is found by the check named for it."""

import json
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from longrein.audit import audit
from longrein.config import Config
from longrein.config_file import load
from longrein.errors import LongreinError
from tests.workshop import make_workshop


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a finished run of two steps."""
    root = tmp_path_factory.mktemp("trained")
    config = make_workshop(root, steps=2, rollouts=2)
    command = [sys.executable, "-m", "longrein.cli", "train", "--config", str(config)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    return root


def copied(trained: Path, root: Path, *statements: str) -> Config:
    """The configuration of a copy of the run whose ledger was changed."""
    shutil.copytree(trained, root, dirs_exist_ok=True)
    with closing(sqlite3.connect(root / "run" / "ledger.db")) as ledger, ledger:
        for statement in statements:
            assert ledger.execute(statement).rowcount > 0, statement
    return load(root / "config.yaml")


async def test_a_sound_run_has_nothing_wrong(trained: Path, tmp_path: Path) -> None:
    report = await audit(copied(trained, tmp_path))
    assert report.ok, report.failures()
    details = {check.name: check.detail for check in report.checks}
    assert details["plan"].startswith("4 groups") and details["tokens"].startswith("2 committed steps")


@pytest.mark.parametrize(
    ("statements", "name", "says"),
    [
        (["update groups set task_id = 'say-9' where group_id = 'g000001'"], "plan", "g000001 of say-9, not"),
        (["update groups set step = 1 where group_id = 'g000000'"], "tokens", "step 0 trained"),
        (["update groups set step = null where step = 1 and split = 'train'"], "groups", "step 1 has no group"),
        (["update rollouts set state = 'running' where rollout_id = 'g000000-00'"], "rollouts", "00 is running"),
        (["update rollouts set idx = 0 where group_id = 'g000002'"], "rollouts", "valid beside another"),
        (["delete from calls where idx = 1 and rollout_id = 'g000003-01'"], "tokens", "step 1 trained"),
        (["update calls set delivered = 0 where rollout_id = 'g000000-01'"], "tokens", "step 0 trained"),
        (["update calls set versions = zeroblob(4) where rollout_id = 'g000000-01'"], "calls", "differ in length"),
        (["update calls set parent_id = 'x' where idx = 0 and rollout_id = 'g000000-00'"], "calls", "goes on from"),
        (["update rollouts set reward = 1.0 where rollout_id = 'g000000-00'"], "rewards", "has 1.0 without a receipt"),
        (["delete from steps where step = 1"], "checkpoints", "step-000002 is of step 2, not committed"),
        (["delete from steps where step = 0"], "groups", "step 0 is missing"),
    ],
)
async def test_what_is_wrong_is_found(
    trained: Path, tmp_path: Path, statements: list[str], name: str, says: str
) -> None:
    report = await audit(copied(trained, tmp_path, *statements))
    wrong = {check.name: check.detail for check in report.checks if not check.ok}
    assert says in wrong[name], wrong


async def test_a_token_that_is_too_old_is_found(trained: Path, tmp_path: Path) -> None:
    config = copied(trained, tmp_path)
    with closing(sqlite3.connect(tmp_path / "run" / "ledger.db")) as ledger, ledger:
        (text,) = ledger.execute("select metrics from steps where step = 1").fetchone()
        metrics = json.loads(text)
        metrics["by_age"] = {"2": next(iter(metrics["by_age"].values()))}
        ledger.execute("update steps set metrics = ? where step = 1", (json.dumps(metrics),))
    (wrong,) = [check for check in (await audit(config)).checks if not check.ok]
    assert (wrong.name, "step 1 trained tokens 2 versions old" in wrong.detail) == ("staleness", True)


async def test_no_run_is_no_audit(tmp_path: Path) -> None:
    config = load(make_workshop(tmp_path))
    with pytest.raises(LongreinError, match=r"holds no run: .*ledger\.db does not exist"):
        await audit(config)
    assert not (tmp_path / "run").exists()
