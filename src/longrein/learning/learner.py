"""Learners: what turns a batch of rewarded rollouts into new weights.

Invariant: an update makes the optimizer steps that the algorithm asks for, each from the whole of its share of the
batch, or stops before one of them and says why.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from longrein.config import AlgorithmSection, LearnerSection
from longrein.engines.weights import load_module
from longrein.errors import LearnerError
from longrein.forest.packing import pack
from longrein.learning import stored
from longrein.learning.adapters import attach, plain_weights, without
from longrein.learning.backend import Backend, Packed
from longrein.learning.batch import Cancelled, Objective, Progress, TrainBatch, Work, nothing_to_learn
from longrein.learning.capo import ADAPTERS, ROLES, Capo, Gradients
from longrein.learning.costs import Wanted, choose_backend
from longrein.learning.credit import Credit
from longrein.learning.figures import Figures, UpdateReport
from longrein.learning.importance import importance_weights, over
from longrein.learning.passes import Before, ForestPass, Tally
from longrein.learning.precision import checkpoint_activations, choose_precision, thread_count, threads
from longrein.learning.ranks import ALONE, Ranks
from longrein.learning.walk import Walk
from longrein.records import POLICY, Role

if TYPE_CHECKING:
    from peft import PeftModel


class Learner(Protocol):
    """Updates weights. Every method computes, so it is called on the compute thread."""

    @property
    def policies(self) -> Sequence[str]:
        """Names of what it trains."""
        ...

    def describe(self) -> str:
        """One line for people."""
        ...

    def update(
        self, batch: TrainBatch, progress: Progress | None = None, cancelled: Cancelled | None = None
    ) -> UpdateReport:
        """The optimizer steps of a batch.

        Raises:
            LearnerError: the batch is malformed, and nothing has changed; or the update was cancelled, and no step was
                made since.
        """
        ...

    def weights(self, policy: str) -> Mapping[str, Tensor]:
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

    def close(self) -> None:
        """End what it started."""
        ...


Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Body:
    """A module made ready to be trained over forests.

    Attributes:
        module: float32, on its device.
        adapted: the same with its adapters; None where all weights are trained.
        precision: autocast dtype.
        threads: torch threads of an update (CPU).
        source: the directory it was loaded from; its tokenizer is copied into what is saved.
        ranks: the processes that train it together.
    """

    module: PreTrainedModel
    adapted: "PeftModel | None"
    backend: Backend
    precision: torch.dtype
    threads: int
    source: Path | None = None
    ranks: Ranks = ALONE

    @classmethod
    def open(cls, directory: Path, config: LearnerSection, adapters: Sequence[str], ranks: Ranks = ALONE) -> "Body":
        """Load the model in a directory, on the current GPU if there is one.

        Raises:
            LearnerError: it cannot be trained exactly over a forest, or has no such layers to adapt.
        """
        module = load_module(directory, torch.float32)
        if torch.cuda.is_available():
            module.to("cuda")
        module.eval()
        count = thread_count(config.threads)
        with threads(count):
            precision = ranks.first(choose_precision(module, config.precision))
            adapted = attach(module, config.lora, adapters) if config.lora else None
            backend = choose_backend(module, precision, _forest(config))
        if config.activation_checkpointing:
            checkpoint_activations(module)
        ranks.shard(module)
        return cls(module, adapted, backend, precision, count, directory, ranks)

    def activate(self, adapters: Sequence[str]) -> None:
        """Compute with these adapters, and train them alone."""
        if self.adapted is not None and list(self.adapted.active_adapters) != list(adapters):
            self.adapted.base_model.set_adapter(list(adapters))


class EmbeddedLearner:
    """A ``Learner`` of one policy in this process: float32 weights, autocast where that is faster, AdamW.

    Args:
        adapters: of the body, which are this policy's.
        steps: training steps of the whole run, for the learning rate's schedule; None keeps the rate.

    Raises:
        LearnerError: the configuration contradicts itself.
    """

    policies = (POLICY,)

    def __init__(
        self,
        body: Body,
        config: LearnerSection,
        algorithm: AlgorithmSection,
        adapters: Sequence[str] = ("default",),
        steps: int | None = None,
    ) -> None:
        if algorithm.kl_coefficient and config.lora is None:
            raise LearnerError(
                f"algorithm.kl_coefficient is {algorithm.kl_coefficient}, which needs learner.lora: the reference is "
                "the model without its adapters. Set it to 0, or train adapters."
            )
        self._body = body
        self._ranks = body.ranks
        self._adapters = tuple(adapters)
        self._activate()
        self._capo = None
        if algorithm.capo is not None:
            self._capo = Capo(algorithm.capo, body.module, lora=config.lora is not None)
            if self._capo.mlp is not None and isinstance(body.backend, Walk):
                raise LearnerError(
                    "algorithm.capo.form: neurons is probed over packed forests; learner.forest is walk."
                )
        self._config = config
        self._algorithm = algorithm
        self._total = None if steps is None else steps * algorithm.updates
        self._trained = [parameter for parameter in body.module.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._ranks.groups(self._trained),
            lr=config.learning_rate,
            betas=(config.betas[0], config.betas[1]),
            weight_decay=0.0 if self._masks_decay else config.weight_decay,
            fused=True,
        )
        self.updates = 0

    @property
    def _masks_decay(self) -> bool:
        """Whether weight decay must leave a part of each parameter alone, which the optimizer's own does not."""
        return self._capo is not None and self._capo.mlp is not None

    @classmethod
    def open(
        cls,
        directory: Path,
        config: LearnerSection,
        algorithm: AlgorithmSection,
        steps: int | None = None,
        ranks: Ranks = ALONE,
    ) -> "EmbeddedLearner":
        """Load the model in a directory and make it trainable."""
        adapters = ("default",) if algorithm.capo is None else tuple(ADAPTERS.values())
        return cls(Body.open(directory, config, adapters, ranks), config, algorithm, adapters, steps)

    @property
    def module(self) -> PreTrainedModel:
        """What is trained."""
        return self._body.module

    @property
    def precision(self) -> torch.dtype:
        """Autocast dtype."""
        return self._body.precision

    def _activate(self) -> None:
        """Make the module this policy."""
        self._body.activate(self._adapters)

    def describe(self) -> str:
        """One line for people."""
        trained = sum(parameter.numel() for parameter in self._trained)
        kind = f"LoRA of rank {self._config.lora.rank}" if self._config.lora else "all weights"
        name = str(self.precision).removeprefix("torch.")
        return f"learner in {name}, {self._body.threads} threads, {kind} ({trained / 1e6:.1f} M trained)"

    def update(
        self, batch: TrainBatch, progress: Progress | None = None, cancelled: Cancelled | None = None
    ) -> UpdateReport:
        """The optimizer steps of a batch; see ``Learner``."""
        began = time.monotonic()
        self._activate()
        work = Work(batch, self._algorithm, self._config.micro_batch_tokens, progress, cancelled, self._capo)
        figures = Figures()
        proximal = None
        if not work.parts:
            figures.why_not = nothing_to_learn(batch, work)
        try:
            with threads(self._body.threads):
                if work.parts and self._capo is not None and self._capo.router is None:
                    figures.why_not = self._probe(self._capo, work)
                if work.parts and not figures.why_not:
                    proximal = self._steps(work, figures)
        finally:
            self._optimizer.zero_grad(set_to_none=True)
        figures.tally = self._ranks.merged(figures.tally)
        return figures.report(batch, work, self._algorithm, proximal, time.monotonic() - began)

    def weights(self, policy: str = POLICY) -> Mapping[str, Tensor]:
        """All weights, adapters merged; see ``Learner``."""
        self._activate()
        return self._ranks.whole(plain_weights(self.module))

    def save(self, directory: Path) -> None:
        """Write ``model.safetensors`` as transformers loads it (and ``adapter/``), ``optimizer.pt``, the tokenizer."""
        weights, state = self.weights(), self._ranks.optimizer_state(self._optimizer)
        adapters = {}
        if self._body.adapted is not None:
            adapters = {name: self._ranks.whole(stored.adapter(self._body.adapted, name)) for name in self._adapters}
        if not self._ranks.writes:
            return
        stored.save_weights(directory, self.module, weights)
        if self._body.adapted is not None:
            stored.save_adapters(directory, self._body.adapted, adapters)
        if self._capo is not None and self._capo.units is not None:
            stored.save_units(directory, self._capo.units)
        stored.save_optimizer(directory, state, self.updates)
        if self._body.source is not None:
            stored.copy_tokenizer(self._body.source, directory)

    def load(self, directory: Path) -> None:
        """Go on from what ``save`` wrote; see ``Learner``."""
        if self._body.adapted is not None:
            stored.load_adapters(directory, self._body.adapted, self._adapters, self._ranks)
        else:
            stored.load_weights(directory, self.module, self._ranks)
        if self._capo is not None and self._capo.mlp is not None:
            units = stored.load_units(directory, self._capo.mlp.shape)
            if units is not None:
                self._capo.use(units)
        self.updates = stored.load_optimizer(directory, self._optimizer, self._ranks)

    def close(self) -> None:
        """It started nothing; see ``Learner``."""

    def _learning_rate(self) -> float:
        """Of the next optimizer step: linear warm-up, then the schedule."""
        warmup, step = self._config.warmup_steps, self.updates
        if step < warmup:
            return self._config.learning_rate * (step + 1) / warmup
        if self._config.schedule == "constant" or self._total is None:
            return self._config.learning_rate
        done = min(1.0, (step - warmup) / max(self._total - warmup, 1))
        left = 1 - done if self._config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self._config.learning_rate * left

    def _steps(self, work: Work, figures: Figures) -> Values | None:
        """Every optimizer step; (T,) proximal log-probabilities, where they had to be known."""
        proximal = self._logprobs(work, work.needed) if self._needs_proximal() else None
        for step, objectives in enumerate(work.steps):
            if not any(objective.parts for objective in objectives):
                continue
            figures.why_not = "; ".join(_without_tokens(objectives)) or figures.why_not
            before = self._before(work, step, proximal)
            gradients: dict[Role, Gradients] = {}
            for objective in objectives:
                self._accumulate(work, objective, before, figures.tally)
                if self._capo is not None and self._capo.router is not None and objective.role is not None:
                    gradients[objective.role] = self._capo.router.take()
            if self._capo is not None and self._capo.router is not None:
                figures.roles.append(self._capo.router.route(gradients))
            if not self._step(figures):
                break
        return proximal

    def _probe(self, capo: Capo, work: Work) -> str:
        """Let CAPO choose its units, from the rollouts that did better than their groups; why not, if it cannot."""
        mlp, targets = capo.mlp, work.merged.targets
        assert mlp is not None, "adapters are routed from the beginning"
        activity = {role: np.zeros(mlp.shape) for role in ROLES}
        better = (work.credit.advantage > 0) & (work.credit.weight > 0)
        for role in ROLES:
            wanted = better & (targets.role == role)
            for part in pack(work.merged.forest, targets.row, wanted, self._config.micro_batch_tokens):
                rows, often = np.unique(part.row, return_counts=True)
                with mlp.watched(activity[role], torch.from_numpy(rows), torch.from_numpy(often)):
                    Packed(self.module, self.precision).hidden(part.forest, rows)
        tokens = {role: int((better & (targets.role == role)).sum()) for role in ROLES}
        return capo.probe(tokens, activity)

    def _needs_proximal(self) -> bool:
        """Whether the learner's log-probabilities must be known before the first gradient."""
        corrects = self._algorithm.importance != "none" and self._algorithm.importance_level != "token"
        return self._algorithm.updates > 1 or corrects

    def _before(self, work: Work, step: int, proximal: Values | None) -> Before:
        """What the loss of an optimizer step takes for given."""
        algorithm, targets = self._algorithm, work.merged.targets
        importance = None if proximal is None else importance_weights(algorithm, targets, proximal).weight
        old = proximal if step else None
        if algorithm.old_policy == "behaviour":
            old = targets.logprob.astype(np.float64)
        if old is None or algorithm.ratio_level == "token":
            return Before(old=old, importance=importance)
        apart = self._logprobs(work, work.needed) - old
        return Before(log_ratio=over(algorithm.ratio_level, targets, apart, mean=True), importance=importance)

    def _pass(self, work: Work, credit: Credit, before: Before) -> ForestPass:
        return ForestPass(
            self.module,
            self._body.backend,
            self.precision,
            self._algorithm,
            work.merged.targets,
            credit,
            lambda: without(self._body.adapted),
            before,
        )

    def _logprobs(self, work: Work, wanted: NDArray[np.bool_]) -> Values:
        """(T,) log-probabilities under the weights as they are; the sampler's for targets that are not wanted."""
        found = np.zeros(len(wanted))
        forward = self._pass(work, work.credit, Before())
        parts = pack(work.merged.forest, work.merged.targets.row, wanted, self._config.micro_batch_tokens)
        for slot in self._ranks.share(parts):
            work.check()
            found[slot.part.targets] = forward.logprobs(slot.part).double().numpy()
        return np.where(wanted, self._ranks.sum(found), work.merged.targets.logprob)

    def _accumulate(self, work: Work, objective: Objective, before: Before, tally: Tally) -> None:
        forest_pass = self._pass(work, objective.credit, before)
        for slot in self._ranks.share(objective.parts):
            work.check()
            forest_pass.accumulate(slot.part, tally)
            for _ in range(slot.together):
                work.advance()
        work.check()

    def _step(self, figures: Figures) -> bool:
        """Clip and step, or say why not; whether further steps may follow."""
        norm = self._ranks.clip(self._trained, self._config.grad_clip)
        figures.norms.append(norm)
        figures.rate = self._learning_rate()
        loss = float(self._ranks.sum(np.array([figures.tally.loss]))[0])
        finite = math.isfinite(norm) and math.isfinite(loss)
        if not finite:
            figures.why_not = f"loss {loss} or gradient norm {norm} is not finite; the weights were left as they were"
        elif norm == 0.0:
            # Every token of it clipped or rejected; the next mini-batch may have others.
            figures.why_not = "the gradient is zero"
        else:
            self._move(figures.rate)
            figures.steps += 1
        self._optimizer.zero_grad(set_to_none=True)
        return finite

    def _move(self, rate: float) -> None:
        """One step of the optimizer."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        if self._masks_decay and self._capo is not None and self._capo.router is not None:
            self._capo.router.decay(rate * self._config.weight_decay)
        self._optimizer.step()
        self.updates += 1


def _without_tokens(objectives: Sequence[Objective]) -> list[str]:
    """Which of CAPO's losses have nothing to be made of."""
    return [
        f"no {ADAPTERS[objective.role]} token has an advantage"
        for objective in objectives
        if objective.role is not None and not objective.parts
    ]


def _forest(config: LearnerSection) -> Wanted:
    """The back end to use. A walk hands state from node to node, which checkpointed layers do not keep."""
    if not config.activation_checkpointing:
        return config.forest
    if config.forest == "walk":
        raise LearnerError(
            "learner.activation_checkpointing goes with learner.forest: packed. A walk has the memory of one path "
            "already."
        )
    return "packed"
