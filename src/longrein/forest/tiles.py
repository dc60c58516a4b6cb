"""Who sees whom, in tiles: each stretch of packed tokens with the few stretches of keys that any of them sees.

In preorder, the keys that tokens ``start:stop`` see are the ancestors of the first token and the stretch itself; what a
later token does not see of them is a tail, because ancestors are nested. So no mask over all pairs of tokens is needed.
"""

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longrein.forest.forest import Forest, IndexArray

# A tile costs its pairs of query and key, and as much as this many pairs for being a tile.
TILE_OVERHEAD = 16_384
# Pairs of one tile: bounds the memory of its scores.
MOST_PAIRS = 1 << 20
# A long node may be cut at multiples of this.
STRIDE = 64
MOST_QUERIES = 1024


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries ``start:stop`` and the K keys they may see.

    Attributes:
        keys: ascending, disjoint ranges of packed indices; their tokens in this order are the K keys.
        open_keys: the first so many keys are seen by every query.
        hidden: (Q, K - open_keys) bool, which of the other keys each query does not see.
    """

    start: int
    stop: int
    keys: tuple[tuple[int, int], ...]
    open_keys: int
    hidden: NDArray[np.bool_]


def tiles(forest: Forest) -> list[Tile]:
    """Cut a forest's tokens into tiles of least estimated cost; they cover every token once, in order."""
    cuts = _cuts(forest)
    return [_tile(forest, int(start), int(stop)) for start, stop in itertools.pairwise(cuts)]


def _cuts(forest: Forest) -> IndexArray:
    """Where tiles begin, and the end of the last: the cheapest choice among the starts of nodes and of strides."""
    size = len(forest)
    if not size:
        return np.zeros(1, np.int64)
    offset = np.arange(size) - forest.start[forest.node_of]
    places = np.append(np.flatnonzero(offset % STRIDE == 0), size)
    above = np.append(forest.positions[places[:-1]], 0)  # ancestors of the token at each place
    best = np.zeros(len(places))
    since = np.zeros(len(places), np.int64)
    for k in range(1, len(places)):
        low = int(np.searchsorted(places, places[k] - MOST_QUERIES))
        first = np.arange(min(low, k - 1), k)
        queries = places[k] - places[first]
        pairs = queries * (above[first] + queries)
        cost = best[first] + pairs + TILE_OVERHEAD + np.where((pairs > MOST_PAIRS) & (first < k - 1), np.inf, 0)
        since[k], best[k] = first[int(cost.argmin())], cost.min()
    chosen = [len(places) - 1]
    while chosen[-1]:
        chosen.append(int(since[chosen[-1]]))
    return places[chosen[::-1]]


def _tile(forest: Forest, start: int, stop: int) -> Tile:
    ranges = forest.path(start)
    if ranges and ranges[-1][1] == start:
        ranges[-1] = (ranges[-1][0], stop)
    else:
        ranges.append((start, stop))
    keys = np.concatenate([np.arange(*each) for each in ranges])
    queries = np.arange(start, stop)
    seen = (keys <= queries[:, None]) & (queries[:, None] < forest.last_descendant[keys])  # (Q, K)
    closed = np.flatnonzero(~seen.all(0))
    open_keys = int(closed[0]) if len(closed) else len(keys)
    return Tile(start, stop, tuple(ranges), open_keys, ~seen[:, open_keys:])
