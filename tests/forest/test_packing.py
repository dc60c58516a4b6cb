"""Any cut keeps every credited target exactly once, on the path it belongs to, within the budget."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from longrein.forest.forest import Forest
from longrein.forest.packing import pack, total_tokens
from longrein.forest.targets import harvest
from longrein.forest.tiles import tiles
from longrein.records import Call
from tests.forest.random_calls import make_call, rollouts


def spelled(forest: Forest, token: int) -> list[int]:
    """The prefix that ends with a packed token."""
    above = [k for start, stop in forest.path(token) for k in range(start, stop)]
    return [int(forest.tokens[k]) for k in [*above, token]]


@given(rollouts(), st.integers(1, 60), st.data())
def test_a_cut_loses_and_doubles_nothing(batch: list[list[Call]], budget: int, data: st.DataObject) -> None:
    merged = harvest(batch)
    count = len(merged.targets)
    credited = np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)), bool)
    parts = pack(merged.forest, merged.targets.row, credited, budget)
    placed = [int(target) for part in parts for target in part.targets]
    assert sorted(placed) == np.flatnonzero(credited).tolist()
    for part in parts:
        for target, row in zip(part.targets, part.row, strict=True):
            assert spelled(part.forest, int(row)) == spelled(merged.forest, int(merged.targets.row[target]))
        longest = int(part.forest.positions.max()) + 1
        leaves = len(part.forest.start) - len(set(part.forest.parent[part.forest.parent >= 0].tolist()))
        assert len(part.forest) <= budget or (leaves == 1 and len(part.forest) == longest)


@given(rollouts(), st.data())
def test_what_no_credited_target_needs_is_left_out(batch: list[list[Call]], data: st.DataObject) -> None:
    merged = harvest(batch)
    count = len(merged.targets)
    credited = np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)), bool)
    rows = merged.targets.row[credited]
    needed = {tuple(spelled(merged.forest, int(row))[: k + 1]) for row in rows for k in range(len(merged.forest))}
    parts = pack(merged.forest, merged.targets.row, credited, 10_000)
    assert total_tokens(parts) == len(needed)
    assert len(parts) == (1 if len(rows) else 0)


def test_a_tree_is_cut_where_it_shares_least() -> None:
    # Two groups of two that share 1 token; within a group 5 tokens are shared.
    calls = [
        make_call([0, group, group, group, group], [branch, 7, 7], call_id=f"{group}{branch}")
        for group in (1, 2)
        for branch in (3, 4)
    ]
    merged = harvest([[call] for call in calls])
    credited = np.ones(len(merged.targets), bool)
    parts = pack(merged.forest, merged.targets.row, credited, 12)
    assert [len(part.forest) for part in parts] == [9, 9]
    assert total_tokens(parts) == 18


@given(rollouts(most_rollouts=6))
def test_tiles_cover_exactly_what_each_token_sees(batch: list[list[Call]]) -> None:
    forest = harvest(batch).forest
    size = len(forest)
    seen = np.zeros((size, size), bool)
    for tile in tiles(forest):
        keys = np.concatenate([np.arange(*each) for each in tile.keys])
        assert not seen[tile.start : tile.stop].any()
        assert tile.hidden.shape == (tile.stop - tile.start, len(keys) - tile.open_keys)
        seen[tile.start : tile.stop, keys[: tile.open_keys]] = True
        seen[tile.start : tile.stop, keys[tile.open_keys :]] = ~tile.hidden
    query, key = np.arange(size)[:, None], np.arange(size)[None]
    np.testing.assert_array_equal(seen, (key <= query) & (query < forest.last_descendant[None]))


def test_tiles_follow_the_branches_of_a_large_forest() -> None:
    random = np.random.default_rng(0)
    trunk = random.integers(0, 100, 700).tolist()
    calls = [
        make_call(trunk, random.integers(0, 100, length).tolist(), call_id=str(index))
        for index, length in enumerate([150, 30, 30, 30, 1500])
    ]
    forest = harvest([[call] for call in calls]).forest
    found = tiles(forest)
    pairs = sum((tile.stop - tile.start) * sum(stop - start for start, stop in tile.keys) for tile in found)
    needed = int((forest.positions + 1).sum())
    assert pairs < 1.25 * needed
    assert len(found) < 30
