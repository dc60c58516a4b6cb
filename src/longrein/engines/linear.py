"""A weight matrix in the layout its device multiplies fastest.

On CPU, oneDNN's own blocked layout saves the reordering that a plain ``F.linear`` repeats at every call, and in float32
it replaces a BLAS that is slow on some processors. Where the layout is not available the matrix stays as it is.
"""

import functools

import torch
from torch import Tensor
from torch.nn import functional

# Rows that most products will have; only a hint to the choice of layout.
TYPICAL_ROWS = 32


class Linear:
    """``y = x W^T + b`` for two-dimensional ``x``.

    Args:
        weight: (out, in), in the dtype to compute in.
        bias: (out,) or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.bias = bias
        self._packs = weight.device.type == "cpu" and _packing_works(weight.dtype)
        self.store(weight)

    def store(self, weight: Tensor) -> None:
        """Replace the weight."""
        weight = weight.contiguous()
        self._weight = _pack(weight) if self._packs else weight

    def dense(self) -> Tensor:
        """(out, in): the weight in plain layout, safe to change."""
        return self._weight.to_dense() if self._packs else self._weight.clone()

    def __call__(self, x: Tensor) -> Tensor:
        """(N, in) → (N, out)."""
        if self._packs:
            return _packed(x, self._weight, self.bias)
        return functional.linear(x, self._weight, self.bias)


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_ROWS)
    return packed


def _packed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


@functools.cache
def _packing_works(dtype: torch.dtype) -> bool:
    """Try it: whether the layout exists, is right and can be undone depends on torch's build and on the processor."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 64, generator=generator).to(dtype)
    weight = torch.randn(80, 64, generator=generator).to(dtype)
    bias = torch.randn(80, generator=generator).to(dtype)
    try:
        packed = _pack(weight)
        if not torch.equal(packed.to_dense(), weight):
            return False
        difference = _packed(x, packed, bias) - functional.linear(x, weight, bias)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return difference.abs().max().item() < (1e-3 if dtype == torch.float32 else 0.5)
