"""Sequences of tokens become one prefix forest: a compressed radix tree per distinct first token, packed in preorder.

Invariant: the path from a root to a packed token spells exactly the prefix it stands for, every distinct prefix is
stored once, and the descendants of a node lie contiguously after it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from longrein.records import IntArray

IndexArray = NDArray[np.int64]


@dataclass(frozen=True)
class Forest:
    """S packed tokens in depth-first preorder, and the N nodes (unbranched stretches of tokens) they form.

    Attributes:
        tokens: (S,) int32 token ids.
        positions: (S,) int32, each token's distance from its root.
        start, end: (N,) int64, a node's own tokens are ``start:end``.
        subtree_end: (N,) int64, its descendants' tokens are ``end:subtree_end``.
        parent: (N,) int64, the node above, -1 for a root. Parents come before children.
    """

    tokens: IntArray
    positions: IntArray
    start: IndexArray
    end: IndexArray
    subtree_end: IndexArray
    parent: IndexArray

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def node_of(self) -> IndexArray:
        """(S,) the node each token belongs to."""
        return np.repeat(np.arange(len(self.start)), self.end - self.start)

    @cached_property
    def last_descendant(self) -> IndexArray:
        """(S,) one past the last token that sees this token: ``k`` is seen by ``q`` iff k <= q < last_descendant[k]."""
        return self.subtree_end[self.node_of]

    def path(self, token: int) -> list[tuple[int, int]]:
        """The strict ancestors of a token as ascending, disjoint ranges of packed indices."""
        ranges: list[tuple[int, int]] = []
        node, stop = int(self.node_of[token]), token
        while node >= 0:
            begin = int(self.start[node])
            if ranges and ranges[-1][0] == stop:
                ranges[-1] = (begin, ranges[-1][1])
            elif stop > begin:
                ranges.append((begin, stop))
            node = int(self.parent[node])
            stop = int(self.end[node]) if node >= 0 else 0
        return ranges[::-1]


def grow(sequences: Sequence[IntArray]) -> tuple[Forest, list[IndexArray]]:
    """Merge token sequences into a forest.

    The forest depends on the set of sequences only, not on their order.

    Args:
        sequences: each (L,) int32, L >= 0.

    Returns:
        The forest, and for each sequence the packed index of each of its tokens (L,).
    """
    arrays = [np.ascontiguousarray(sequence, dtype=np.int32) for sequence in sequences]
    # Big-endian bytes sort as the tokens do, a prefix before what extends it: preorder.
    order = sorted(range(len(arrays)), key=lambda i: arrays[i].astype(">i4").tobytes())
    paths: list[IndexArray] = [np.empty(0, np.int64)] * len(arrays)
    before, path, size = np.empty(0, np.int32), np.empty(0, np.int64), 0
    tokens: list[IntArray] = []
    parents: list[IndexArray] = []
    for i in order:
        shared = common_prefix(before, arrays[i])
        fresh = np.arange(size, size + len(arrays[i]) - shared)
        path = paths[i] = np.concatenate([path[:shared], fresh])
        tokens.append(arrays[i][shared:])
        parents.append(np.concatenate([[-1], path])[shared:-1])
        before, size = arrays[i], size + len(fresh)
    if not size:
        return from_parents(np.empty(0, np.int32), np.empty(0, np.int64)), paths
    return from_parents(np.concatenate(tokens), np.concatenate(parents)), paths


def common_prefix(one: IntArray, other: IntArray) -> int:
    """How many leading tokens two sequences share."""
    length = min(len(one), len(other))
    different = one[:length] != other[:length]
    return int(different.argmax()) if different.any() else length


def from_parents(tokens: IntArray, parent: IndexArray) -> Forest:
    """The forest of packed tokens whose parent tokens are known.

    Args:
        tokens: (S,) int32 in preorder.
        parent: (S,) packed index of the token before each, -1 at a root.
    """
    size = len(tokens)
    children = np.bincount(parent[parent >= 0], minlength=size)
    # A node goes on as long as its token's only child is the next token.
    begins = (parent != np.arange(size) - 1) | (parent < 0) | (children[parent] != 1)
    start = np.flatnonzero(begins)
    end = np.append(start[1:], size) if size else start
    above = parent[start]
    node_of = np.cumsum(begins) - 1
    node_parent = np.where(above >= 0, node_of[above] if size else above, -1)
    subtree_end, depth = end.copy(), np.zeros(len(start), np.int64)
    for node in range(len(start)):
        if node_parent[node] >= 0:
            depth[node] = depth[node_parent[node]] + end[node_parent[node]] - start[node_parent[node]]
    for node in range(len(start) - 1, -1, -1):
        if node_parent[node] >= 0:
            subtree_end[node_parent[node]] = max(subtree_end[node_parent[node]], subtree_end[node])
    positions = (np.repeat(depth - start, end - start) + np.arange(size)).astype(np.int32)
    return Forest(tokens, positions, start, end, subtree_end, node_parent)
