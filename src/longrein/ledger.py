"""What happened, durably: the only state. Everything else can be rebuilt from it.

One SQLite file in WAL mode, written by one process on one thread. Every method is one transaction that is on disk
when it returns, so a ``kill -9`` at any point loses nothing that was acknowledged.
"""

import asyncio
import fcntl
import json
import os
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from longrein.errors import LedgerError
from longrein.records import Call, Cause, FailureClass, Group, IntArray, Receipt, Rollout, RolloutState, Split

T = TypeVar("T")

SCHEMA_VERSION = 4

SCHEMA = """
create table if not exists meta (key text primary key, value text not null);
create table if not exists groups (
    group_id text primary key, step integer, task_id text not null, split text not null);
create table if not exists rollouts (
    rollout_id text primary key, group_id text not null references groups, task_id text not null, split text not null,
    idx integer not null, attempt integer not null, temperature real not null, state text not null,
    reward real, receipt text, failure_class text, failure text not null, ending text not null,
    started_at real not null, ended_at real not null);
create table if not exists calls (
    call_id text primary key, rollout_id text not null references rollouts, idx integer not null, agent text not null,
    dialect text not null, request text not null, reply text not null, prompt_rest blob not null,
    completion_ids blob not null, logprobs blob not null, versions blob not null, temperature real not null,
    policy text not null, finish_reason text not null, cause text not null, parent_id text, inherited integer not null,
    delivered integer not null, train integer not null, started_at real not null, ended_at real not null, roles blob,
    tools_valid integer, tools_failed integer);
create table if not exists steps (
    step integer primary key, version integer not null, metrics text not null, committed_at real not null);
create index if not exists groups_by_step on groups (split, step);
create index if not exists rollouts_by_group on rollouts (group_id);
create index if not exists calls_by_rollout on calls (rollout_id, idx);
"""

LEGAL_MOVES: Mapping[RolloutState, frozenset[RolloutState]] = {
    RolloutState.QUEUED: frozenset({RolloutState.RUNNING, RolloutState.CANCELLED, RolloutState.FAILED}),
    RolloutState.RUNNING: frozenset({RolloutState.VERIFYING, RolloutState.FAILED, RolloutState.CANCELLED}),
    RolloutState.VERIFYING: frozenset({RolloutState.DONE, RolloutState.FAILED, RolloutState.CANCELLED}),
}

UNFINISHED = f"state in ({', '.join(repr(state.value) for state in LEGAL_MOVES)})"

CALL_COLUMNS = (
    "call_id, rollout_id, idx, agent, dialect, request, reply, prompt_rest, completion_ids, logprobs, versions, "
    "temperature, policy, finish_reason, cause, parent_id, inherited, delivered, train, started_at, ended_at, roles, "
    "tools_valid, tools_failed"
)


@dataclass(frozen=True, slots=True)
class CommittedStep:
    """One finished training step, as metrics were written with it."""

    step: int
    version: int
    metrics: Mapping[str, Any]
    committed_at: float


class Ledger:
    """The ledger of one run directory. Open it with ``Ledger.open``."""

    def __init__(self, file: Path, connection: sqlite3.Connection, lock: int, thread: ThreadPoolExecutor) -> None:
        self._file = file
        self._connection = connection
        self._lock = lock
        self._thread = thread

    @classmethod
    async def open(cls, file: Path) -> "Ledger":
        """Open or create the ledger, and hold it for this process.

        Raises:
            LedgerError: another process holds it, or the file is not a ledger of this version.
        """
        lock = _hold(file)
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="longrein-ledger")
        try:
            connection = await asyncio.get_running_loop().run_in_executor(thread, _connect, file)
        except BaseException:
            thread.shutdown()
            os.close(lock)
            raise
        return cls(file, connection, lock, thread)

    async def close(self) -> None:
        """Finish what is queued, then let go of the file."""
        await self._run(self._connection.close)
        self._thread.shutdown()
        os.close(self._lock)

    async def _run(self, work: Callable[[], T]) -> T:
        # Shielded: a cancelled caller must not leave a transaction whose outcome nobody knows.
        try:
            return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, work))
        except sqlite3.IntegrityError:
            raise
        except sqlite3.DatabaseError as error:
            raise LedgerError(
                f"{self._file}: {error}. What was recorded before stays recorded; once the disk has room and is sound, "
                "run the same command again."
            ) from None

    async def _execute(self, statement: str, values: Sequence[Any]) -> int:
        def work() -> int:
            with self._connection:
                return self._connection.execute(statement, values).rowcount

        return await self._run(work)

    async def _select(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return await self._run(lambda: self._connection.execute(statement, values).fetchall())

    async def identify(self, identity: Mapping[str, str]) -> list[str]:
        """Bind the ledger to a run, unless it holds rollouts of another one; the names of what differs then."""
        recorded = dict(await self._select("select key, value from meta where key like 'identity.%'"))
        given = {f"identity.{key}": value for key, value in identity.items()}
        different = [key for key in sorted(given | recorded) if given.get(key) != recorded.get(key)]
        if different and await self._select("select 1 from rollouts limit 1"):
            return [key.removeprefix("identity.") for key in different]
        await self._run(lambda: self._write_meta(given))
        return []

    def _write_meta(self, values: Mapping[str, str]) -> None:
        with self._connection:
            self._connection.executemany("insert or replace into meta values (?, ?)", list(values.items()))

    async def add_group(self, group: Group) -> None:
        """Record a group; a group recorded before is left as it is."""
        await self._execute(
            "insert or ignore into groups values (?, ?, ?, ?)",
            (group.group_id, group.step, group.task_id, group.split.value),
        )

    async def take(self, group_ids: Sequence[str], step: int) -> None:
        """Give groups to a step, which alone learns from them.

        Raises:
            LedgerError: one of them is not recorded, or belongs to a step already; none is given away then.
        """

        def work() -> None:
            with self._connection:
                for group_id in group_ids:
                    taken = self._connection.execute(
                        "update groups set step = ? where group_id = ? and step is null", (step, group_id)
                    )
                    if taken.rowcount != 1:
                        raise LedgerError(
                            f"{self._file}: group {group_id} cannot be given to step {step}: another has it."
                        )

        await self._run(work)

    async def taken(self) -> frozenset[str]:
        """The training groups that belong to a step."""
        rows = await self._select(
            "select group_id from groups where split = ? and step is not null", (Split.TRAIN.value,)
        )
        return frozenset(row[0] for row in rows)

    async def add_rollout(self, rollout: Rollout) -> None:
        """Record a queued rollout.

        Raises:
            LedgerError: the rollout is there already, or its group is not.
        """
        try:
            await self._execute(
                f"insert into rollouts values ({', '.join('?' * 15)})",
                (
                    rollout.rollout_id,
                    rollout.group_id,
                    rollout.task_id,
                    rollout.split.value,
                    rollout.index,
                    rollout.attempt,
                    rollout.temperature,
                    rollout.state.value,
                    *_ending_columns(rollout),
                ),
            )
        except sqlite3.IntegrityError as error:
            raise LedgerError(f"rollout {rollout.rollout_id} cannot be added: {error}") from None

    async def move(self, rollout: Rollout) -> None:
        """Record the rollout's new state with what came with it, in one transaction.

        Raises:
            LedgerError: the recorded state does not lead there.
        """
        sources = [state.value for state, targets in LEGAL_MOVES.items() if rollout.state in targets]
        changed = await self._execute(
            "update rollouts set state = ?, reward = ?, receipt = ?, failure_class = ?, failure = ?, ending = ?, "
            f"started_at = ?, ended_at = ? where rollout_id = ? and state in ({', '.join('?' * len(sources))})",
            (rollout.state.value, *_ending_columns(rollout), rollout.rollout_id, *sources),
        )
        if changed != 1:
            raise LedgerError(f"rollout {rollout.rollout_id} cannot become {rollout.state.value} from where it is")

    async def cancel(self, rollout_id: str, reason: str, now: float) -> None:
        """Cancel a rollout, unless it has ended: its last move may have been under way when it was given up."""
        await self._execute(
            f"update rollouts set state = ?, failure = ?, ended_at = ? where rollout_id = ? and {UNFINISHED}",
            (RolloutState.CANCELLED.value, reason, now, rollout_id),
        )

    async def cancel_unfinished(self, reason: str, now: float) -> int:
        """Cancel every rollout that a stopped process left queued, running or verifying; return how many."""
        return await self._execute(
            f"update rollouts set state = ?, failure = ?, ended_at = ? where {UNFINISHED}",
            (RolloutState.CANCELLED.value, reason, now),
        )

    async def groups(self, split: Split, step: int) -> list[Group]:
        """The groups recorded for a step, in order of their ids."""
        rows = await self._select(
            "select group_id, step, task_id, split from groups where split = ? and step = ? order by group_id",
            (split.value, step),
        )
        return [Group(row[0], row[1], row[2], Split(row[3])) for row in rows]

    async def all_groups(self, split: Split) -> list[Group]:
        """In order of their ids."""
        rows = await self._select(
            "select group_id, step, task_id, split from groups where split = ? order by group_id", (split.value,)
        )
        return [Group(row[0], row[1], row[2], Split(row[3])) for row in rows]

    async def rollouts(self, group_id: str) -> list[Rollout]:
        """All attempts of a group's rollouts, by index and attempt."""
        rows = await self._select(
            "select * from rollouts where group_id = ? order by idx, attempt",
            (group_id,),
        )
        return [_rollout(row) for row in rows]

    async def record(self, call: Call) -> None:
        """Record a call. It is durable when this returns."""

        def work() -> None:
            with self._connection:
                self._connection.execute(f"insert into calls values ({', '.join('?' * 24)})", _call_row(call))

        try:
            await self._run(work)
        except sqlite3.IntegrityError as error:
            raise LedgerError(f"call {call.call_id} cannot be recorded: {error}") from None

    async def deliver(self, call_id: str, delivered: bool) -> None:
        """Correct whether a recorded call's reply reached the harness."""
        await self._execute("update calls set delivered = ? where call_id = ?", (int(delivered), call_id))

    async def calls(self, rollout_id: str) -> list[Call]:
        """The rollout's calls in order of arrival.

        Raises:
            LedgerError: a call's prompt cannot be put together.
        """
        rows = await self._select(f"select {CALL_COLUMNS} from calls where rollout_id = ? order by idx", (rollout_id,))
        found: dict[str, Call] = {}
        for row in rows:
            call = _call(row)
            found[call.call_id] = replace(call, prompt_ids=self._whole_prompt(call, found))
        return list(found.values())

    def _whole_prompt(self, call: Call, earlier: Mapping[str, Call]) -> IntArray:
        """The tokens of the call it continues, which are kept once, and its own."""
        if call.inherited == 0:
            return call.prompt_ids
        parent = None if call.parent_id is None else earlier.get(call.parent_id)
        told = 0 if parent is None else len(parent.prompt_ids) + len(parent.completion_ids)
        if parent is None or told != call.inherited:
            raise LedgerError(
                f"{self._file}: call {call.call_id} continues {call.inherited} tokens of {call.parent_id}, of which "
                f"{told} are recorded before it. The file was changed by something else."
            )
        return np.concatenate([parent.prompt_ids, parent.completion_ids, call.prompt_ids])

    async def commit_step(self, step: CommittedStep) -> None:
        """Record a finished step; doing it again (after a resume from an older checkpoint) replaces it."""
        await self._execute(
            "insert or replace into steps values (?, ?, ?, ?)",
            (step.step, step.version, json.dumps(dict(step.metrics)), step.committed_at),
        )

    async def steps(self) -> list[CommittedStep]:
        """Every committed step, in order."""
        rows = await self._select("select step, version, metrics, committed_at from steps order by step")
        return [CommittedStep(row[0], row[1], json.loads(row[2]), row[3]) for row in rows]

    async def counts(self) -> dict[str, int]:
        """How many rollouts are in each state, and how many calls there are."""
        states = await self._select("select state, count(*) from rollouts group by state")
        calls = await self._select("select count(*) from calls")
        return {**dict(states), "calls": calls[0][0]}


def _hold(file: Path) -> int:
    """An exclusive lock beside the ledger; the kernel drops it with the process, however that ends."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(file.with_suffix(".lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise LedgerError(
            f"{file}: another longrein process works in this run directory. Wait for it, stop it, or use another "
            "output.dir."
        ) from None
    return lock


def _connect(file: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(file, check_same_thread=False)
    try:
        connection.execute("pragma journal_mode = wal")
        connection.execute("pragma synchronous = full")
        connection.execute("pragma foreign_keys = on")
        with connection:
            connection.executescript(SCHEMA)
            connection.execute("insert or ignore into meta values ('schema', ?)", (str(SCHEMA_VERSION),))
        (found,) = connection.execute("select value from meta where key = 'schema'").fetchone()
    except sqlite3.DatabaseError as error:
        connection.close()
        raise LedgerError(f"{file}: is not a usable ledger ({error}). Move it away or use a new output.dir.") from None
    if found != str(SCHEMA_VERSION):
        connection.close()
        raise LedgerError(f"{file}: has ledger schema {found}, this version of longrein writes {SCHEMA_VERSION}.")
    return connection


def _ending_columns(rollout: Rollout) -> tuple[Any, ...]:
    return (
        rollout.reward,
        json.dumps(asdict(rollout.receipt)) if rollout.receipt else None,
        rollout.failure_class.value if rollout.failure_class else None,
        rollout.failure,
        rollout.ending,
        rollout.started_at,
        rollout.ended_at,
    )


def _rollout(row: Iterable[Any]) -> Rollout:
    (rollout_id, group_id, task_id, split, index, attempt, temperature, state, *ending) = row
    reward, receipt, failure_class, failure, how, started_at, ended_at = ending
    return Rollout(
        rollout_id=rollout_id,
        group_id=group_id,
        task_id=task_id,
        split=Split(split),
        index=index,
        attempt=attempt,
        temperature=temperature,
        state=RolloutState(state),
        reward=reward,
        receipt=_receipt(json.loads(receipt)) if receipt else None,
        failure_class=FailureClass(failure_class) if failure_class else None,
        failure=failure,
        ending=how,
        started_at=started_at,
        ended_at=ended_at,
    )


def _receipt(tree: dict[str, Any]) -> Receipt:
    return Receipt(**{**tree, "tampered": tuple(tree.get("tampered", ()))})


def _call_row(call: Call) -> tuple[Any, ...]:
    return (
        call.call_id,
        call.rollout_id,
        call.index,
        call.agent,
        call.dialect,
        json.dumps(call.request),
        json.dumps(call.reply),
        _pack(call.prompt_ids[call.inherited :], np.int32),
        _pack(call.completion_ids, np.int32),
        _pack(call.logprobs, np.float32),
        _pack(call.versions, np.int32),
        call.temperature,
        call.policy,
        call.finish_reason,
        call.cause.value,
        call.parent_id,
        call.inherited,
        int(call.delivered),
        int(call.train),
        call.started_at,
        call.ended_at,
        None if call.roles is None else _pack(call.roles, np.uint8),
        call.tools_valid,
        call.tools_failed,
    )


def _call(row: tuple[Any, ...]) -> Call:
    """Of the prompt, the tokens that are the call's own."""
    return Call(
        call_id=row[0],
        rollout_id=row[1],
        index=row[2],
        agent=row[3],
        dialect=row[4],
        request=json.loads(row[5]),
        reply=json.loads(row[6]),
        prompt_ids=_unpack(row[7], np.int32),
        completion_ids=_unpack(row[8], np.int32),
        logprobs=_unpack(row[9], np.float32),
        versions=_unpack(row[10], np.int32),
        temperature=row[11],
        policy=row[12],
        finish_reason=row[13],
        cause=Cause(row[14]),
        parent_id=row[15],
        inherited=row[16],
        delivered=bool(row[17]),
        train=bool(row[18]),
        started_at=row[19],
        ended_at=row[20],
        roles=None if row[21] is None else _unpack(row[21], np.uint8),
        tools_valid=None if row[22] is None else bool(row[22]),
        tools_failed=None if row[23] is None else bool(row[23]),
    )


def _pack(array: NDArray[Any], dtype: type[np.generic]) -> bytes:
    return np.ascontiguousarray(array, dtype=dtype).tobytes()


def _unpack(blob: bytes, dtype: type[np.generic]) -> NDArray[Any]:
    return np.frombuffer(blob, dtype=dtype)
