"""Attention of one decoding step: shared nodes once for all sequences on them, and every sequence's own tail.

Scores against shared nodes and against the tail stand side by side in one row and meet in one softmax, so the result is
that of attention over the whole path.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longrein.engines.cache import Node
from longrein.engines.tails import Tails

# A node becomes a segment when that spares at least so many tail columns (over all rows): below, the additional
# operations cost more than the columns.
SPARED = 1024
SHORTEST = 64
MOST = 8


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A cached node that several sequences attend to together.

    Attributes:
        node, start: the node and where it started when this was made; a node split since then is another one.
        keys_values: (L, 2, Hk, n, D).
    """

    node: Node
    start: int
    keys_values: Tensor

    @property
    def current(self) -> bool:
        """Whether the node is still what it was."""
        return self.node.start == self.start

    def __len__(self) -> int:
        return self.keys_values.shape[3]


def shared_nodes(paths: Sequence[Sequence[Node]]) -> list[Node]:
    """The nodes worth attending to once, given the path of every running sequence."""
    counts = Counter(node for path in paths for node in path)
    spared = {node: len(node) * (count - 1) for node, count in counts.items() if len(node) >= SHORTEST}
    worth = sorted((node for node in spared if spared[node] >= SPARED), key=lambda node: -spared[node])
    return worth[:MOST]


@dataclass(frozen=True, slots=True)
class _Part:
    """A segment within a level: which rows see it (None: all)."""

    segment: Segment
    rows: Tensor | None


class CascadeStep:
    """The ``Attend`` of one step over rows 0…B-1 of the tails; appends each row's new key and value at its column.

    Args:
        segments: of each row, in any order.
        columns: of each row, how many are in use; the new token takes the next.
    """

    def __init__(self, tails: Tails, segments: Sequence[Sequence[Segment]], columns: Sequence[int]) -> None:
        self._tails = tails
        self._shape = shape = tails.shape
        device = shape.device
        self._rows = rows = len(columns)
        at = torch.tensor(columns, device=device)
        tails.mask[torch.arange(rows, device=device), :, at] = 0
        self._mask = tails.mask[:rows].view(rows * shape.kv_heads, 1, tails.width)
        # Where in a layer's buffer, seen as (2 B Hk T, D), each new key and value goes: (B, 2, Hk) numbers.
        side = torch.arange(2, device=device)[:, None] * tails.mask.shape[0] * shape.kv_heads
        head = torch.arange(rows * shape.kv_heads, device=device).view(rows, 1, shape.kv_heads)
        self._cells = ((side + head) * tails.width + at[:, None, None]).view(-1)
        self._levels = _levels(segments, device)

    def __call__(self, layer: int, queries: Tensor, keys_values: Tensor) -> Tensor:
        shape, rows = self._shape, self._rows
        buffer = self._tails.buffer[layer]
        buffer.view(-1, shape.head_dim).index_copy_(0, self._cells, keys_values.reshape(-1, shape.head_dim))
        keys, values = (side.view(rows * shape.kv_heads, -1, shape.head_dim) for side in buffer[:, :rows])
        q = queries.reshape(rows * shape.kv_heads, shape.group, shape.head_dim)
        own = torch.baddbmm(self._mask, q, keys.transpose(1, 2)).view(rows, shape.kv_heads, shape.group, -1)
        if not self._levels:
            return self._weigh_tail(values, torch.softmax(own, 3)).view(rows, -1)
        grouped = queries.view(rows, shape.kv_heads, shape.group, shape.head_dim).transpose(0, 1).contiguous()
        scores = [self._score(layer, grouped, level) for level in self._levels]
        weights = torch.softmax(torch.cat([*scores, own], 3), 3)  # (B, Hk, G, P… + T)
        out = self._weigh_tail(values, weights[..., -self._tails.width :])
        start = 0
        for level, score in zip(self._levels, scores, strict=True):
            self._weigh(layer, weights[..., start : start + score.shape[3]], level, out)
            start += score.shape[3]
        return out.view(rows, -1)

    def _weigh_tail(self, values: Tensor, weights: Tensor) -> Tensor:
        """(B Hk, T, D) and (B, Hk, G, T) → (B, Hk, G, D)."""
        rows, heads, group, width = weights.shape
        return torch.bmm(weights.view(rows * heads, group, width), values).view(rows, heads, group, -1)

    def _score(self, layer: int, grouped: Tensor, level: Sequence[_Part]) -> Tensor:
        """(Hk, B, G, D) queries → (B, Hk, G, P) scores; -inf where a row does not see what stands there."""
        shape, rows = self._shape, self._rows
        if len(level) == 1 and level[0].rows is None:
            return self._product(grouped, level[0].segment.keys_values[layer, 0]).transpose(0, 1)
        width = max(len(part.segment) for part in level)
        scores = grouped.new_full((rows, shape.kv_heads, shape.group, width), float("-inf"))
        for part in level:
            q = grouped if part.rows is None else grouped.index_select(1, part.rows)
            found = self._product(q, part.segment.keys_values[layer, 0]).transpose(0, 1)
            scores[part.rows if part.rows is not None else slice(None), :, :, : len(part.segment)] = found
        return scores

    def _product(self, grouped: Tensor, keys: Tensor) -> Tensor:
        """(Hk, R, G, D) and (Hk, P, D) → (Hk, R, G, P)."""
        heads, rows, group, dim = grouped.shape
        return torch.bmm(grouped.view(heads, rows * group, dim), keys.transpose(1, 2)).view(heads, rows, group, -1)

    def _weigh(self, layer: int, weights: Tensor, level: Sequence[_Part], out: Tensor) -> None:
        """Add what (B, Hk, G, P) weights gather from a level's values to ``out``, (B, Hk, G, D)."""
        for part in level:
            w = weights if part.rows is None else weights.index_select(0, part.rows)
            w = w[..., : len(part.segment)].transpose(0, 1)
            heads, rows, group, size = w.shape
            found = torch.bmm(w.reshape(heads, rows * group, size), part.segment.keys_values[layer, 1])
            found = found.view(heads, rows, group, -1).transpose(0, 1)
            if part.rows is None:
                out += found
            else:
                out.index_add_(0, part.rows, found)


def _levels(segments: Sequence[Sequence[Segment]], device: torch.device) -> list[list[_Part]]:
    """Group segments so that those of one level have no row in common and can share columns."""
    seen: dict[Segment, list[int]] = {}
    for row, those in enumerate(segments):
        for segment in those:
            seen.setdefault(segment, []).append(row)
    taken: list[set[int]] = []
    levels: list[list[_Part]] = []
    for segment, rows in seen.items():
        part = _Part(segment, None if len(rows) == len(segments) else torch.tensor(rows, device=device))
        fits = next((index for index, others in enumerate(taken) if others.isdisjoint(rows)), None)
        if fits is None:
            taken.append(set(rows))
            levels.append([part])
        else:
            taken[fits].update(rows)
            levels[fits].append(part)
    return levels
