"""From logits to sampled ids and their log-probabilities.

A token is drawn by inverting the cumulative distribution with one uniform number per row, in two levels (blocks of the
vocabulary, then inside one block): ``torch.multinomial`` and a cumulative sum over the whole vocabulary both cost
several times more. Probabilities are float32 at the row's temperature and over the full vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 128


@dataclass(frozen=True, slots=True)
class Choice:
    """How one row is sampled: ``uniform`` in [0, 1) picks the token; the rest as in ``SampleRequest``."""

    uniform: float
    temperature: float
    top_p: float
    top_k: int

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature == 0

    @property
    def truncated(self) -> bool:
        """Whether only a part of the vocabulary may be sampled."""
        return not self.greedy and (self.top_p < 1 or self.top_k > 0)


def sample(logits: Tensor, choices: Sequence[Choice]) -> tuple[list[int], list[float]]:
    """One token per row.

    Args:
        logits: (B, V), any floating dtype.
        choices: B of them.

    Returns:
        ids and log-probabilities, B each; the latter before any truncation, at temperature 1 where greedy.
    """
    device = logits.device
    temperatures = [1.0 if choice.greedy else choice.temperature for choice in choices]
    if any(temperature != 1 for temperature in temperatures):
        logits = logits.float() / torch.tensor(temperatures, device=device)[:, None]
    probabilities = torch.softmax(logits, 1, dtype=torch.float32)
    drawn = probabilities
    truncated = [row for row, choice in enumerate(choices) if choice.truncated]
    if truncated:
        drawn = probabilities.clone()
        drawn[truncated] = _truncate(probabilities[truncated], [choices[row] for row in truncated])
    uniforms = torch.tensor([choice.uniform for choice in choices], dtype=torch.float64, device=device)
    ids = _invert(drawn, uniforms)
    greedy = [row for row, choice in enumerate(choices) if choice.greedy]
    if greedy:
        ids[greedy] = probabilities[greedy].argmax(1)
    logprobs = probabilities.gather(1, ids[:, None])[:, 0].log()
    return ids.tolist(), logprobs.tolist()


def _invert(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """(B, V), (B,) → (B,) the token at which the cumulative distribution passes the uniform number."""
    rows, vocabulary = probabilities.shape
    whole = vocabulary // BLOCK
    masses = probabilities[:, : whole * BLOCK].view(rows, whole, BLOCK).sum(2)
    if whole * BLOCK < vocabulary:
        masses = torch.cat([masses, probabilities[:, whole * BLOCK :].sum(1, keepdim=True)], 1)
    block, within = _pass(masses.double().cumsum(1), uniforms)
    columns = block[:, None] * BLOCK + torch.arange(BLOCK, device=block.device)
    inside = probabilities.gather(1, columns.clamp_max(vocabulary - 1)).double() * (columns < vocabulary)
    place, _ = _pass(inside.cumsum(1), within)
    return block * BLOCK + place


def _pass(cumulative: Tensor, fraction: Tensor) -> tuple[Tensor, Tensor]:
    """(B, n) and fractions of its last column → the column at which each is passed, and how far into it (0 to 1).

    The column found always has mass of its own, whatever the rounding.
    """
    target = (fraction * cumulative[:, -1])[:, None]
    column = torch.searchsorted(cumulative, target, right=True)
    above = cumulative.gather(1, column)
    below = torch.where(column > 0, cumulative.gather(1, (column - 1).clamp_min(0)), 0.0)
    return column[:, 0], ((target - below) / (above - below)).clamp(0.0, 1 - 1e-12)[:, 0]


def _truncate(probabilities: Tensor, choices: Sequence[Choice]) -> Tensor:
    """Zero what top-k, then top-p of what is left, excludes."""
    ordered, order = probabilities.sort(1, descending=True)
    device = probabilities.device
    vocabulary = ordered.shape[1]
    top_k = torch.tensor([choice.top_k or vocabulary for choice in choices], device=device)
    ordered = ordered * (torch.arange(vocabulary, device=device) < top_k[:, None])
    top_p = torch.tensor([choice.top_p for choice in choices], device=device)
    before = ordered.cumsum(1) - ordered
    # The first token always stays: nothing stands before it.
    ordered = ordered * (before < (top_p * ordered.sum(1))[:, None])
    return torch.zeros_like(probabilities).scatter_(1, order, ordered)
