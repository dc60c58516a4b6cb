"""The learner on several ranks of one node: processes that this one starts, asks and ends.

Each rank runs the embedded learner's own code with ``ranks.Several`` in it, over gloo on CPUs and NCCL on GPUs. Parent
and rank speak through a socket pair, in pickles. Invariant: no wait is without end. A rank that dies, fails or keeps
silent ends the others, with an error that names it; a parent that dies closes its sockets, and ranks that see theirs
closed end themselves. Nothing of it is in the file system: what ranks say, where they meet and the weights they hand
over lie in anonymous memory, which goes with the last process that has it open.
"""

import contextlib
import mmap
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from longrein.config import AlgorithmSection, LearnerSection
from longrein.engines.weights import load_module
from longrein.errors import LearnerError, LongreinError
from longrein.learning.batch import Cancelled, Progress, TrainBatch
from longrein.learning.figures import UpdateReport
from longrein.learning.learner import EmbeddedLearner
from longrein.learning.precision import thread_count
from longrein.learning.ranks import Ranks, Several
from longrein.records import POLICY

# Of a rank, and of one waiting for another; a pass over one micro-batch takes less, or is lost.
SILENCE_S = 3600.0
# How long the others may take to notice that one of them is gone, and a rank to end when told.
GRACE_S = 5.0

PROGRAM = "longrein.learning.fsdp:serve"

OpenLearner = Callable[[Path, LearnerSection, AlgorithmSection, int | None, Ranks], EmbeddedLearner]


def check(config: LearnerSection, algorithm: AlgorithmSection, policies: Sequence[str]) -> None:
    """Raises LearnerError where ``learner.kind`` or ``learner.ranks`` does not go with the rest."""
    if config.kind != "fsdp":
        if config.ranks > 1:
            raise LearnerError(f"learner.ranks is {config.ranks}, which needs learner.kind: fsdp. Set one of them.")
        return
    if len(policies) > 1:
        raise LearnerError(
            f"learner.kind: fsdp trains one policy, not several ({', '.join(policies)}). Use learner.kind: embedded."
        )
    if algorithm.capo is not None:
        raise LearnerError("learner.kind: fsdp does not compute algorithm.capo. Use learner.kind: embedded.")
    if config.forest == "walk":
        raise LearnerError(
            "learner.kind: fsdp needs learner.forest: packed (or auto, which is packed here): a walk makes as many "
            "passes as a forest has nodes, and ranks must make equally many. Set it, or use learner.kind: embedded."
        )
    gpus = torch.cuda.device_count()
    if gpus and gpus < config.ranks:
        raise LearnerError(
            f"learner.ranks is {config.ranks}, but this machine has {gpus} GPUs. Give at most that many."
        )


@dataclass(frozen=True, slots=True)
class Opening:
    """What a rank is told first.

    Attributes:
        meeting: descriptor of the memory where ranks find each other.
        memory: descriptor of the memory in which the first rank hands weights over.
    """

    number: int
    count: int
    directory: Path
    config: LearnerSection
    algorithm: AlgorithmSection
    steps: int | None
    meeting: int
    memory: int


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor lies in the memory that is handed over."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Rank:
    """A rank, as the parent knows it; ``said`` is the memory that its standard error goes to."""

    number: int
    process: "subprocess.Popen[bytes]"
    connection: "Connection[Any, Any]"
    said: int

    def last_words(self) -> str:
        size = os.fstat(self.said).st_size
        lines = os.pread(self.said, 4096, max(0, size - 4096)).decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else "nothing"

    def ending(self) -> str:
        """How it ended."""
        status = self.process.returncode
        return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


class FsdpLearner:
    """A ``Learner`` of one policy on several ranks.

    Args:
        directory: of the model.
        program: ``module:function``, what a rank runs; see ``serve``.

    Raises:
        LearnerError: the ranks could not open it; none is left.
    """

    policies = (POLICY,)

    def __init__(
        self,
        directory: Path,
        config: LearnerSection,
        algorithm: AlgorithmSection,
        steps: int | None = None,
        program: str = PROGRAM,
    ) -> None:
        check(config, algorithm, self.policies)
        self._directory = directory
        self._memory = os.memfd_create("longrein-weights")
        self._meeting = os.memfd_create("longrein-meeting")
        self._ranks: list[_Rank] = []
        self._updates = 0
        self._ended = ""
        own = config.model_copy(update={"forest": "packed", "threads": _threads(config)})
        try:
            for number in range(config.ranks):
                self._ranks.append(_start(number, program, (self._memory, self._meeting)))
            openings = [
                Opening(number, config.ranks, directory, own, algorithm, steps, self._meeting, self._memory)
                for number in range(config.ranks)
            ]
            self._described = str(self._ask("opening the model", [("open", opening) for opening in openings]))
        except BaseException:
            self.close()
            raise

    @property
    def module(self) -> PreTrainedModel:
        """The model that training began with, loaded anew: what is trained is whole nowhere."""
        module = load_module(self._directory, torch.float32)
        if torch.cuda.is_available():
            module.to("cuda")
        return module

    @property
    def processes(self) -> list[int]:
        """The ranks' process ids."""
        return [rank.process.pid for rank in self._ranks]

    def describe(self) -> str:
        """One line for people."""
        count = len(self._ranks)
        return f"{self._described}, on {count} rank{'s' * (count > 1)} over {_transport()}"

    def update(
        self, batch: TrainBatch, progress: Progress | None = None, cancelled: Cancelled | None = None
    ) -> UpdateReport:
        """The optimizer steps of a batch; see ``Learner``."""
        self._updates += 1
        command = ("update", (self._updates, batch))
        report: UpdateReport = self._ask("updating", [command] * len(self._ranks), progress, cancelled)
        return report

    def weights(self, policy: str = POLICY) -> Mapping[str, Tensor]:
        """See ``Learner``. The first rank writes them into memory that this process has mapped too: they are copied
        once, touch no disk, and leave nothing behind when a process is killed."""
        table: dict[str, Stored] = self._ask("gathering the weights", [("weights", None)] * len(self._ranks))
        return _mapped(self._memory, table)

    def save(self, directory: Path) -> None:
        """What the embedded learner writes; see ``Learner``.

        Raises:
            OSError: the disk is full or refuses.
        """
        self._ask("saving", [("save", directory.absolute())] * len(self._ranks))

    def load(self, directory: Path) -> None:
        """Whatever number of ranks wrote it, or the embedded learner; see ``Learner``."""
        self._ask("loading", [("load", directory.absolute())] * len(self._ranks))

    def close(self) -> None:
        """End the ranks."""
        self._ended = self._ended or "its ranks were ended"
        for rank in self._ranks:
            rank.connection.close()
        for rank in self._ranks:
            try:
                rank.process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()
            os.close(rank.said)
        self._ranks = []
        for descriptor in {self._memory, self._meeting} - {-1}:
            os.close(descriptor)
        self._memory = self._meeting = -1

    def _ask(
        self,
        doing: str,
        commands: Sequence[tuple[str, Any]],
        progress: Progress | None = None,
        cancelled: Cancelled | None = None,
    ) -> Any:
        """Give each rank a command; the first rank's answer, once all have answered."""
        if self._ended:
            raise LearnerError(f"learner.kind: fsdp cannot go on: {self._ended}. Run the same command again.")
        try:
            answers = self._answers(doing, commands, progress, cancelled)
        except BaseException as error:
            # Whatever it was, the ranks are no longer at the same place.
            self._ended = str(error) or type(error).__name__
            self.close()
            raise
        for kind, value in answers:
            if kind == "refused":
                raise LearnerError(value)
            if kind == "unwritten":
                raise OSError(value)
        return answers[0][1]

    def _answers(
        self,
        doing: str,
        commands: Sequence[tuple[str, Any]],
        progress: Progress | None,
        cancelled: Cancelled | None,
    ) -> list[tuple[str, Any]]:
        for rank, command in zip(self._ranks, commands, strict=True):
            self._send(doing, rank, command)
        answers: dict[int, tuple[str, Any]] = {}
        heard = dict.fromkeys(range(len(self._ranks)), time.monotonic())
        told = False
        while len(answers) < len(self._ranks):
            if cancelled is not None and not told and cancelled():
                told = True
                for rank in self._ranks:
                    self._send(doing, rank, ("cancel", self._updates))
            for rank in self._ready(answers):
                kind, value = self._receive(doing, rank)
                heard[rank.number] = time.monotonic()
                if kind == "progress" and progress is not None:
                    progress(*value)
                elif kind not in ("progress", "alive"):
                    answers[rank.number] = (kind, value)
            if time.monotonic() - max(heard.values()) > SILENCE_S:
                silent = min(
                    (rank for rank in self._ranks if rank.number not in answers), key=lambda r: heard[r.number]
                )
                raise self._failure(doing, silent, f"said nothing for {SILENCE_S:.0f} s")
        return [answers[number] for number in range(len(self._ranks))]

    def _ready(self, answers: Mapping[int, Any]) -> list[_Rank]:
        """Those that have something to say, after a short wait for one."""
        waiting = {rank.connection: rank for rank in self._ranks if rank.number not in answers}
        return [waiting[each] for each in wait(list(waiting), 0.1) if isinstance(each, Connection)]

    def _send(self, doing: str, rank: _Rank, command: tuple[str, Any]) -> None:
        try:
            rank.connection.send(command)
        except OSError:
            raise self._failure(doing, rank, "closed its connection") from None

    def _receive(self, doing: str, rank: _Rank) -> tuple[str, Any]:
        try:
            kind, value = rank.connection.recv()
        except (EOFError, OSError):
            raise self._failure(doing, rank, "closed its connection") from None
        if kind == "failed":
            raise self._failure(doing, rank, f"failed: {value}")
        return kind, value

    def _failure(self, doing: str, rank: _Rank, what: str) -> LearnerError:
        """Why it went wrong. A rank that has ended comes first: those that waited for it fail because of that."""
        deadline = time.monotonic() + GRACE_S / 2
        dead: list[_Rank] = []
        while not dead and time.monotonic() < deadline:
            dead = [each for each in self._ranks if each.process.poll() is not None]
            time.sleep(0.05)
        count = len(self._ranks)
        for each in dead[:1]:
            rank, what = each, f"ended ({each.ending()}); it said last: {each.last_words()}"
        return LearnerError(
            f"learner.kind: fsdp: while {doing}, rank {rank.number} of {count} {what}. The other ranks were ended; run "
            "the same command again to go on from the last checkpoint."
        )


def _threads(config: LearnerSection) -> int:
    """Of each rank: they share the cores."""
    count = thread_count(config.threads)
    return max(1, count // config.ranks) if config.threads == "auto" else count


def _transport() -> str:
    return "NCCL" if torch.cuda.is_available() else "gloo"


def _start(number: int, program: str, shared: tuple[int, ...]) -> _Rank:
    module, function = program.split(":")
    ours, theirs = Pipe()
    said = os.memfd_create(f"longrein-rank-{number}")
    with theirs:
        process = subprocess.Popen(
            # -P: nothing that happens to lie in the working directory is imported.
            [sys.executable, "-P", "-c", f"import {module}; {module}.{function}()", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            pass_fds=(theirs.fileno(), *shared),
            # Ranks speak to each other on this machine alone.
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"},
            # Ctrl-C is for the parent, which cancels the update.
            start_new_session=True,
        )
    return _Rank(number, process, ours, said)


def _place(weights: Mapping[str, Tensor]) -> tuple[dict[str, Stored], int]:
    """Where each tensor goes, and the bytes of all."""
    table, size = {}, 0
    for name, tensor in weights.items():
        table[name] = Stored(size, tuple(tensor.shape), tensor.dtype)
        size += -(-tensor.numel() * tensor.element_size() // 64) * 64
    return table, max(size, 1)


def _mapped(memory: int, table: Mapping[str, Stored]) -> dict[str, Tensor]:
    """Tensors over shared memory."""
    view = mmap.mmap(memory, 0)
    return {
        name: torch.frombuffer(view, dtype=each.dtype, count=int(np.prod(each.shape)), offset=each.offset).view(
            each.shape
        )
        for name, each in table.items()
    }


class _Unwritten(Exception):
    """The first rank could not write what it had to."""


class _Inbox:
    """Reads what the parent sends, and ends the process when the parent is gone or wants no more of it."""

    def __init__(self, connection: "Connection[Any, Any]") -> None:
        self._connection = connection
        self._commands: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.cancelled = 0
        threading.Thread(target=self._read, daemon=True).start()

    def next(self) -> tuple[str, Any]:
        return self._commands.get()

    def _read(self) -> None:
        try:
            while True:
                kind, value = self._connection.recv()
                if kind == "cancel":
                    self.cancelled = value
                else:
                    self._commands.put((kind, value))
        except (EOFError, OSError):
            # At once, although the other thread computes or waits for other ranks.
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)


class _Serving:
    """A rank at work."""

    def __init__(self, connection: "Connection[Any, Any]", open_learner: OpenLearner) -> None:
        self._connection = connection
        self._inbox = _Inbox(connection)
        self._open_learner = open_learner
        self._told = 0.0

    def run(self) -> None:
        _, opening = self._inbox.next()
        with self._answering():
            self._open(opening)
            self._connection.send(("done", self._learner.describe()))
        while True:
            kind, value = self._inbox.next()
            with self._answering():
                self._connection.send(("done", getattr(self, f"_{kind}")(value)))

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        """Tell the parent of an error. One that every rank has at the same place leaves it ready for more."""
        try:
            yield
        except LongreinError as error:
            self._connection.send(("refused", str(error)))
        except _Unwritten as error:
            self._connection.send(("unwritten", str(error)))
        except Exception as error:  # whatever torch or the device trips over
            traceback.print_exc()
            self._connection.send(("failed", f"{type(error).__name__}: {error}"))

    def _open(self, opening: Opening) -> None:
        torch.set_num_threads(thread_count(opening.config.threads))
        backend = "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(opening.number)
            backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(
            backend,
            store=dist.FileStore(f"/proc/self/fd/{opening.meeting}", opening.count),  # type: ignore[attr-defined]
            rank=opening.number,
            world_size=opening.count,
            timeout=timedelta(seconds=SILENCE_S),
        )
        self._ranks = Several()
        self._memory = opening.memory
        self._learner = self._open_learner(
            opening.directory, opening.config, opening.algorithm, opening.steps, self._ranks
        )

    def _update(self, given: tuple[int, TrainBatch]) -> UpdateReport:
        number, batch = given

        def cancelled() -> bool:
            """All ranks ask at the same places, and must hear the same."""
            self._alive()
            return bool(self._ranks.sum(np.array([float(self._inbox.cancelled == number)]))[0])

        def progress(done: int, total: int) -> None:
            if self._ranks.writes:
                self._connection.send(("progress", (done, total)))

        return self._learner.update(batch, progress, cancelled)

    def _alive(self) -> None:
        if time.monotonic() - self._told > 1:
            self._told = time.monotonic()
            self._connection.send(("alive", None))

    def _weights(self, _: None) -> dict[str, Stored]:
        weights = self._learner.weights()
        if not self._ranks.writes:
            return {}
        table, size = _place(weights)
        os.ftruncate(self._memory, size)
        for name, tensor in _mapped(self._memory, table).items():
            tensor.copy_(weights[name])
        return table

    def _save(self, directory: Path) -> None:
        try:
            self._learner.save(directory)
        except (OSError, RuntimeError, SafetensorError) as error:
            # All ranks have given their part by then.
            raise _Unwritten(str(error)) from error

    def _load(self, directory: Path) -> None:
        self._learner.load(directory)


def serve(open_learner: OpenLearner = EmbeddedLearner.open) -> None:
    """Be a rank: the whole life of a process whose argument is the descriptor of its connection to the parent."""
    _Serving(Connection(int(sys.argv[1])), open_learner).run()
