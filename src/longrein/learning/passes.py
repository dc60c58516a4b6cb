"""One micro-batch forward and backward: hidden states of the packed forest, the head at target rows only and a few
rows at a time, and the gradient of the weighted loss added to the parameters.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from longrein.config import AlgorithmSection
from longrein.forest.packing import MicroBatch
from longrein.forest.targets import Targets
from longrein.learning.backend import Backend
from longrein.learning.credit import Credit
from longrein.learning.importance import bounded
from longrein.learning.logprobs import row_entropies, token_logprobs
from longrein.learning.losses import token_losses

# Logits held at once; bounds the memory of the head.
CHUNK_LOGITS = 1 << 24

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Before:
    """What is known of each of T targets before the gradient is taken; None where the pass itself finds it.

    Attributes:
        old: (T,) log-probability that each token's ratio is taken against; None where current is old.
        log_ratio: (T,) log(current/old) over more than one token, instead of ``old``.
        importance: (T,) weight proximal/behaviour; None where proximal is current and each token has its own.
    """

    old: Values | None = None
    log_ratio: Values | None = None
    importance: Values | None = None


@dataclass(slots=True)
class Tally:
    """What the passes of one update measured, an array per chunk of targets.

    Attributes:
        loss: the weighted sum so far.
        target: indices into the batch's targets.
        logprob: the learner's, at the time of the pass.
        clipped_low, clipped_high: where the surrogate met a bound.
        kl: estimates against the reference.
    """

    loss: float = 0.0
    target: list[NDArray[np.int64]] = field(default_factory=list)
    logprob: list[Values] = field(default_factory=list)
    clipped_low: list[NDArray[np.bool_]] = field(default_factory=list)
    clipped_high: list[NDArray[np.bool_]] = field(default_factory=list)
    kl: list[Values] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Some rows of the head with the targets they predict.

    Attributes:
        rows: which of the micro-batch's distinct (row, temperature) pairs, U of them.
        temperature: (U, 1).
        targets: (T,) indices into the micro-batch's targets.
        row: (T,) which of the U rows predicts each.
        token: (T,) what it is to predict.
    """

    rows: slice
    temperature: Tensor
    targets: NDArray[np.int64]
    row: Tensor
    token: Tensor


class ForestPass:
    """Computes micro-batches of one batch.

    Args:
        module: a transformers causal language model; its head is used here, its body by ``backend``.
        backend: computes hidden states over forests.
        precision: autocast dtype; the parameters' own dtype means no autocast.
        algorithm: the loss.
        targets, credit: of the whole batch.
        reference: while entered, the module is the reference policy; needed for a KL term only.
        before: what is known of each target beforehand.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        backend: Backend,
        precision: torch.dtype,
        algorithm: AlgorithmSection,
        targets: Targets,
        credit: Credit,
        reference: Callable[[], AbstractContextManager[None]],
        before: Before = Before(),
    ) -> None:
        self._head = module.get_output_embeddings()
        self._backend = backend
        self._device = self._head.weight.device
        self._precision = precision
        self._autocasts = precision != self._head.weight.dtype
        self._algorithm = algorithm
        self._targets = targets
        self._credit = credit
        self._reference = reference
        self._before = before

    def accumulate(self, part: MicroBatch, tally: Tally) -> None:
        """Add a micro-batch's gradient to the parameters and its figures to ``tally``."""
        pairs, inverse = self._pairs(part)
        reference = self._reference_logprobs(part)

        def pull(ready: NDArray[np.int64], hidden: Tensor) -> Tensor:
            grads = torch.zeros_like(hidden)
            with self._autocast():
                for chunk in self._chunks(part, pairs, inverse, ready):
                    piece = hidden[chunk.rows].requires_grad_()
                    known = None if reference is None else reference[torch.from_numpy(chunk.targets)].to(self._device)
                    torch.autograd.backward(self._loss(piece, part, chunk, known, tally))
                    assert piece.grad is not None
                    grads[chunk.rows] = piece.grad
            return grads

        self._backend.accumulate(part.forest, pairs[:, 0].astype(np.int64), pull)

    @torch.no_grad()
    def logprobs(self, part: MicroBatch) -> Tensor:
        """The learner's log-probability of each target of a micro-batch (T,), without gradient."""
        pairs, inverse = self._pairs(part)
        hidden = self._backend.hidden(part.forest, pairs[:, 0].astype(np.int64))
        found = torch.zeros(len(part.targets), dtype=torch.promote_types(hidden.dtype, torch.float32))
        with self._autocast():
            for chunk in self._chunks(part, pairs, inverse, np.arange(len(pairs))):
                logprob = token_logprobs(self._logits(hidden[chunk.rows], chunk), chunk.row, chunk.token)
                found[torch.from_numpy(chunk.targets)] = logprob.cpu()
        return found

    def _reference_logprobs(self, part: MicroBatch) -> Tensor | None:
        if not self._algorithm.kl_coefficient:
            return None
        with self._reference():
            return self.logprobs(part)

    def _pairs(self, part: MicroBatch) -> tuple[Values, NDArray[np.int64]]:
        """The distinct (row, temperature) pairs (U, 2), and which of them predicts each target (T,)."""
        temperature = self._targets.temperature[part.targets]
        pairs, inverse = np.unique(np.stack([part.row, temperature], 1), axis=0, return_inverse=True)
        return pairs, inverse.reshape(-1)

    def _chunks(
        self, part: MicroBatch, pairs: Values, inverse: NDArray[np.int64], ready: NDArray[np.int64]
    ) -> Iterator[_Chunk]:
        """The pairs that are ready (K,), a few at a time; ``rows`` of a chunk are indices into ``ready``."""
        place = np.full(len(pairs), -1)
        place[ready] = np.arange(len(ready))
        step = max(16, CHUNK_LOGITS // self._head.weight.shape[0])
        for start in range(0, len(ready), step):
            own = place[inverse]
            chosen = np.flatnonzero((own >= start) & (own < start + step))
            token = self._targets.token[part.targets[chosen]].astype(np.int64)
            yield _Chunk(
                rows=slice(start, start + step),
                temperature=self._tensor(pairs[ready[start : start + step], 1:]),
                targets=chosen,
                row=self._tensor(own[chosen] - start),
                token=self._tensor(token),
            )

    def _logits(self, hidden: Tensor, chunk: _Chunk) -> Tensor:
        """(U, V), at each row's temperature, at least float32."""
        logits: Tensor = self._head(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return logits if bool((chunk.temperature == 1).all()) else logits / chunk.temperature.to(logits.dtype)

    def _loss(self, hidden: Tensor, part: MicroBatch, chunk: _Chunk, reference: Tensor | None, tally: Tally) -> Tensor:
        """The weighted loss of a chunk's targets."""
        batch = part.targets[chunk.targets]
        logits = self._logits(hidden, chunk)
        entropy = row_entropies(logits)[chunk.row] if self._algorithm.entropy_coefficient else None
        logprob = token_logprobs(logits, chunk.row, chunk.token)
        current = logprob.detach().double().cpu().numpy()
        losses = token_losses(
            self._algorithm,
            logprob,
            self._tensor(self._log_ratio(batch, current)).to(logprob.dtype),
            self._tensor(self._credit.advantage[batch]).to(logprob.dtype),
            self._tensor(self._importance(batch, current)).to(logprob.dtype),
            reference,
            entropy,
        )
        loss = (self._tensor(self._credit.weight[batch]).to(logprob.dtype) * losses.loss).sum()
        tally.loss += float(loss.detach())
        tally.target.append(batch)
        tally.logprob.append(current)
        tally.clipped_low.append(losses.clipped_low.cpu().numpy())
        tally.clipped_high.append(losses.clipped_high.cpu().numpy())
        tally.kl.append(losses.kl.double().cpu().numpy())
        return loss

    def _log_ratio(self, batch: NDArray[np.int64], current: Values) -> Values:
        if self._before.log_ratio is not None:
            return self._before.log_ratio[batch]
        return current - self._before.old[batch] if self._before.old is not None else np.zeros(len(batch))

    def _importance(self, batch: NDArray[np.int64], current: Values) -> Values:
        """(T,) known beforehand, or taken here, where proximal is current."""
        if self._before.importance is not None:
            return self._before.importance[batch]
        return bounded(self._algorithm, np.exp(current - self._targets.logprob[batch])).weight

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device.type, self._precision, enabled=self._autocasts)

    def _tensor(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)
