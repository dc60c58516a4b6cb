"""What was acknowledged is there after a kill; no illegal move is recorded; one process at a time."""

import os
import resource
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from longrein.errors import LedgerError
from longrein.ledger import CommittedStep, Ledger
from longrein.records import Call, Cause, FailureClass, Group, Receipt, Role, Rollout, RolloutState, Split

GROUP = Group("g0", 3, "task", Split.TRAIN)
ROLLOUT = Rollout("r0", "g0", "task", Split.TRAIN, 0)


def call(call_id: str = "c0", index: int = 0, rollout_id: str = "r0") -> Call:
    return Call(
        call_id=call_id,
        rollout_id=rollout_id,
        index=index,
        agent="main",
        dialect="chat",
        request={"messages": [{"role": "user", "content": "é"}]},
        reply={"id": "x"},
        prompt_ids=np.array([1, 2, 3], np.int32),
        completion_ids=np.array([4, 5], np.int32),
        logprobs=np.array([-0.5, -1.25], np.float32),
        versions=np.array([0, 0], np.int32),
        temperature=1.0,
        policy="policy",
        finish_reason="stop",
        cause=Cause.NEW_SESSION,
    )


async def test_a_rollout_and_its_calls_come_back_as_they_were(tmp_path: Path) -> None:
    ledger = await Ledger.open(tmp_path / "ledger.db")
    await ledger.add_group(GROUP)
    await ledger.add_rollout(ROLLOUT)
    await ledger.move(replace(ROLLOUT, state=RolloutState.RUNNING))
    await ledger.record(call())
    await ledger.deliver("c0", False)
    await ledger.move(replace(ROLLOUT, state=RolloutState.VERIFYING))
    done = replace(
        ROLLOUT,
        state=RolloutState.DONE,
        reward=0.5,
        receipt=Receipt("reward.txt", "0.5", "ab", 0.5, 0.5, ("/app/conftest.py: pytest runs it",)),
        failure_class=FailureClass.AGENT,
        ending="exited 0",
    )
    await ledger.move(done)
    await ledger.close()

    again = await Ledger.open(tmp_path / "ledger.db")
    assert await again.groups(Split.TRAIN, 3) == [GROUP]
    assert await again.rollouts("g0") == [done]
    (found,) = await again.calls("r0")
    assert found.delivered is False
    for name in ("prompt_ids", "completion_ids", "logprobs", "versions"):
        np.testing.assert_array_equal(getattr(found, name), getattr(call(), name))
        assert getattr(found, name).dtype == getattr(call(), name).dtype
    assert (found.request, found.reply, found.cause) == (call().request, call().reply, Cause.NEW_SESSION)
    assert found.roles is None
    await again.close()


async def test_a_continued_prompt_is_kept_once_and_comes_back_whole(tmp_path: Path) -> None:
    ledger = await Ledger.open(tmp_path / "ledger.db")
    await ledger.add_group(GROUP)
    await ledger.add_rollout(ROLLOUT)
    first, second, third = call("c0", 0), call("c1", 1), call("c2", 2)
    second = replace(second, parent_id="c0", inherited=5, prompt_ids=np.array([1, 2, 3, 4, 5, 6], np.int32))
    third = replace(third, parent_id="c1", inherited=8, prompt_ids=np.array([1, 2, 3, 4, 5, 6, 4, 5, 9], np.int32))
    for made in (first, second, third):
        await ledger.record(made)
    found = await ledger.calls("r0")
    assert [c.prompt_ids.tolist() for c in found] == [c.prompt_ids.tolist() for c in (first, second, third)]
    assert [c.inherited for c in found] == [0, 5, 8] and found[2].prompt_ids.dtype == np.int32
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as kept:
        sizes = kept.execute("select length(prompt_rest) from calls order by idx").fetchall()
    assert sizes == [(12,), (4,), (4,)], "four bytes a token, each token once"
    await ledger.close()


async def test_a_prompt_whose_beginning_is_gone_is_refused_by_name(tmp_path: Path) -> None:
    ledger = await Ledger.open(tmp_path / "ledger.db")
    await ledger.add_group(GROUP)
    await ledger.add_rollout(ROLLOUT)
    await ledger.record(call("c0", 0))
    await ledger.record(
        replace(call("c1", 1), parent_id="c0", inherited=5, prompt_ids=np.array([1, 2, 3, 4, 5, 6], np.int32))
    )
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as other, other:
        other.execute("delete from calls where call_id = 'c0'")
    with pytest.raises(LedgerError, match=r"ledger\.db: call c1 continues 5 tokens of c0, of which 0 are recorded"):
        await ledger.calls("r0")
    await ledger.close()


async def test_roles_come_back_as_they_were(tmp_path: Path) -> None:
    ledger = await Ledger.open(tmp_path / "ledger.db")
    await ledger.add_group(GROUP)
    await ledger.add_rollout(ROLLOUT)
    await ledger.record(replace(call(), roles=np.array([Role.ACTION, Role.ARGUMENTS], np.uint8)))
    (found,) = await ledger.calls("r0")
    assert found.roles is not None and found.roles.dtype == np.uint8
    assert found.roles.tolist() == [1, 2]
    await ledger.close()


async def test_a_ledger_of_an_earlier_version_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "ledger.db"
    await (await Ledger.open(file)).close()
    with closing(sqlite3.connect(file)) as old, old:
        old.execute("alter table calls drop column roles")
        old.execute("update meta set value = '2' where key = 'schema'")
    with pytest.raises(LedgerError, match=r"ledger\.db: has ledger schema 2, this version of longrein writes 4"):
        await Ledger.open(file)
    with closing(sqlite3.connect(file)) as old:
        assert "roles" not in {row[1] for row in old.execute("pragma table_info(calls)")}


@pytest.mark.parametrize("target", [RolloutState.VERIFYING, RolloutState.DONE, RolloutState.QUEUED])
async def test_a_state_cannot_be_skipped(tmp_path: Path, target: RolloutState) -> None:
    ledger = await Ledger.open(tmp_path / "ledger.db")
    await ledger.add_group(GROUP)
    await ledger.add_rollout(ROLLOUT)
    with pytest.raises(LedgerError, match="r0"):
        await ledger.move(replace(ROLLOUT, state=target))
    assert (await ledger.rollouts("g0"))[0].state is RolloutState.QUEUED
    await ledger.close()


async def test_an_ended_rollout_stays_ended(tmp_path: Path) -> None:
    ledger = await Ledger.open(tmp_path / "ledger.db")
    await ledger.add_group(GROUP)
    await ledger.add_rollout(ROLLOUT)
    assert await ledger.cancel_unfinished("the process stopped", 1.0) == 1
    with pytest.raises(LedgerError):
        await ledger.move(replace(ROLLOUT, state=RolloutState.RUNNING))
    await ledger.close()


async def test_a_call_cannot_be_recorded_twice(tmp_path: Path) -> None:
    ledger = await Ledger.open(tmp_path / "ledger.db")
    await ledger.add_group(GROUP)
    await ledger.add_rollout(ROLLOUT)
    await ledger.record(call())
    with pytest.raises(LedgerError, match="c0"):
        await ledger.record(call())
    assert len(await ledger.calls("r0")) == 1
    await ledger.close()


async def test_a_second_holder_is_refused(tmp_path: Path) -> None:
    ledger = await Ledger.open(tmp_path / "ledger.db")
    with pytest.raises(LedgerError, match="another longrein process"):
        await Ledger.open(tmp_path / "ledger.db")
    await ledger.close()
    await (await Ledger.open(tmp_path / "ledger.db")).close()


async def test_another_run_is_refused(tmp_path: Path) -> None:
    ledger = await Ledger.open(tmp_path / "ledger.db")
    # Nothing was begun with the first two.
    for model in ("x", "a", "a"):
        assert await ledger.identify({"model": model, "seed": "0"}) == []
    await ledger.add_group(GROUP)
    await ledger.add_rollout(ROLLOUT)
    assert await ledger.identify({"model": "a", "seed": "0"}) == []
    assert await ledger.identify({"model": "b", "seed": "0", "more": "1"}) == ["model", "more"]
    assert await ledger.identify({"model": "a", "seed": "0"}) == []
    await ledger.close()


async def test_a_damaged_file_is_named_and_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "ledger.db"
    file.write_bytes(b"not a database, and longer than a header of one hundred bytes" * 4)
    before = file.read_bytes()
    with pytest.raises(LedgerError, match=r"ledger\.db"):
        await Ledger.open(file)
    assert file.read_bytes() == before


async def test_steps_are_replaced_not_repeated(tmp_path: Path) -> None:
    ledger = await Ledger.open(tmp_path / "ledger.db")
    await ledger.commit_step(CommittedStep(0, 1, {"reward": 0.25}, 1.0))
    await ledger.commit_step(CommittedStep(0, 1, {"reward": 0.5}, 2.0))
    assert [dict(step.metrics) for step in await ledger.steps()] == [{"reward": 0.5}]
    await ledger.close()


WRITER = """
import asyncio, sys
from pathlib import Path
from longrein.ledger import Ledger
from tests.test_ledger import GROUP, ROLLOUT, call

async def main():
    ledger = await Ledger.open(Path(sys.argv[1]))
    await ledger.add_group(GROUP)
    await ledger.add_rollout(ROLLOUT)
    for index in range(10_000):
        await ledger.record(call(f"c{index}", index))
        print(index, flush=True)

asyncio.run(main())
"""


async def test_a_killed_writer_loses_no_acknowledged_call(tmp_path: Path) -> None:
    file = tmp_path / "ledger.db"
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), str(file)], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        acknowledged = [int(writer.stdout.readline()) for _ in range(25)]
        time.sleep(0.02)
        os.kill(writer.pid, signal.SIGKILL)
        acknowledged += [int(line) for line in writer.stdout.read().split()]
    ledger = await Ledger.open(file)
    recorded = [found.index for found in await ledger.calls("r0")]
    await ledger.close()
    assert recorded == list(range(len(recorded)))
    assert len(recorded) >= len(acknowledged)


async def test_a_full_disk_is_explained_and_loses_nothing_recorded(tmp_path: Path) -> None:
    ledger = await Ledger.open(tmp_path / "ledger.db")
    await ledger.add_group(GROUP)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        # Files may grow no further: the nearest to a full disk that a process can have by itself.
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        with pytest.raises(LedgerError, match=r"ledger\.db: .*run the same command again"):
            await ledger.add_rollout(ROLLOUT)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    await ledger.add_rollout(ROLLOUT)
    assert await ledger.groups(Split.TRAIN, 3) == [GROUP] and await ledger.rollouts("g0") == [ROLLOUT]
    await ledger.close()
