"""Keys and values of many prompts in one pass, each shared token once.

The nodes to compute are packed one after the other, parents before children. Linear layers see one long batch; each
node's tokens attend to the nodes above it, whether computed earlier or in this very pass, and causally to themselves.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from longrein.engines.cache import Node
from longrein.engines.decoder import Decoder, Shape

# Queries attended at once: larger blocks compute more of the masked triangle, smaller ones more operations.
BLOCK = 128
# Neighbouring computed nodes shorter than this are joined for the pass; longer ones are not worth the copy.
JOIN_BELOW = 256


def prefill(decoder: Decoder, nodes: Sequence[Node]) -> None:
    """Compute the keys and values of ``nodes``; each one's parent is computed, or stands before it."""
    device = decoder.shape.device
    for node in nodes:
        node.keys_values = decoder.shape.keys_values(len(node))
    ids = torch.from_numpy(np.concatenate([node.tokens for node in nodes])).to(device, torch.int64)
    positions = torch.cat([torch.arange(node.start, node.end, device=device) for node in nodes])
    decoder.forward(ids, positions, _Packed(decoder.shape, nodes))


def logits_alone(decoder: Decoder, ids: Tensor) -> Tensor:
    """(n,) ids → (n, V) logits of a sequence by itself, nothing kept."""
    node = Node(ids.cpu().numpy().astype(np.int32), 0, Node(np.empty(0, np.int32), 0, None))
    node.keys_values = decoder.shape.keys_values(len(node))
    positions = torch.arange(len(node), device=decoder.shape.device)
    return decoder.logits(decoder.forward(ids, positions, _Packed(decoder.shape, [node])))


class _Packed:
    """Attention of packed nodes, each against its own path."""

    def __init__(self, shape: Shape, nodes: Sequence[Node]) -> None:
        self._shape = shape
        self._own = [node.computed() for node in nodes]
        self._above = list(_contexts(nodes))
        square = torch.full((BLOCK, BLOCK), float("-inf"), dtype=shape.dtype, device=shape.device)
        self._future = square.triu(1)

    def __call__(self, layer: int, queries: Tensor, keys_values: Tensor) -> Tensor:
        shape = self._shape
        out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        start = 0
        for own, above in zip(self._own, self._above, strict=True):
            size = own.shape[3]
            rows = keys_values[start : start + size].view(size, 2, shape.kv_heads, shape.head_dim)
            own[layer].copy_(rows.permute(1, 2, 0, 3))
            for first in range(0, size, BLOCK):
                last = min(first + BLOCK, size)
                seen = [part[layer] for part in above] + [own[layer][:, :, :last]]
                block = slice(start + first, start + last)
                out[block] = self._attend(queries[block], seen)
            start += size
        return out.view(out.shape[0], -1)

    def _attend(self, queries: Tensor, seen: Sequence[Tensor]) -> Tensor:
        """(m, Hq, D) queries against parts of (2, Hk, n, D); the m last tokens of the last part are their own."""
        shape, m = self._shape, queries.shape[0]
        q = queries.view(m, shape.kv_heads, shape.group, shape.head_dim).permute(1, 2, 0, 3)
        q = q.reshape(shape.kv_heads, -1, shape.head_dim)  # (Hk, G m, D)
        scores = [torch.bmm(q, part[0].transpose(1, 2)) for part in seen]
        own = scores[-1].view(shape.kv_heads, shape.group, m, -1)
        own[..., -m:] += self._future[:m, :m]
        weights = torch.softmax(torch.cat(scores, 2) if len(scores) > 1 else scores[0], 2)
        result: Tensor | None = None
        start = 0
        for part in seen:
            end = start + part.shape[2]
            found = torch.bmm(weights[:, :, start:end], part[1])
            result = found if result is None else result.add_(found)
            start = end
        assert result is not None
        return result.view(shape.kv_heads, shape.group, m, shape.head_dim).permute(2, 0, 1, 3).reshape(queries.shape)


def _contexts(nodes: Iterable[Node]) -> Iterator[list[Tensor]]:
    """For each node the keys and values above it, short neighbours that are already computed joined into one."""
    fresh = set(map(id, nodes))
    joined: dict[int, list[Tensor]] = {}
    for node in nodes:
        assert node.parent is not None
        key = id(node.parent)
        if key not in joined:
            joined[key] = _join(node.parent.path(), fresh)
        yield joined[key]


def _join(path: Sequence[Node], fresh: set[int]) -> list[Tensor]:
    parts: list[Tensor] = []
    short: list[Tensor] = []
    for node in path:
        if id(node) not in fresh and len(node) < JOIN_BELOW:
            short.append(node.computed())
            continue
        if short:
            parts.append(torch.cat(short, 3))
            short = []
        parts.append(node.computed())
    if short:
        parts.append(torch.cat(short, 3))
    return parts
