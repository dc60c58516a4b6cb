"""How a packed forest is computed: hidden states at the rows that predict something, forward and backward.

Invariant: every back end gives the same hidden states and adds the same gradient, those of separate sequences.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from longrein.errors import LearnerError
from longrein.forest.forest import Forest, IndexArray, grow
from longrein.learning.attention import ForestView

# Norm of the difference over norm, in float32. Gradients of trained models differ by a few thousandths with the order
# of sums; without what flows back from branches into what they share they differ by a half.
TOLERANCES = {"logits": 1e-3, "gradients": 0.03}

Pull = Callable[[IndexArray, Tensor], Tensor]
"""Given which of the rows are ready, (K,) indices, and their hidden states (K, d), detached: the gradient of the loss
by these hidden states (K, d). Every row is given once."""


class Backend(Protocol):
    """Computes a model's body over forests; the head and the loss are the caller's."""

    def hidden(self, forest: Forest, rows: IndexArray) -> Tensor:
        """Last hidden states (U, d), without gradient.

        Args:
            forest: S packed tokens.
            rows: (U,) packed indices, repeats allowed.
        """
        ...

    def accumulate(self, forest: Forest, rows: IndexArray, pull: Pull) -> None:
        """Forward, ``pull`` at the rows, backward: the gradient is added to the parameters'."""
        ...


class Packed:
    """The whole forest at once, each token attending to its ancestors.

    Args:
        module: a transformers causal language model that computes its attention over forests.
        precision: autocast dtype; the parameters' own dtype means no autocast.
    """

    def __init__(self, module: PreTrainedModel, precision: torch.dtype) -> None:
        self._module = module
        self._precision = precision

    def hidden(self, forest: Forest, rows: IndexArray) -> Tensor:
        with torch.no_grad():
            return self._states(forest, rows)

    def accumulate(self, forest: Forest, rows: IndexArray, pull: Pull) -> None:
        states = self._states(forest, rows)
        torch.autograd.backward(states, pull(np.arange(len(rows)), states.detach()))

    def _states(self, forest: Forest, rows: IndexArray) -> Tensor:
        own = self._module.get_input_embeddings().weight
        view = ForestView(forest, own.device, self._precision)
        with torch.autocast(own.device.type, self._precision, enabled=self._precision != own.dtype):
            states = self._module.base_model(
                input_ids=torch.from_numpy(forest.tokens).long().to(own.device)[None],
                position_ids=torch.from_numpy(forest.positions).long().to(own.device)[None],
                use_cache=False,
                forest=view,
            ).last_hidden_state
        picked: Tensor = states[0].index_select(0, torch.from_numpy(rows).to(own.device))
        return picked


def check(module: PreTrainedModel, backend: Backend) -> None:
    """Try a small forest against the module's own plain passes: logits and gradient must agree.

    Gradients are left as they were.

    Args:
        backend: of this module, without autocast.

    Raises:
        LearnerError: attention, cache or head do something that is not computed here.
    """
    rows, forest, places = _small_forest(module)
    with torch.no_grad():
        found = module.get_output_embeddings()(backend.hidden(forest, places))
        plain = torch.cat([module(row[None], use_cache=False).logits[0] for row in rows])
    _compare(module, "logits", found, plain)
    found, plain = _gradients_below(module, backend, rows, forest, places)
    _compare(module, "gradients", found, plain)


def _gradients_below(
    module: PreTrainedModel, backend: Backend, rows: list[Tensor], forest: Forest, places: IndexArray
) -> tuple[Tensor, Tensor]:
    """Of the embedding, which is trained for so long: what gets there has come through every layer, and from branches
    through what they share.
    """
    bottom = module.get_input_embeddings().weight
    trained = bottom.requires_grad
    bottom.requires_grad_()
    try:
        states = torch.cat([module.base_model(row[None], use_cache=False).last_hidden_state[0] for row in rows])
        pulls = torch.sin(torch.arange(states.numel())).view(states.shape).to(states)
        (plain,) = torch.autograd.grad(states, bottom, pulls)
        with gradients_apart(module):
            backend.accumulate(forest, places, lambda ready, _: pulls[torch.from_numpy(ready).to(pulls.device)])
            return torch.zeros_like(plain) if bottom.grad is None else bottom.grad, plain
    finally:
        bottom.requires_grad_(trained)


@contextmanager
def gradients_apart(module: PreTrainedModel) -> Iterator[None]:
    """While entered, gradients begin at nothing; those of before are put back afterwards."""
    before = [(parameter, parameter.grad) for parameter in module.parameters()]
    module.zero_grad(set_to_none=True)
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


def _small_forest(module: PreTrainedModel) -> tuple[list[Tensor], Forest, IndexArray]:
    """Sequences that branch twice, one of them with a single token of its own; their forest; where each lies in it."""
    bottom = module.get_input_embeddings().weight
    trunk = np.arange(1, 7)
    lists = [[*trunk, *range(7, 11), *more] for more in ([11], [12, 13, 14])] + [[*trunk, 20, 21, 22]]
    arrays = [np.asarray(each, np.int32) % bottom.shape[0] for each in lists]
    forest, paths = grow(arrays)
    return [torch.from_numpy(each).long().to(bottom.device) for each in arrays], forest, np.concatenate(paths)


def _compare(module: PreTrainedModel, what: str, found: Tensor, plain: Tensor) -> None:
    apart = float((found - plain).norm() / plain.norm().clamp(min=1e-6))
    if not apart < TOLERANCES[what]:
        raise LearnerError(
            f"model {module.config.model_type!r}: the {what} over a small forest differ from the model's own by "
            f"{apart:.2g} of their size, so its attention, its cache or its head does something that the embedded "
            "learner does not compute. Use a model of attention layers and a plain linear head (Llama, Qwen3, Gemma 3)."
        )
