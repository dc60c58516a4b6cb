"""Which precision computes faster here: measured, because the same processor may be several times faster or slower in
bfloat16, depending on instructions it may or may not have.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from longrein.engines.probe import bfloat16_may_pay
from longrein.errors import LearnerError

PROBE_TOKENS = 256
# bfloat16 costs accuracy, so it must be worth it.
WORTH = 1.15

Precision = Literal["auto", "float32", "bfloat16"]


def choose_precision(module: PreTrainedModel, wanted: Precision) -> torch.dtype:
    """The autocast dtype; ``auto`` times a short forward and backward pass in both. Gradients are left as they were."""
    if wanted != "auto":
        return torch.float32 if wanted == "float32" else torch.bfloat16
    if not bfloat16_may_pay(module.get_input_embeddings().weight.device):
        return torch.float32
    slow = _seconds(module, torch.float32)
    fast = _seconds(module, torch.bfloat16)
    return torch.bfloat16 if slow > WORTH * fast else torch.float32


def _seconds(module: PreTrainedModel, dtype: torch.dtype) -> float:
    """The better of two runs, after one to warm up."""
    embedding = module.get_input_embeddings()
    device = embedding.weight.device
    ids = torch.arange(PROBE_TOKENS, device=device)[None] % embedding.weight.shape[0]
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    taken = []
    for _ in range(3):
        began = time.perf_counter()
        with torch.autocast(device.type, dtype, enabled=dtype != embedding.weight.dtype):
            states = module.base_model(input_ids=ids, use_cache=False).last_hidden_state
        torch.autograd.grad(states.float().square().mean(), trained, allow_unused=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - began)
    return min(taken[1:])


def checkpoint_activations(module: PreTrainedModel) -> None:
    """Keep no activations inside layers: the backward pass computes them again.

    Raises:
        LearnerError: the model's layers cannot.
    """
    if not module.supports_gradient_checkpointing:
        raise LearnerError(
            f"learner.activation_checkpointing: {module.config.model_type!r} does not support it in transformers."
        )
    module.gradient_checkpointing_enable({"use_reentrant": False})
    # transformers does so in training mode only; everything below the layers stays in evaluation mode.
    for layer in module.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.training = True


def thread_count(threads: int | Literal["auto"]) -> int:
    """``auto`` is every core this process may use: while the learner computes, the harnesses wait."""
    return len(os.sched_getaffinity(0)) if threads == "auto" else threads


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute on ``count`` CPU threads for as long as it is entered."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
