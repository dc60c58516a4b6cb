"""The seam between the controller and whatever runs harnesses: one trial in, one outcome out.

Invariant: a runner never raises for what a harness or a verifier does; that is an outcome. It leaves nothing behind,
neither processes nor mounts nor files, whether it returns, raises or is cancelled.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from longrein.records import FailureClass, Receipt, Task


@dataclass(frozen=True, slots=True)
class Launch:
    """A harness, ready to start: everything filled in but what only the sandbox knows.

    Attributes:
        argv: argument list; ``{base_url}``, ``{workdir}`` and the like are filled in by then.
        env: environment variables of the harness (added to a small clean set).
        files: path in the sandbox → content written there before the start.
        preload: how to start by forking a warm interpreter; None starts ``argv`` afresh.
        readable: host directories the harness's program lives in (visible in the sandbox, read-only).
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    preload: "Preload | None" = None
    readable: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Preload:
    """A Python harness that is imported once and forked for each rollout.

    Attributes:
        python: interpreter of the harness's own environment.
        imports: modules imported before the first fork.
        entry: ``module:function`` called with ``sys.argv`` set to the launch's ``argv``.
        env: variables the imports need; what differs between rollouts (a key) has no place here.
    """

    python: Path
    imports: tuple[str, ...]
    entry: str
    env: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Trial:
    """One rollout to run.

    Attributes:
        gateway_socket: unix socket of the gateway on the host; port ``gateway_port`` of the sandbox leads there.
        evidence: host directory for what should be kept: harness output, verifier output, reward files.
        verifying: awaited once, when the harness has ended and the verifier is about to start.
    """

    rollout_id: str
    task: Task
    launch: Launch
    gateway_socket: Path
    gateway_port: int
    timeout_s: float
    evidence: Path
    verifying: Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a trial went.

    Attributes:
        ending: ``exited 0``, ``exited 3``, ``killed by SIGSEGV``, ``timed out``; empty if the harness never started.
        receipt: the verifier's reward, if it gave a good one.
        failure_class, failure: set when there is no usable reward; ``failure`` is ``kind: evidence``.
        retryable: whether another try may go better (the environment failed, not the verifier).
        seconds: wall time of each phase: ``start``, ``harness``, ``verifier``, ``stop``.
        said: the last line that the harness printed.
        tampered: what it left that may have swayed its verifier, a line each (also in the receipt).
    """

    ending: str
    receipt: Receipt | None = None
    failure_class: FailureClass | None = None
    failure: str = ""
    retryable: bool = False
    seconds: Mapping[str, float] = field(default_factory=dict)
    said: str = ""
    tampered: tuple[str, ...] = ()


class Runner(Protocol):
    """Runs trials, many at once. ``open`` first (it reaps what a crashed run left behind), ``close`` last."""

    async def open(self) -> None: ...

    async def run(self, trial: Trial) -> Outcome: ...

    async def close(self) -> None: ...
