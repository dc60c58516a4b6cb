"""A forest is cut into micro-batches that each fit a token budget, at the places where the least is computed twice.

A micro-batch holds whole paths from their roots. Where a tree is cut, its shared beginning is computed again on the
other side, but each target stays on one side only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longrein.forest.forest import Forest, IndexArray, from_parents


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some paths of a forest, packed for themselves, with the targets they carry.

    Attributes:
        forest: the packed paths.
        targets: (T,) int64, ascending indices into the batch's targets.
        row: (T,) int64, for each of them the token of ``forest`` that predicts it.
    """

    forest: Forest
    targets: IndexArray
    row: IndexArray


def pack(forest: Forest, row: IndexArray, credited: NDArray[np.bool_], budget: int) -> list[MicroBatch]:
    """Cut a forest into micro-batches of at most ``budget`` tokens.

    Tokens on which no credited target depends are left out. A path longer than the budget goes alone.

    Args:
        forest: S tokens.
        row: (T,) int64, the token that predicts each target.
        credited: (T,) bool, which targets count; the others are in no micro-batch.
        budget: most tokens of a micro-batch.
    """
    wanted = np.flatnonzero(credited)
    rows = row[wanted]
    carries = np.bincount(rows, minlength=len(forest)) > 0  # (S,)
    leaves = _leaves(forest, carries)
    parent = _parents(forest)
    batches: list[MicroBatch] = []
    placed = np.zeros(len(forest), bool)
    for first, last in _cuts(forest, leaves, budget):
        kept = _paths_to(forest, leaves[first:last])
        fresh = kept & ~placed
        placed |= kept
        chosen = fresh[rows]
        batches.append(_micro_batch(forest, parent, kept, wanted[chosen], rows[chosen]))
    return batches


def _leaves(forest: Forest, carries: NDArray[np.bool_]) -> IndexArray:
    """The carrying tokens below which nothing carries, in preorder."""
    count = np.concatenate([[0], np.cumsum(carries)])
    return np.flatnonzero(carries & (count[forest.last_descendant] == count[1:]))


def _parents(forest: Forest) -> IndexArray:
    """(S,) packed index of the token before each, -1 at a root."""
    parent = np.arange(-1, len(forest) - 1)
    above = forest.parent
    parent[forest.start] = np.where(above >= 0, forest.end[above] - 1, -1)
    return parent


def _cuts(forest: Forest, leaves: IndexArray, budget: int) -> list[tuple[int, int]]:
    """Consecutive ranges of leaves, each within budget, with the fewest tokens in all and then the fewest ranges.

    A cut before leaf k costs what the paths to leaves k-1 and k share, for it is then computed on both sides.
    """
    if not len(leaves):
        return []
    length = forest.positions[leaves].astype(np.int64) + 1
    shared = np.zeros(len(leaves), np.int64)
    for k in range(1, len(leaves)):
        shared[k] = _shared(forest, int(leaves[k - 1]), int(leaves[k]))
    own = np.cumsum(length - shared)
    best = np.zeros(len(leaves) + 1)  # cost of the leaves up to k
    since = np.zeros(len(leaves) + 1, np.int64)
    earliest = 0
    for k in range(len(leaves)):
        # Tokens of the range [first, k]: its first path whole, then what each adds.
        size = own[k] - own[earliest : k + 1] + length[earliest : k + 1]
        fits = np.flatnonzero(size <= budget)
        earliest = earliest + int(fits[0]) if len(fits) else k
        first = np.arange(earliest, k + 1)
        # One more range weighs less than one token computed twice.
        cost = best[first] + shared[first] + 1 / (len(leaves) + 1)
        since[k + 1] = first[int(cost.argmin())]
        best[k + 1] = cost.min()
    ranges, stop = [], len(leaves)
    while stop:
        ranges.append((int(since[stop]), stop))
        stop = int(since[stop])
    return ranges[::-1]


def _shared(forest: Forest, one: int, other: int) -> int:
    """How many tokens the paths to two leaves share, ``one`` before ``other``."""
    node = int(forest.parent[forest.node_of[other]])
    while node >= 0 and one < forest.start[node]:
        node = int(forest.parent[node])
    return int(forest.positions[forest.end[node] - 1]) + 1 if node >= 0 else 0


def _paths_to(forest: Forest, leaves: IndexArray) -> NDArray[np.bool_]:
    """(S,) whether a token is one of the leaves or above one."""
    below = np.concatenate([[0], np.cumsum(np.bincount(leaves, minlength=len(forest)))])
    own = np.arange(len(forest))
    # Not every leaf after a token is below it, so the count ends with its subtree.
    return np.asarray(below[forest.last_descendant] > below[own])


def _micro_batch(
    forest: Forest, parent: IndexArray, kept: NDArray[np.bool_], targets: IndexArray, rows: IndexArray
) -> MicroBatch:
    place = np.cumsum(kept) - 1
    above = parent[kept]
    packed = from_parents(forest.tokens[kept], np.where(above >= 0, place[above], -1))
    return MicroBatch(packed, targets, place[rows])


def total_tokens(batches: Sequence[MicroBatch]) -> int:
    """Tokens computed over all micro-batches, those computed twice included."""
    return sum(len(batch.forest) for batch in batches)
