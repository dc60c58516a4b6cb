"""Exact attention over a packed forest: every token sees its ancestors and itself, nothing else, and no mask over all
pairs of tokens is ever made.

It works for any transformers model that takes its attention from the attention interface: set the implementation to
``longrein_forest`` and pass ``forest=ForestView(...)`` to the forward. Without a forest it is plain causal attention.

On a CPU it is computed tile by tile; on a GPU by torch's FlexAttention, which skips blocks of pairs that nobody sees.
The latter's forward is tested on a CPU, where torch has no backward for it; it has not been run on a GPU yet.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from longrein.errors import LearnerError
from longrein.forest.forest import Forest
from longrein.forest.tiles import tiles

IMPLEMENTATION = "longrein_forest"
# What attention layers may be asked for beyond softmax(q·k): none of it is computed here.
UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias")


@dataclass(frozen=True, slots=True)
class _Block:
    """A tile on the model's device: queries ``start:stop`` against the keys of ``ranges``."""

    start: int
    stop: int
    ranges: tuple[tuple[int, int], ...]
    open_keys: int
    bias: Tensor  # (Q, K - open_keys), 0 or -inf


class ForestView:
    """What attention layers need to know about one packed forest, on one device and in one dtype.

    Args:
        flex: whether FlexAttention computes it; None for whether the device is a GPU.
    """

    def __init__(self, forest: Forest, device: torch.device, dtype: torch.dtype, flex: bool | None = None) -> None:
        self.size = len(forest)
        self.mask: BlockMask | None = None
        self.blocks: list[_Block] = []
        if flex if flex is not None else device.type == "cuda":
            self.mask = _block_mask(forest, device)
            return
        self.blocks = [
            _Block(
                tile.start,
                tile.stop,
                tile.keys,
                tile.open_keys,
                torch.zeros(tile.hidden.shape, dtype=dtype)
                .masked_fill_(torch.from_numpy(tile.hidden), -torch.inf)
                .to(device),
            )
            for tile in tiles(forest)
        ]


def forest_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    forest: ForestView | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of ``IMPLEMENTATION``.

    Args:
        query: (1, Hq, S, D), rotated already; Hq is a multiple of Hk.
        key: (1, Hk, S, D).
        value: (1, Hk, S, E).
        forest: the forest that the S tokens are; None means one plain sequence per row.

    Returns:
        (1, S, Hq, E), and no attention weights.

    Raises:
        LearnerError: the layer asks for what is not computed here.
    """
    if forest is None:
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    asked = [name for name in UNSUPPORTED if kwargs.get(name) is not None]
    if dropout:
        asked.append("dropout")
    if attention_mask is not None:
        asked.append("attention_mask")
    if asked or query.shape[0] != 1 or query.shape[2] != forest.size:
        raise LearnerError(
            f"forest attention in {type(module).__name__} was given {', '.join(asked) or tuple(query.shape)}; it "
            f"computes plain softmax attention over one packed forest of {forest.size} tokens."
        )
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    with torch.autocast(kind, enabled=False):
        if forest.mask is not None:
            flexed: Tensor = _flex(kind)(query, key, value, block_mask=forest.mask, scale=scale, enable_gqa=True)
            return flexed.transpose(1, 2), None
        out: Tensor = _Tiled.apply(query[0] * scale, key[0], value[0], forest.blocks)  # type: ignore[no-untyped-call]
    return out.unsqueeze(0), None


def _block_mask(forest: Forest, device: torch.device) -> BlockMask:
    last_descendant = torch.from_numpy(forest.last_descendant).to(device)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < last_descendant[key])

    size = len(forest)
    # Compiled, it makes no mask over all pairs on the way.
    return create_block_mask(sees, None, None, size, size, device=str(device), _compile=device.type == "cuda")


@functools.cache
def _flex(kind: str) -> Any:
    """Not compiled, FlexAttention computes all pairs; a CPU would wait minutes for the compiler."""
    return torch.compile(flex_attention, dynamic=True) if kind == "cuda" else flex_attention


class _Tiled(torch.autograd.Function):
    """Softmax attention tile by tile; the backward pass computes the weights again instead of keeping them."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[_Block]) -> Tensor:
        # Head by head in memory: products over a tile then read whole rows.
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        ctx.save_for_backward(query, key, value)
        ctx.blocks = blocks
        heads, size, _ = query.shape
        out = value.new_empty(size, heads, value.shape[-1])
        for block in blocks:
            weights, _, _ = _weights(query, key, block)
            attended = torch.bmm(weights, _gather(value, block.ranges))  # (Hk, G·Q, E)
            _folded(out, block, len(key)).copy_(attended.view(len(key), -1, block.stop - block.start, value.shape[-1]))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value = ctx.saved_tensors
        grad_query = torch.empty_like(query)
        grad_key = torch.zeros(key.shape, dtype=_accumulator(key), device=key.device)
        grad_value = torch.zeros(value.shape, dtype=_accumulator(value), device=value.device)
        for block in ctx.blocks:
            weights, queries, keys = _weights(query, key, block)
            coming = _folded(grad, block, len(key)).reshape(len(key), -1, value.shape[-1])  # (Hk, G·Q, E)
            _scatter(grad_value, block.ranges, torch.bmm(weights.transpose(1, 2), coming))
            grad_weights = torch.bmm(coming, _gather(value, block.ranges).transpose(1, 2))
            grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
            _scatter(grad_key, block.ranges, torch.bmm(grad_scores.transpose(1, 2), queries))
            stretch = grad_query[:, block.start : block.stop]
            stretch.copy_(torch.bmm(grad_scores, keys).view(stretch.shape))
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None


def _weights(query: Tensor, key: Tensor, block: _Block) -> tuple[Tensor, Tensor, Tensor]:
    """Attention weights (Hk, G·Q, K), queries (Hk, G·Q, D) and keys (Hk, K, D) of a tile.

    The G query heads that share a key head become rows of one product.
    """
    queries = query[:, block.start : block.stop].reshape(len(key), -1, query.shape[-1])
    keys = _gather(key, block.ranges)
    scores = torch.bmm(queries, keys.transpose(1, 2))
    if block.bias.numel():
        rows = scores.view(len(key), -1, block.stop - block.start, keys.shape[1])
        rows[..., block.open_keys :] += block.bias
    return torch.softmax(scores, -1), queries, keys


def _folded(rows: Tensor, block: _Block, kv_heads: int) -> Tensor:
    """A tile's part of (S, Hq, E), seen as (Hk, G, Q, E)."""
    part = rows[block.start : block.stop]
    return part.view(len(part), kv_heads, -1, rows.shape[-1]).permute(1, 2, 0, 3)


def _gather(rows: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    """(H, K, D): the rows of the ranges, one after the other."""
    if len(ranges) == 1:
        return rows[:, slice(*ranges[0])]
    return torch.cat([rows[:, start:stop] for start, stop in ranges], 1)


def _scatter(rows: Tensor, ranges: Sequence[tuple[int, int]], added: Tensor) -> None:
    """Add (H, K, D) to the rows of the ranges."""
    begin = 0
    for start, stop in ranges:
        rows[:, start:stop] += added[:, begin : begin + stop - start]
        begin += stop - start


def _accumulator(tensor: Tensor) -> torch.dtype:
    """Many tiles add to one key: their sum is kept in at least float32."""
    return torch.promote_types(tensor.dtype, torch.float32)


def use_forest_attention(module: PreTrainedModel) -> None:
    """Make a module compute its attention here.

    Raises:
        LearnerError: the model has attention features that are not computed here; names them.
    """
    config: Any = module.config
    problems = []
    kinds = sorted(set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"})
    if kinds:
        problems.append(f"layers of kind {', '.join(kinds)}")
    windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    if windowed and not getattr(config, "layer_types", None):
        problems.append(f"a sliding window of {config.sliding_window} tokens")
    if getattr(config, "attn_logit_softcapping", None):
        problems.append("capped attention scores")
    if getattr(config, "attention_dropout", 0.0):
        problems.append(f"attention dropout {config.attention_dropout}")
    if problems:
        raise LearnerError(
            f"model {config.model_type!r} has {' and '.join(problems)}, which the embedded learner does not "
            "compute. Use a model with plain full attention (Llama, Qwen2, Qwen3 and the like)."
        )
    AttentionInterface.register(IMPLEMENTATION, forest_attention)
    try:
        module.set_attn_implementation(IMPLEMENTATION)
    except (ValueError, KeyError, ImportError) as error:
        raise LearnerError(f"model {config.model_type!r} does not take its attention from outside: {error}") from error
