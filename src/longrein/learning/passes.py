"""One micro-batch forward and backward: hidden states of the packed forest, the head at target rows only and a few
rows at a time, and the gradient of the weighted loss added to the parameters.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from longrein.forest.packing import MicroBatch
from longrein.forest.targets import Targets
from longrein.learning.algorithms import Algorithm
from longrein.learning.attention import ForestView
from longrein.learning.credit import Credit
from longrein.learning.logprobs import row_entropies, token_logprobs
from longrein.learning.losses import token_losses

# Logits held at once; bounds the memory of the head.
CHUNK_LOGITS = 1 << 24


@dataclass(slots=True)
class Tally:
    """What the passes of one update measured.

    Attributes:
        loss: the weighted sum so far.
        clipped, kl: sums over targets.
        learner, sampler: log-probabilities of the targets computed, an array per chunk.
    """

    loss: float = 0.0
    clipped: float = 0.0
    kl: float = 0.0
    learner: list[NDArray[np.float64]] = field(default_factory=list)
    sampler: list[NDArray[np.float64]] = field(default_factory=list)


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
        module: a transformers causal language model that computes its attention over forests.
        precision: autocast dtype; the parameters' own dtype means no autocast.
        algorithm: the loss.
        targets, credit: of the whole batch.
        reference: while entered, the module is the reference policy; needed for a KL term only.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        precision: torch.dtype,
        algorithm: Algorithm,
        targets: Targets,
        credit: Credit,
        reference: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._module = module
        self._head = module.get_output_embeddings()
        self._device = self._head.weight.device
        self._precision = precision
        self._autocasts = precision != self._head.weight.dtype
        self._algorithm = algorithm
        self._targets = targets
        self._credit = credit
        self._reference = reference

    def accumulate(self, part: MicroBatch, tally: Tally) -> None:
        """Add a micro-batch's gradient to the parameters and its figures to ``tally``."""
        rows, chunks = self._chunks(part)
        reference = self._reference_logprobs(part, rows, chunks)
        hidden = self._hidden(part, rows)
        pieces = []
        with self._autocast():
            for chunk in chunks:
                piece = hidden.detach()[chunk.rows].requires_grad_()
                known = None if reference is None else reference[torch.from_numpy(chunk.targets)].to(self._device)
                torch.autograd.backward(self._loss(piece, part, chunk, known, tally))
                pieces.append(piece.grad)
        torch.autograd.backward(hidden, torch.cat([grad for grad in pieces if grad is not None]))

    def logprobs(self, part: MicroBatch) -> Tensor:
        """The learner's log-probability of each target of a micro-batch (T,), without gradient."""
        rows, chunks = self._chunks(part)
        return self._logprobs(part, rows, chunks)

    @torch.no_grad()
    def _logprobs(self, part: MicroBatch, rows: Tensor, chunks: list[_Chunk]) -> Tensor:
        hidden = self._hidden(part, rows)
        found = torch.zeros(len(part.targets), dtype=torch.promote_types(hidden.dtype, torch.float32))
        with self._autocast():
            for chunk in chunks:
                logprob = token_logprobs(self._logits(hidden[chunk.rows], chunk), chunk.row, chunk.token)
                found[torch.from_numpy(chunk.targets)] = logprob.cpu()
        return found

    def _reference_logprobs(self, part: MicroBatch, rows: Tensor, chunks: list[_Chunk]) -> Tensor | None:
        if not self._algorithm.kl_coefficient:
            return None
        with self._reference():
            return self._logprobs(part, rows, chunks)

    def _chunks(self, part: MicroBatch) -> tuple[Tensor, list[_Chunk]]:
        """The packed token of each distinct (row, temperature) pair, and the chunks they are worked through in."""
        temperature = self._targets.temperature[part.targets]
        pairs, inverse = np.unique(np.stack([part.row, temperature], 1), axis=0, return_inverse=True)
        inverse = inverse.reshape(-1)
        step = max(16, CHUNK_LOGITS // self._head.weight.shape[0])
        chunks = []
        for start in range(0, len(pairs), step):
            chosen = np.flatnonzero((inverse >= start) & (inverse < start + step))
            token = self._targets.token[part.targets[chosen]].astype(np.int64)
            chunks.append(
                _Chunk(
                    rows=slice(start, start + step),
                    temperature=self._tensor(pairs[start : start + step, 1:]),
                    targets=chosen,
                    row=self._tensor(inverse[chosen] - start),
                    token=self._tensor(token),
                )
            )
        return self._tensor(pairs[:, 0].astype(np.int64)), chunks

    def _hidden(self, part: MicroBatch, rows: Tensor) -> Tensor:
        """Last hidden states (U, d) of some rows."""
        dtype = self._precision if self._autocasts else self._head.weight.dtype
        view = ForestView(part.forest, self._device, dtype)
        with self._autocast():
            states = self._module.base_model(
                input_ids=self._tensor(part.forest.tokens.astype(np.int64))[None],
                position_ids=self._tensor(part.forest.positions.astype(np.int64))[None],
                use_cache=False,
                forest=view,
            ).last_hidden_state
        picked: Tensor = states[0].index_select(0, rows)
        return picked

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
        # With one update per batch the policy has not moved when its ratio is taken: proximal is current.
        proximal = logprob.detach()
        behaviour = self._tensor(self._targets.logprob[batch]).to(logprob.dtype)
        advantage = self._tensor(self._credit.advantage[batch]).to(logprob.dtype)
        losses = token_losses(self._algorithm, logprob, proximal, behaviour, advantage, reference, entropy)
        loss = (self._tensor(self._credit.weight[batch]).to(logprob.dtype) * losses.loss).sum()
        tally.loss += float(loss.detach())
        tally.clipped += float(losses.clipped.sum())
        tally.kl += float(losses.kl.sum())
        tally.learner.append(proximal.double().cpu().numpy())
        tally.sampler.append(self._targets.logprob[batch].astype(np.float64))
        return loss

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device.type, self._precision, enabled=self._autocasts)

    def _tensor(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)
