"""The nouns that cross rooms: Task, Group, Rollout, Call. Frozen data, no behaviour beyond arithmetic on itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
RoleArray = NDArray[np.uint8]


POLICY = "policy"
"""The policy that is trained, where a configuration names no other."""

BASE = "base"
"""The starting weights, never trained."""


@dataclass(frozen=True, slots=True)
class RewardProfile:
    """How a verifier's number becomes the reward: ``scale * raw + offset``, with ``raw`` inside ``raw_range``."""

    key: str = "reward"
    scale: float = 1.0
    offset: float = 0.0
    raw_range: tuple[float, float] = (0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Receipt:
    """The evidence for a reward: the verifier's own bytes and their digest.

    Attributes:
        file: name of the file the number was read from, ``reward.json`` or ``reward.txt``.
        content: that file's bytes, as text.
        sha256: hex digest of those bytes.
        raw: the number the verifier wrote.
        reward: ``scale * raw + offset``.
        tampered: what the harness did that may have swayed the verifier, a line each.
    """

    file: str
    content: str
    sha256: str
    raw: float
    reward: float
    tampered: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Task:
    """One Harbor-format task directory, as pinned by the catalog.

    Attributes:
        task_id: name, unique within the catalog.
        path: absolute path of the task directory.
        digest: ``sha256:<hex>`` over the directory's content (see ``agents.tasks``).
        instruction: the text handed to the harness.
        agent_timeout_s: seconds the harness may run; None means the configuration's default.
        verifier_timeout_s: seconds ``tests/test.sh`` may run.
        workdir: absolute directory inside the sandbox in which harness and verifier start.
        env: environment variables of the task's environment.
        profile: how the verifier's number becomes a reward.
        metadata: the free ``[metadata]`` table of ``task.toml``.
        revision: the catalog's own name for this state of the task, if it gives one.
    """

    task_id: str
    path: Path
    digest: str
    instruction: str
    agent_timeout_s: float | None = None
    verifier_timeout_s: float = 600.0
    workdir: str = "/app"
    env: Mapping[str, str] = field(default_factory=dict)
    profile: RewardProfile = RewardProfile()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    revision: str | None = None


class Split(StrEnum):
    """What a rollout is for."""

    TRAIN = "train"
    EVAL = "eval"


class RolloutState(StrEnum):
    """``queued → running → verifying → done | failed | cancelled``."""

    QUEUED = "queued"
    RUNNING = "running"
    VERIFYING = "verifying"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class FailureClass(StrEnum):
    """Whose fault a failed rollout is.

    INFRASTRUCTURE: retried, then excluded from baseline, count and loss. AGENT: its reward counts.
    """

    INFRASTRUCTURE = "infrastructure"
    AGENT = "agent"


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one task that share a baseline.

    Attributes:
        step: that learns from them, None until one does; of held-out rollouts, after which they were sampled.
    """

    group_id: str
    step: int | None
    task_id: str
    split: Split


@dataclass(frozen=True, slots=True)
class Rollout:
    """One attempt of one task by one harness.

    Attributes:
        index: place in the group, 0-based.
        attempt: 0 for the first try, +1 for each retry after an infrastructure failure.
        temperature: sampling temperature of this rollout's calls (0 is greedy).
        reward: set when ``done``, and when ``failed`` by the agent's fault.
        failure_class, failure: set when ``failed``; ``failure`` is a short kind followed by its evidence.
        ending: how the harness ended: ``exited 0``, ``exited 3``, ``timed out``; empty while it runs.
    """

    rollout_id: str
    group_id: str
    task_id: str
    split: Split
    index: int
    attempt: int = 0
    temperature: float = 1.0
    state: RolloutState = RolloutState.QUEUED
    reward: float | None = None
    receipt: Receipt | None = None
    failure_class: FailureClass | None = None
    failure: str = ""
    ending: str = ""
    started_at: float = 0.0
    ended_at: float = 0.0

    @property
    def valid(self) -> bool:
        """Whether the reward counts in baseline and loss."""
        return self.reward is not None and self.state in (RolloutState.DONE, RolloutState.FAILED)


class Cause(StrEnum):
    """Why a call's tokens start where they do (recorded per call, shown to users)."""

    EXTENDED = "extended"
    NEW_SESSION = "new session"
    HISTORY_REWRITTEN = "history rewritten"
    TEMPLATE_DROPPED_THINKING = "template dropped thinking"
    TOOLS_CHANGED = "tools changed"
    TEXT_CHANGED = "template changed text"


class Role(IntEnum):
    """What a sampled token says of a tool call: which tool, the values of its arguments, or anything else."""

    OTHER = 0
    ACTION = 1
    ARGUMENTS = 2


@dataclass(frozen=True, slots=True)
class Call:
    """One model call.

    Attributes:
        index: place among the rollout's calls, in order of arrival.
        agent: role inside the harness that made the call.
        dialect: ``chat``, ...
        request: the request body as received.
        reply: the reply as one (non-streamed) JSON object of the dialect.
        prompt_ids: (P,) int32, exactly what the engine saw.
        completion_ids: (C,) int32, exactly what it sampled, the stop token included.
        logprobs: (C,) float32, the sampler's, at the call's own temperature over the full vocabulary.
        versions: (C,) int32, the policy version that sampled each token.
        temperature: sampling temperature; 0 is greedy.
        finish_reason: ``stop``, ``length``, ``tool_calls`` or ``cancelled``.
        parent_id: the recorded call whose tokens this one continues, if any.
        inherited: how many of ``prompt_ids`` are that call's prompt and completion; 0 without one.
        cause: why it continues them, or why not.
        delivered: whether the reply reached the harness; only delivered calls are trainable.
        train: whether the agent that made the call is trained.
        roles: (C,) uint8, the ``Role`` of each token; None where the reply has no tool call or they are not known.
        tools_valid: whether every tool call of the reply is well-formed and of a declared tool; None where it has none.
        tools_failed: whether a tool result that the request brings says that the tool failed; None where it brings
            none.
    """

    call_id: str
    rollout_id: str
    index: int
    agent: str
    dialect: str
    request: Mapping[str, Any]
    reply: Mapping[str, Any]
    prompt_ids: IntArray
    completion_ids: IntArray
    logprobs: FloatArray
    versions: IntArray
    temperature: float
    policy: str
    finish_reason: str
    cause: Cause
    parent_id: str | None = None
    inherited: int = 0
    delivered: bool = True
    train: bool = True
    started_at: float = 0.0
    ended_at: float = 0.0
    roles: RoleArray | None = None
    tools_valid: bool | None = None
    tools_failed: bool | None = None
