"""Which back end computes a forest faster here: measured, because it depends on model, processor and forest.

A forest of S tokens in N nodes whose tokens see P tokens in all takes about a·S + b·P + c·N seconds. The packed pass
pays little for a node; a walk computes each for itself and adds to all gradients each time, but with the model's own
attention, which may be faster.
"""

import time
from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from longrein.errors import LearnerError
from longrein.forest.forest import Forest, IndexArray, grow
from longrein.learning.attention import use_forest_attention
from longrein.learning.backend import Backend, Packed, Pull, check, gradients_apart
from longrein.learning.walk import Walk

Wanted = Literal["auto", "fastest", "packed", "walk"]

# What is tried, in order. The walk before the packed pass: it computes with the attention that the module has itself.
TRIED: Mapping[Wanted, tuple[str, ...]] = {
    "auto": ("packed", "walk"),
    "fastest": ("walk", "packed"),
    "packed": ("packed",),
    "walk": ("walk",),
}

# Forests that are timed: tokens of the trunk, branches, tokens of each.
PROBES = ((32, 0, 0), (384, 0, 0), (32, 8, 4))


def choose_backend(module: PreTrainedModel, precision: torch.dtype, wanted: Wanted = "auto") -> Backend:
    """The back end asked for: with ``auto``, the packed pass where it can compute the model and else the walk; with
    ``fastest``, for each forest whichever is predicted to be faster, of those that can compute the model.

    Args:
        module: a transformers causal language model, in evaluation mode, with the adapters that it is to have: what a
            node costs depends on how many parameters are trained.
        precision: autocast dtype; the parameters' own dtype means no autocast.

    Raises:
        LearnerError: the model's attention, cache or head cannot be computed so; says why.
    """
    found: dict[str, Backend] = {}
    why: list[str] = []
    for name in TRIED[wanted]:
        if found and wanted == "auto":
            break
        own = module.config._attn_implementation
        try:
            found[name] = _open(module, precision, name)
        except LearnerError as error:
            why.append(str(error))
            module.set_attn_implementation(own)
    if not found:
        raise LearnerError(" ".join(why))
    return next(iter(found.values())) if len(found) == 1 else Faster(module, found)


def _open(module: PreTrainedModel, precision: torch.dtype, name: str) -> Backend:
    own = module.get_input_embeddings().weight.dtype
    if name == "walk":
        check(module, Walk(module, own))
        return Walk(module, precision)
    use_forest_attention(module)
    check(module, Packed(module, own))
    return Packed(module, precision)


class Faster:
    """For each forest, the back end that is predicted to take less time. See ``Backend``.

    Args:
        module: what the back ends compute; a few short passes are timed at once. Gradients are left as they were.
        backends: by name.
    """

    def __init__(self, module: PreTrainedModel, backends: Mapping[str, Backend]) -> None:
        self._backends = backends
        self.costs = {name: measure(module, backend) for name, backend in backends.items()}

    def choose(self, forest: Forest) -> str:
        """The name of the one that is predicted to be faster."""
        return min(self.costs, key=lambda name: predict(self.costs[name], forest))

    def hidden(self, forest: Forest, rows: IndexArray) -> Tensor:
        return self._backends[self.choose(forest)].hidden(forest, rows)

    def accumulate(self, forest: Forest, rows: IndexArray, pull: Pull) -> None:
        self._backends[self.choose(forest)].accumulate(forest, rows, pull)


def predict(cost: NDArray[np.float64], forest: Forest) -> float:
    """Seconds of one forward and backward pass.

    Args:
        cost: (3,) seconds per token, per pair of tokens of which one sees the other, and per node.
    """
    return float(cost @ _shape(forest))


def measure(
    module: PreTrainedModel, backend: Backend, clock: Callable[[], float] = time.perf_counter
) -> NDArray[np.float64]:
    """(3,) what ``predict`` wants, from one pass over each of a few forests."""
    forests = [_probe(*shape, module.get_input_embeddings().weight.shape[0]) for shape in PROBES]
    with gradients_apart(module):
        _seconds(module, backend, forests[0], clock)  # makes the gradients
        taken = np.array([_seconds(module, backend, forest, clock) for forest in forests])
    return _solve(np.stack([_shape(forest) for forest in forests]), taken)


def _solve(shapes: NDArray[np.float64], taken: NDArray[np.float64]) -> NDArray[np.float64]:
    """Non-negative least squares with the token's cost always in it: noise must not make a pair or a node pay."""
    best, least = np.zeros(3), np.inf
    for kept in ([0, 1, 2], [0, 1], [0, 2], [0]):
        cost = np.zeros(3)
        cost[kept] = np.linalg.lstsq(shapes[:, kept] / taken[:, None], np.ones(len(taken)))[0]
        error = float(np.square(shapes @ cost / taken - 1).sum())
        if (cost >= 0).all() and error < least:
            best, least = cost, error
    return best


def _shape(forest: Forest) -> NDArray[np.float64]:
    return np.array([len(forest), float(forest.positions.sum(dtype=np.int64)) + len(forest), len(forest.start)], float)


def _probe(trunk: int, branches: int, length: int, vocabulary: int) -> Forest:
    random = np.random.default_rng(0)
    shared = random.integers(0, vocabulary, trunk)
    # They part at their first token.
    tails = [np.append(first % vocabulary, random.integers(0, vocabulary, length - 1)) for first in range(branches)]
    return grow([np.concatenate([shared, tail]).astype(np.int32) for tail in tails or [shared[:0]]])[0]


def _seconds(module: PreTrainedModel, backend: Backend, forest: Forest, clock: Callable[[], float]) -> float:
    device = module.get_input_embeddings().weight.device
    rows = forest.end - 1
    began = clock()
    backend.accumulate(forest, rows, lambda _, hidden: torch.ones_like(hidden))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - began
