"""The forest stores every distinct prefix once, in preorder."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from longrein.forest.forest import Forest, common_prefix, grow

sequences = st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=8)


def planted(lists: list[list[int]]) -> tuple[Forest, list[np.ndarray]]:
    return grow([np.array(each, np.int32) for each in lists])


@given(sequences)
def test_every_distinct_prefix_is_stored_once(lists: list[list[int]]) -> None:
    forest, paths = planted(lists)
    prefixes = {tuple(each[: k + 1]) for each in lists for k in range(len(each))}
    assert len(forest) == len(prefixes)
    for each, path in zip(lists, paths, strict=True):
        assert forest.tokens[path].tolist() == each
        assert forest.positions[path].tolist() == list(range(len(each)))


@given(sequences)
def test_a_token_is_seen_by_exactly_what_extends_it(lists: list[list[int]]) -> None:
    forest, paths = planted(lists)
    for path in paths:
        for depth, token in enumerate(path):
            above = [k for k in range(token) if forest.last_descendant[k] > token]
            assert above == path[:depth].tolist()
            assert [k for start, stop in forest.path(int(token)) for k in range(start, stop)] == above


@given(sequences)
def test_nodes_are_unbranched_and_nested(lists: list[list[int]]) -> None:
    forest, _ = planted(lists)
    assert forest.start.tolist() == [0, *forest.end[:-1].tolist()][: len(forest.start)]
    for node, parent in enumerate(forest.parent):
        children = np.flatnonzero(forest.parent == node)
        assert len(children) != 1
        assert forest.subtree_end[node] == max([forest.end[node], *forest.subtree_end[children]])
        assert parent < node
        if parent >= 0:
            assert forest.positions[forest.start[node]] == forest.positions[forest.end[parent] - 1] + 1
        else:
            assert forest.positions[forest.start[node]] == 0


@given(sequences, st.randoms(use_true_random=False))
def test_the_order_of_sequences_does_not_matter(lists: list[list[int]], random: object) -> None:
    shuffled = list(lists)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = planted(lists)[0], planted(shuffled)[0]
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_array_equal(one.parent, other.parent)


def test_large_token_ids_sort_as_numbers() -> None:
    forest, paths = planted([[5, 70_000], [5, 300], [5, 255], [5]])
    assert forest.tokens.tolist() == [5, 255, 300, 70_000]
    assert [path[-1] for path in paths] == [3, 2, 1, 0]


def test_common_prefix() -> None:
    one = np.array([1, 2, 3], np.int32)
    assert common_prefix(one, one) == 3
    assert common_prefix(one, one[:2]) == 2
    assert common_prefix(one, one[1:]) == 0
