"""The prefix tree by itself: what it finds, what it keeps, what it lets go."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longrein.engines.cache import NODE_TOKENS, Node, PrefixCache
from longrein.records import IntArray


def ids(*values: int) -> IntArray:
    return np.array(values, np.int32)


def compute(leaf: Node) -> None:
    """Fill in keys that are the token's id, so that a wrong split shows."""
    for node in leaf.path():
        if node.keys_values is None:
            node.keys_values = (
                torch.tensor(node.tokens, dtype=torch.float32).view(1, 1, 1, -1, 1).expand(1, 2, 1, -1, 1)
            )


def read(leaf: Node) -> list[int]:
    return [int(value) for node in leaf.path() for value in node.computed()[0, 0, 0, :, 0]]


def test_a_divergence_splits_the_node_and_its_keys() -> None:
    cache = PrefixCache(100)
    first = cache.insert(ids(1, 2, 3, 4))
    compute(first)
    second = cache.insert(ids(1, 2, 9))
    compute(second)
    assert read(first) == [1, 2, 3, 4]
    assert read(second) == [1, 2, 9]
    assert cache.tokens == 5
    assert [len(node) for node in first.path()] == [2, 2]
    assert first.path()[0] is second.path()[0]


def test_locks_follow_a_split() -> None:
    cache = PrefixCache(0)
    first = cache.insert(ids(1, 2, 3, 4))
    compute(first)
    cache.lock(first)
    compute(cache.insert(ids(1, 2, 9)))
    cache.evict()
    assert cache.match(ids(1, 2, 3, 4)) == 4, "a locked path was evicted"
    assert cache.match(ids(1, 2, 9)) == 2
    cache.unlock(first)
    assert cache.locked_tokens == 0
    cache.evict()
    assert cache.tokens == 0


def test_the_least_recently_used_goes_first() -> None:
    cache = PrefixCache(6)
    for start in (10, 20, 30):
        compute(cache.insert(ids(start, start + 1, start + 2)))
        cache.insert(ids(10, 11, 12))
    cache.evict()
    assert cache.match(ids(10, 11, 12)) == 3
    assert cache.match(ids(20, 21, 22)) == 0
    assert cache.match(ids(30, 31, 32)) == 3


def test_long_runs_become_chains() -> None:
    cache = PrefixCache(10**6)
    leaf = cache.insert(np.arange(2 * NODE_TOKENS + 5, dtype=np.int32))
    assert [len(node) for node in leaf.path()] == [NODE_TOKENS, NODE_TOKENS, 5]
    assert leaf.end == 2 * NODE_TOKENS + 5


sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(sequences=sequences, capacity=st.integers(0, 40), keep=st.integers(0, 11))
def test_accounts_add_up(sequences: list[list[int]], capacity: int, keep: int) -> None:
    cache = PrefixCache(capacity)
    locked: list[tuple[Node, list[int]]] = []
    for index, sequence in enumerate(sequences):
        leaf = cache.insert(ids(*sequence))
        compute(leaf)
        assert read(leaf) == sequence
        if index % 3 == keep % 3:
            cache.lock(leaf)
            locked.append((leaf, sequence))
        cache.evict()
        assert cache.tokens == sum(len(node) for node in cache.nodes())
        assert cache.locked_tokens == sum(len(node) for node in cache.nodes() if node.locks)
        assert cache.tokens <= max(capacity, cache.locked_tokens)
        for held, expected in locked:
            assert read(held) == expected
    for held, _ in locked:
        cache.unlock(held)
    cache.evict()
    assert cache.locked_tokens == 0
    assert cache.tokens <= capacity
