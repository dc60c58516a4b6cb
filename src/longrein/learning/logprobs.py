"""Log-probabilities of sampled tokens from a model's logits, without keeping what the logits' gradient can be made of.

Logits are as wide as the vocabulary; here they are the only array of that size that outlives the forward pass.
"""

from typing import Any

import torch
from torch import Tensor


def token_logprobs(logits: Tensor, row: Tensor, token: Tensor) -> Tensor:
    """Log-probability of each target.

    Args:
        logits: (U, V), divided by their temperature; overwritten in the backward pass, so of no use to others.
        row: (T,) int64, which row of ``logits`` predicts each target; several targets may share one.
        token: (T,) int64.

    Returns:
        (T,) at least float32.
    """
    found: Tensor = _TokenLogprobs.apply(logits, row, token)  # type: ignore[no-untyped-call]
    return found


class _TokenLogprobs(torch.autograd.Function):
    """log softmax(z)[row, token]; its gradient is (one-hot - softmax) summed over the targets of a row."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, row: Tensor, token: Tensor) -> Tensor:
        normalizer = torch.logsumexp(logits, -1)  # (U,)
        ctx.save_for_backward(logits, normalizer, row, token)
        return logits[row, token] - normalizer[row]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, normalizer, row, token = ctx.saved_tensors
        total = torch.zeros_like(normalizer).index_add_(0, row, grad)
        gradient = logits.sub_(normalizer[:, None]).exp_().mul_(-total[:, None])
        gradient.index_put_((row, token), grad, accumulate=True)
        return gradient, None, None


def row_entropies(logits: Tensor) -> Tensor:
    """Entropy of each row's distribution (U,), in nats, with gradient.

    Args:
        logits: (U, V).
    """
    logprobs = torch.log_softmax(logits, -1)
    return -(logprobs.exp() * logprobs).sum(-1)
