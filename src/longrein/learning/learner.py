"""Learners: what turns a batch of rewarded rollouts into new weights.

Invariant: an update either moves the weights by one optimizer step over the whole batch, or leaves weights and
optimizer as they were and says why.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from longrein.config import AlgorithmSection, LearnerSection
from longrein.engines.weights import load_module
from longrein.errors import LearnerError
from longrein.forest.packing import MicroBatch, pack, total_tokens
from longrein.forest.targets import Harvest, harvest
from longrein.learning import stored
from longrein.learning.adapters import attach, plain_weights, without
from longrein.learning.algorithms import Algorithm, resolve
from longrein.learning.attention import check_model, use_forest_attention
from longrein.learning.credit import Credit, assign
from longrein.learning.passes import ForestPass, Tally
from longrein.learning.precision import choose_precision, thread_count, threads
from longrein.records import Call

if TYPE_CHECKING:
    from peft import PeftModel


@dataclass(frozen=True, slots=True)
class TrainRollout:
    """A valid rollout: its reward and all its calls, delivered or not."""

    rollout_id: str
    reward: float
    calls: tuple[Call, ...]


@dataclass(frozen=True, slots=True)
class TrainGroup:
    """The valid rollouts that share a baseline."""

    group_id: str
    rollouts: tuple[TrainRollout, ...]


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """What one update learns from."""

    groups: tuple[TrainGroup, ...]


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """What an update did. Means, shares and differences are over the targets computed.

    Attributes:
        learned: whether the weights moved.
        why_not: if they did not, why.
        loss: the weighted sum.
        grad_norm: before clipping.
        tokens_trained: targets in the loss, those without advantage included.
        tokens_flat: tokens of all trainable calls with nothing shared.
        tokens_forest: distinct tokens among them.
        tokens_computed: tokens computed: without what no credited target needs, with what was computed twice.
        micro_batches: passes they took.
        logprob_difference_mean, _p99, _max: |learner - sampler| log-probability.
        ratio_outside: share of targets whose learner/sampler ratio lies outside 0.8 to 1.2.
        importance_cut: share whose importance weight was truncated.
        clip_fraction: share whose ratio was clipped.
        entropy: mean of -log p of the sampled tokens, an estimate in nats.
        kl: mean k3 estimate against the reference; 0 where there is none.
        seconds_learning: of this update.
    """

    learned: bool
    why_not: str
    loss: float
    grad_norm: float
    learning_rate: float
    tokens_trained: int
    tokens_flat: int
    tokens_forest: int
    tokens_computed: int
    micro_batches: int
    groups: int
    groups_with_contrast: int
    logprob_difference_mean: float
    logprob_difference_p99: float
    logprob_difference_max: float
    ratio_outside: float
    importance_cut: float
    clip_fraction: float
    entropy: float
    kl: float
    seconds_learning: float


Progress = Callable[[int, int], None]
"""Called after each micro-batch with how many are done, and of how many."""

Cancelled = Callable[[], bool]
"""Asked between micro-batches whether to stop."""


class Learner(Protocol):
    """Updates weights. Every method computes, so it is called on the compute thread."""

    def update(
        self, batch: TrainBatch, progress: Progress | None = None, cancelled: Cancelled | None = None
    ) -> UpdateReport:
        """One step over a batch.

        Raises:
            LearnerError: the batch is malformed, or the update was cancelled; nothing has changed then.
        """
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """Parameter names of the plain transformers module → tensors, to be read before the next update."""
        ...

    def save(self, directory: Path) -> None:
        """Write weights and optimizer into an existing directory."""
        ...

    def load(self, directory: Path) -> None:
        """Go on from what ``save`` wrote.

        Raises:
            LearnerError: the directory was written for another model or another kind of training.
        """
        ...


class EmbeddedLearner:
    """A ``Learner`` in this process: float32 weights, autocast where that is faster, AdamW.

    Args:
        module: float32, on its device.
        source: the directory it was loaded from; its tokenizer is copied into what is saved.

    Raises:
        LearnerError: the model cannot be trained exactly over a forest, or the configuration contradicts itself.
    """

    def __init__(
        self, module: PreTrainedModel, config: LearnerSection, algorithm: Algorithm, source: Path | None = None
    ) -> None:
        if algorithm.kl_coefficient and config.lora is None:
            raise LearnerError(
                f"algorithm.kl_coefficient is {algorithm.kl_coefficient}, which needs learner.lora: the reference is "
                "the model without its adapters. Set it to 0, or train adapters."
            )
        use_forest_attention(module)
        check_model(module)
        module.eval()
        self.module = module
        self._adapted: PeftModel | None = attach(module, config.lora) if config.lora else None
        self._config = config
        self._algorithm = algorithm
        self._source = source
        self._threads = thread_count(config.threads)
        with threads(self._threads):
            self.precision = choose_precision(module, config.precision)
        self._trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._trained,
            lr=config.learning_rate,
            betas=(config.betas[0], config.betas[1]),
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.updates = 0

    @classmethod
    def open(cls, directory: Path, config: LearnerSection, algorithm: AlgorithmSection) -> "EmbeddedLearner":
        """Load the model in a directory and make it trainable, on the first GPU if there is one."""
        module = load_module(directory, torch.float32)
        if torch.cuda.is_available():
            module.to("cuda")
        return cls(module, config, resolve(algorithm), directory)

    def describe(self) -> str:
        """One line for people."""
        trained = sum(parameter.numel() for parameter in self._trained)
        kind = f"LoRA of rank {self._config.lora.rank}" if self._config.lora else "all weights"
        name = str(self.precision).removeprefix("torch.")
        return f"learner in {name}, {self._threads} threads, {kind} ({trained / 1e6:.1f} M trained)"

    def update(
        self, batch: TrainBatch, progress: Progress | None = None, cancelled: Cancelled | None = None
    ) -> UpdateReport:
        """One step over a batch; see ``Learner``."""
        began = time.monotonic()
        rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
        merged = harvest([rollout.calls for rollout in rollouts])
        rewards = [[rollout.reward for rollout in group.rollouts] for group in batch.groups]
        credit = assign(rewards, merged.targets.rollout, self._algorithm)
        parts = pack(merged.forest, merged.targets.row, credit.credited, self._config.micro_batch_tokens)
        tally = Tally()
        rate = self._learning_rate()
        try:
            with threads(self._threads):
                self._accumulate(parts, merged, credit, tally, progress, cancelled)
                norm, why_not = self._step(tally, rate) if parts else (0.0, _nothing_to_learn(rewards, merged, credit))
        finally:
            self._optimizer.zero_grad(set_to_none=True)
        return _report(why_not, norm, rate, merged, credit, parts, tally, self._algorithm, time.monotonic() - began)

    def weights(self) -> Mapping[str, Tensor]:
        """All weights, adapters merged; see ``Learner``."""
        return plain_weights(self.module)

    def save(self, directory: Path) -> None:
        """Write ``model.safetensors`` as transformers loads it (and ``adapter/``), ``optimizer.pt``, the tokenizer."""
        stored.save_weights(directory, self.module, self.weights())
        if self._adapted is not None:
            stored.save_adapter(directory, self._adapted)
        stored.save_optimizer(directory, self._optimizer, self.updates)
        if self._source is not None:
            stored.copy_tokenizer(self._source, directory)

    def load(self, directory: Path) -> None:
        """Go on from what ``save`` wrote; see ``Learner``."""
        if self._adapted is not None:
            stored.load_adapter(directory, self._adapted)
        else:
            stored.load_weights(directory, self.module)
        self.updates = stored.load_optimizer(directory, self._optimizer)

    def _learning_rate(self) -> float:
        """Linear warm-up over the first updates."""
        share = (self.updates + 1) / self._config.warmup_steps if self._config.warmup_steps else 1.0
        return self._config.learning_rate * min(1.0, share)

    def _accumulate(
        self,
        parts: list[MicroBatch],
        merged: Harvest,
        credit: Credit,
        tally: Tally,
        progress: Progress | None,
        cancelled: Cancelled | None,
    ) -> None:
        work = ForestPass(
            self.module, self.precision, self._algorithm, merged.targets, credit, lambda: without(self._adapted)
        )
        for done, part in enumerate(parts):
            if cancelled is not None and cancelled():
                raise LearnerError(f"the update was cancelled after {done} of {len(parts)} micro-batches.")
            work.accumulate(part, tally)
            if progress is not None:
                progress(done + 1, len(parts))
        if cancelled is not None and cancelled():
            raise LearnerError("the update was cancelled before its step.")

    def _step(self, tally: Tally, rate: float) -> tuple[float, str]:
        """Clip and step; (gradient norm, why no step was taken)."""
        norm = float(torch.nn.utils.clip_grad_norm_(self._trained, self._config.grad_clip))
        if not math.isfinite(norm) or not math.isfinite(tally.loss):
            return norm, f"loss {tally.loss} or gradient norm {norm} is not finite; the weights were left as they were"
        if norm == 0.0:
            return norm, "the gradient is zero"
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self.updates += 1
        return norm, ""


def _nothing_to_learn(rewards: list[list[float]], merged: Harvest, credit: Credit) -> str:
    if not rewards:
        return "no group reached its quorum of rollouts with a reward"
    if not len(merged.targets):
        return "no trainable token: no call was delivered, or nothing was sampled"
    if not credit.groups_with_contrast:
        return f"no contrast: within each of the {credit.groups} groups all rewards are equal{_all_alike(rewards)}"
    return "the rollouts that differ from their group have no trainable token"


def _all_alike(rewards: list[list[float]]) -> str:
    """What to do where no group's rewards differ from another's either."""
    found = {reward for group in rewards for reward in group}
    if len(found) > 1:
        return ""
    return (
        f" (all are {found.pop():g}: give tasks that are sometimes solved, a reward for part of the way, or "
        "model.demonstrations)"
    )


def _report(
    why_not: str,
    norm: float,
    rate: float,
    merged: Harvest,
    credit: Credit,
    parts: list[MicroBatch],
    tally: Tally,
    algorithm: Algorithm,
    seconds: float,
) -> UpdateReport:
    learner, sampler = (np.concatenate([np.zeros(0), *side]) for side in (tally.learner, tally.sampler))
    # Statistics of nothing are zero.
    some = max(len(learner), 1)
    apart = np.abs(learner - sampler) if len(learner) else np.zeros(1)
    ratio = np.exp(learner - sampler)
    cut = algorithm.importance_cut
    return UpdateReport(
        learned=not why_not,
        why_not=why_not,
        loss=tally.loss,
        grad_norm=norm,
        learning_rate=rate,
        tokens_trained=len(merged.targets),
        tokens_flat=merged.tokens_flat,
        tokens_forest=len(merged.forest),
        tokens_computed=total_tokens(parts),
        micro_batches=len(parts),
        groups=credit.groups,
        groups_with_contrast=credit.groups_with_contrast,
        logprob_difference_mean=float(apart.mean()),
        logprob_difference_p99=float(np.quantile(apart, 0.99, method="higher")),
        logprob_difference_max=float(apart.max()),
        ratio_outside=float(((ratio < 0.8) | (ratio > 1.2)).sum() / some),
        importance_cut=float((ratio > cut).sum() / some) if cut is not None else 0.0,
        clip_fraction=tally.clipped / some,
        entropy=float(-learner.sum() / some),
        kl=tally.kl / some,
        seconds_learning=seconds,
    )
