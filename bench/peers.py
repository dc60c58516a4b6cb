"""Our losses beside those of verl and TRL: the same random batch, loss and gradient in float64, written as a table.

Runs in an environment of its own under the user's cache directory, made when absent: there the peers are installed, and
longrein is read from this tree. verl comes without its dependencies, of which its losses need few. The table replaces
what stands between two markers in ``docs/algorithms.md``.
"""

import importlib
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from environments import environment
from torch import Tensor

from longrein.config import AlgorithmSection
from longrein.forest.targets import Targets
from longrein.learning.credit import assign
from longrein.learning.importance import importance_weights, over
from longrein.learning.losses import token_losses

VERL, TRL, TORCH = "0.9.1", "1.16.0", "2.13.0"
ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "algorithms.md"
BEGIN, END = "<!-- peers: written by bench/peers.py -->", "<!-- end of peers -->"
# torch comes first and alone: asked for through another package, pip may take a build several gigabytes larger.
INSTALLS = (
    [f"torch=={TORCH}"],
    ["--no-deps", f"verl=={VERL}"],
    [f"trl=={TRL}", "transformers", "pydantic", "ray", "tensordict", "omegaconf", "hydra-core", "codetiming", "orjson"],
)
HEADER = (
    "| preset | peer | differ by, as they come | loss, ours | theirs | differ by | accounted for |\n"
    "|---|---|---|---|---|---|---|"
)
GROUPS, ROLLOUTS, LONGEST = 3, 4, 6


@dataclass(frozen=True)
class Batch:
    """Rollouts as rows, padded; a row is all sampled tokens of a rollout.

    Attributes:
        rewards: (B,) float64.
        group: (B,) int64.
        mask: (B, L) float64, 1 for a token.
        logprob: (B, L) current, with gradient.
        proximal, behaviour, reference: (B, L).
    """

    rewards: Tensor
    group: np.ndarray
    mask: Tensor
    logprob: Tensor
    proximal: Tensor
    behaviour: Tensor
    reference: Tensor

    @property
    def rollouts(self) -> int:
        return len(self.rewards)

    @property
    def tokens(self) -> int:
        return int(self.mask.sum())


def make_batch(*, equal: bool = False, first_step: bool = False) -> Batch:
    """A seeded batch: rollouts of equal or different length, at the first step on it or at a later one."""
    random = np.random.default_rng(0)
    count = GROUPS * ROLLOUTS
    lengths = np.full(count, LONGEST) if equal else random.integers(1, LONGEST + 1, count)
    current = -random.exponential(1.5, (count, LONGEST)) - 0.05
    proximal = current if first_step else current + random.normal(0, 0.8, current.shape)
    return Batch(
        rewards=torch.from_numpy(random.choice([0.0, 0.25, 0.5, 1.0], count)),
        group=np.repeat(np.arange(GROUPS), ROLLOUTS),
        mask=torch.from_numpy((np.arange(LONGEST) < lengths[:, None]).astype(np.float64)),
        logprob=torch.tensor(current, requires_grad=True),
        proximal=torch.from_numpy(proximal),
        behaviour=torch.from_numpy((proximal + random.normal(0, 0.4, current.shape)).astype(np.float32).astype(float)),
        reference=torch.from_numpy(current + random.normal(0, 0.2, current.shape)),
    )


def ours(batch: Batch, algorithm: AlgorithmSection) -> Tensor:
    """The loss, as the learner puts it together from its parts."""
    chosen = batch.mask.bool()
    rollout = torch.nonzero(chosen)[:, 0].numpy().astype(np.int32)
    count = len(rollout)
    targets = Targets(
        row=np.zeros(count, np.int64),
        token=np.zeros(count, np.int32),
        rollout=rollout,
        call=rollout,
        agent=np.zeros(count, np.int32),
        logprob=batch.behaviour[chosen].numpy().astype(np.float32),
        version=np.zeros(count, np.int32),
        temperature=np.ones(count, np.float32),
        role=np.zeros(count, np.uint8),
    )
    rewards = [batch.rewards[torch.from_numpy(batch.group == number)].tolist() for number in range(GROUPS)]
    credit = assign(rewards, targets, algorithm)
    current, proximal = batch.logprob[chosen], batch.proximal[chosen].numpy()
    apart = over(algorithm.ratio_level, targets, current.detach().numpy() - proximal, mean=True)
    losses = token_losses(
        algorithm,
        current,
        torch.from_numpy(apart),
        torch.from_numpy(credit.advantage),
        torch.from_numpy(importance_weights(algorithm, targets, proximal).weight),
        batch.reference[chosen],
    )
    return (torch.from_numpy(credit.weight) * losses.loss).sum()


# verl


def core() -> Any:
    return importlib.import_module("verl.trainer.ppo.core_algos")


@dataclass(frozen=True)
class Verl:
    """A preset in verl's terms.

    Attributes:
        advantage: name of the estimator's function.
        policy: name of the loss.
        aggregation: verl's ``loss_agg_mode``.
        actor: settings of its actor that belong to the algorithm.
        keys: of the estimator.
        whitened: whether advantages are whitened over tokens.
        kl: coefficient and estimator of a KL term.
    """

    advantage: str
    policy: str
    aggregation: str
    actor: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, Any] = field(default_factory=dict)
    whitened: bool = False
    kl: tuple[float, str] | None = None

    def __call__(self, batch: Batch, accounted: bool) -> Tensor:
        """Its loss with its own defaults, or with what is stated taken out."""
        dual = {"clip_ratio_c": 1e9} if accounted else {}
        actor = importlib.import_module("verl.workers.config").ActorConfig(
            strategy="fsdp", rollout_n=ROLLOUTS, ppo_micro_batch_size_per_gpu=1, **{**dual, **self.actor}
        )
        if self.aggregation == "seq-mean-token-sum-norm":
            actor.global_batch_info["loss_scale_factor"] = 1024
        advantages = self._advantages(batch, accounted)
        arguments = (batch.proximal, batch.logprob, advantages, batch.mask, self.aggregation, actor, _weights(batch))
        policy = core().compute_policy_loss_reinforce if self.policy == "reinforce" else _policy(self.policy)
        loss: Tensor = policy(*arguments)[0]
        if self.kl is not None:
            coefficient, estimator = self.kl
            estimate = core().kl_penalty(batch.logprob, batch.reference, estimator)
            loss = loss + coefficient * core().agg_loss(estimate, batch.mask, self.aggregation)
        return loss

    def _advantages(self, batch: Batch, accounted: bool) -> Tensor:
        rewards = torch.zeros_like(batch.mask)
        rewards[torch.arange(batch.rollouts), batch.mask.sum(1).long() - 1] = batch.rewards
        if not self.advantage:
            return batch.rewards[:, None] * batch.mask
        keys = dict(self.keys)
        if accounted and self.advantage == "grpo":
            keys["epsilon"] = 0.0
        if self.advantage == "reinforce_plus_plus":
            keys["config"] = SimpleNamespace(gamma=1.0)
        else:
            keys["index"] = batch.group
        function = getattr(core(), f"compute_{self.advantage}_outcome_advantage")
        advantages: Tensor = function(token_level_rewards=rewards, response_mask=batch.mask, **keys)[0]
        return advantages * _bessel(batch) if accounted and self.whitened else advantages


def _policy(name: str) -> Callable[..., tuple[Tensor, Any]]:
    found: Callable[..., tuple[Tensor, Any]] = core().get_policy_loss_fn(name)
    return found


def _weights(batch: Batch) -> Tensor:
    """verl's own truncated importance weights, token by token, at its threshold of 2."""
    helper = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
    weights: Tensor = helper.compute_rollout_correction_weights(batch.proximal - batch.behaviour, batch.mask)[0]
    return weights


def _bessel(batch: Batch) -> float:
    """From a deviation over all tokens to one over rollouts, where all are equally long."""
    tokens, rollouts = batch.tokens, batch.rollouts
    return float(np.sqrt((tokens / (tokens - 1)) / (rollouts / (rollouts - 1))))


# TRL


@dataclass(frozen=True)
class Trl:
    """A preset in TRL's terms: settings of its GRPO trainer. Its advantages are part of its sampling, so their formula
    stands here; its loss is its own.
    """

    settings: Mapping[str, Any]
    scaled: bool = True

    def __call__(self, batch: Batch, accounted: bool) -> Tensor:
        epsilon = 0.0 if accounted else 1e-4
        trainer = _trainer("GRPOTrainer", batch, {"beta": 0.0, "epsilon_high": 0.2, **self.settings})
        grouped = batch.rewards.view(GROUPS, ROLLOUTS)
        advantages = grouped - grouped.mean(1, keepdim=True)
        if self.scaled:
            advantages = advantages / (grouped.std(1, keepdim=True) + epsilon)
        loss: Tensor = trainer._compute_loss(
            None,
            {
                **_inputs(batch),
                "advantages": advantages.flatten(),
                "old_per_token_logps": batch.proximal,
                "ref_per_token_logps": batch.reference,
                "importance_sampling_ratio": (batch.proximal - batch.behaviour).exp().clamp(max=2.0),
                "num_items_in_batch": batch.mask.sum(),
            },
        )
        return loss


def trl_rloo(batch: Batch, accounted: bool) -> Tensor:
    trainer = _trainer("RLOOTrainer", batch, {"epsilon_high": 0.2})
    grouped = batch.rewards.view(GROUPS, ROLLOUTS)
    baselines = (grouped.sum(1, keepdim=True) - grouped) / (ROLLOUTS - 1)
    old = (batch.proximal * batch.mask).sum(1)
    advantages = (grouped - baselines).flatten()
    loss: Tensor = trainer._compute_loss(None, {**_inputs(batch), "advantages": advantages, "old_logps": old})
    return loss / 1024 if accounted else loss


def _trainer(name: str, batch: Batch, settings: Mapping[str, Any]) -> Any:
    """A trainer of that class with nothing but what its loss reads; the log-probabilities are the batch's."""
    kind: Any = getattr(importlib.import_module("trl"), name)
    entropies = torch.zeros_like(batch.mask)

    class Bare(kind):  # type: ignore[misc]
        def __init__(self) -> None:
            pass

        def _get_per_token_logps_and_entropies(self, *arguments: Any, **keys: Any) -> tuple[Tensor, Tensor, None]:
            return batch.logprob, entropies, None

    trainer = Bare()
    plain = {"delta": None, "use_bias_correction_kl": False, "steps_per_generation": 1}
    for key, value in {
        "args": SimpleNamespace(**plain),
        "accelerator": SimpleNamespace(gather=same, gather_for_metrics=same, reduce=same, num_processes=1),
        "model": SimpleNamespace(training=True),
        "_metrics": {"train": defaultdict(list)},
        "current_gradient_accumulation_steps": 1,
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "use_vllm": True,
        "vllm_importance_sampling_correction": True,
        "importance_sampling_level": "token",
        "max_completion_length": 1024,
        "_entropy_bonus_enabled": False,
        "epsilon_low": 0.2,
        **settings,
    }.items():
        setattr(trainer, key, value)
    return trainer


def same(value: Any, **_: Any) -> Any:
    """Of one process, what is gathered from all."""
    return value


def _inputs(batch: Batch) -> dict[str, Tensor]:
    ids = torch.zeros_like(batch.mask, dtype=torch.int64)
    return {
        "prompt_ids": ids[:, :1],
        "prompt_mask": batch.mask[:, :1],
        "completion_ids": ids,
        "completion_mask": batch.mask,
    }


@dataclass(frozen=True)
class Case:
    """A row of the table.

    Attributes:
        preset, keys: ours.
        peer: what the row calls it.
        theirs: its loss of a batch, as it comes or with what is stated accounted for.
        accounted: what that is.
        shape: of the batch on which it is accounted for.
        comparable: whether the value of the loss is, too, or the gradient alone.
    """

    preset: str
    peer: str
    theirs: Callable[[Batch, bool], Tensor]
    accounted: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    shape: Mapping[str, bool] = field(default_factory=dict)
    comparable: bool = True


DUAL = "dual clip at 3"
STD = "ε 1e-6 beside the deviation"
# verl's mean over a sequence's tokens divides by their number and 1e-8.
MEAN = "(ε 1e-8 beside the number of tokens is left)"
LENGTH = "divided by 1024"
WHITENED = (
    "mean and deviation weigh rollouts by their tokens and count tokens in n - 1 (here: rollouts of one length, times "
    f"the known factor); {DUAL} (ε 1e-8 beside the variance is left)"
)
HIGHER = {"clip_ratio_high": 0.28}
KL = {"kl_coefficient": 0.04}
SEQUENCE = {
    "loss_type": "grpo",
    "importance_sampling_level": "sequence",
    "epsilon_low": 3e-4,
    "epsilon_high": 4e-4,
}

CASES = (
    Case("grpo", "verl, vanilla", Verl("grpo", "vanilla", "seq-mean-token-mean"), f"{STD}; {DUAL} {MEAN}"),
    Case(
        "grpo",
        "verl, vanilla",
        Verl("grpo", "vanilla", "seq-mean-token-mean", {"clip_ratio_c": 3.0}),
        f"{STD} {MEAN}; `dual_clip: 3`",
        {"dual_clip": 3.0},
    ),
    Case("grpo", "TRL, grpo", Trl({"loss_type": "grpo"}), "ε 1e-4 beside the deviation"),
    Case(
        "grpo",
        "verl, vanilla, k3",
        Verl("grpo", "vanilla", "seq-mean-token-mean", kl=(0.04, "low_var_kl")),
        f"{STD}; {DUAL} {MEAN}",
        KL,
    ),
    Case("grpo", "TRL, grpo, β", Trl({"loss_type": "grpo", "beta": 0.04}), "ε 1e-4 beside the deviation", KL),
    Case("dapo", "verl, vanilla", Verl("grpo", "vanilla", "token-mean", HIGHER), f"{STD}; {DUAL}"),
    Case("dapo", "TRL, dapo", Trl({"loss_type": "dapo", "epsilon_high": 0.28}), "ε 1e-4 beside the deviation"),
    Case(
        "dr_grpo",
        "verl, vanilla",
        Verl("grpo", "vanilla", "seq-mean-token-sum-norm", keys={"norm_adv_by_std_in_grpo": False}),
        DUAL,
    ),
    Case("dr_grpo", "TRL, dr_grpo", Trl({"loss_type": "dr_grpo"}, scaled=False), "-"),
    Case("rloo", "verl, reinforce", Verl("rloo", "reinforce", "seq-mean-token-sum-norm"), "-"),
    Case(
        "rloo",
        "TRL, RLOO",
        trl_rloo,
        f"{LENGTH}; no correction for the sampler; a clipped ratio of the whole sequence, not its log-probability, so "
        "the loss is another and the gradient the same at the first step alone (taken there)",
        {"importance": "none"},
        {"first_step": True},
        comparable=False,
    ),
    Case(
        "reinforce_plus_plus",
        "verl, vanilla",
        Verl("reinforce_plus_plus", "vanilla", "token-mean", whitened=True),
        WHITENED,
        shape={"equal": True},
    ),
    Case(
        "reinforce_plus_plus_baseline",
        "verl, vanilla",
        Verl("reinforce_plus_plus_baseline", "vanilla", "token-mean", whitened=True),
        WHITENED,
        shape={"equal": True},
    ),
    Case(
        "gspo",
        "verl, gspo",
        Verl("grpo", "gspo", "seq-mean-token-mean", {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}),
        f"{STD} {MEAN}; `importance_level: token`",
        {"importance_level": "token"},
    ),
    Case(
        "gspo",
        "TRL, grpo by sequence",
        Trl(SEQUENCE),
        "ε 1e-4 beside the deviation; `importance_level: token`. What is left: its ratio's gradient is the sequence's "
        "(GSPO, Eq. 5), so that each token is pulled by the mean of the sampler's corrections, not by its own (Eq. 14)",
        {"importance_level": "token"},
    ),
    Case(
        "gspo",
        "TRL, grpo by sequence",
        Trl({**SEQUENCE, "use_vllm": False}),
        "ε 1e-4 beside the deviation; `importance: none`",
        {"importance": "none"},
    ),
    Case(
        "cispo",
        "verl, cispo",
        Verl("grpo", "cispo", "token-mean", {"clip_ratio_low": 1.0, "clip_ratio_high": 0.28}),
        STD,
    ),
    Case(
        "cispo",
        "TRL, cispo",
        Trl({"loss_type": "cispo", "epsilon_high": 1.28}),
        "ε 1e-4 beside the deviation; its `epsilon_high` is the bound itself, 1.28",
    ),
    Case("policy_gradient", "verl, reinforce", Verl("", "reinforce", "seq-mean-token-sum-norm"), "-"),
)


def row(case: Case) -> str:
    algorithm = AlgorithmSection(name=case.preset, **case.keys)
    plain = make_batch()
    as_it_comes = _difference(ours(plain, algorithm), case.theirs(plain, False), plain, case.comparable)
    batch = make_batch(**case.shape)
    mine, theirs = ours(batch, algorithm), case.theirs(batch, True)
    numbers = f"{mine.item():.9f} | {theirs.item():.9f} | {_difference(mine, theirs, batch, case.comparable)}"
    return f"| `{case.preset}` | {case.peer} | {as_it_comes} | {numbers} | {case.accounted} |"


def _difference(mine: Tensor, theirs: Tensor, batch: Batch, comparable: bool) -> str:
    """Of loss and gradient, relative to theirs."""
    one, other = (torch.autograd.grad(loss, batch.logprob)[0] for loss in (mine, theirs))
    value = f"{abs((mine - theirs).item() / theirs.item()):.0e}" if comparable else "-"
    return f"{value} / {float((one - other).norm() / other.norm()):.0e}"


def table() -> str:
    versions = f"verl {VERL} (`verl.trainer.ppo.core_algos`), TRL {TRL}, torch {torch.__version__}"
    return "\n".join([f"{versions}.", "", HEADER, *map(row, CASES)])


def main() -> None:
    if "--inside" not in sys.argv:
        python = environment(f"verl-{VERL}-trl-{TRL}", INSTALLS, constrained=True) / "python"
        inside = [str(python), __file__, "--inside"]
        subprocess.run(inside, check=True, env={**os.environ, "PYTHONPATH": str(ROOT / "src")})
        return
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"{PAGE} lacks the markers {BEGIN!r} and {END!r} between which the table goes.")
    found = table()
    PAGE.write_text(f"{before}{BEGIN}\n{found}\n{END}{after}", encoding="utf-8")
    print(found)


if __name__ == "__main__":
    main()
