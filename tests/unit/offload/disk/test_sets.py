"""Vectorised sets beside the plainest model: what was seen, what is revoked, what is an orphan."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache_offload.disk import ENTRY, Entries
from prefixcache_offload.disk.orphans import orphans
from prefixcache_offload.disk.seen import Seen
from prefixcache_offload.disk.tombstones import Tombstone, Tombstones
from tests.unit.offload.disk.log import entries_of, key

Row = tuple[int, int, int, int]
"""(namespace, number, part, sequence)."""
rows = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 12), st.integers(0, 2), st.integers(1, 50)), max_size=40)


def entries(of: list[Row]) -> Entries:
    made = entries_of([number for _, number, _, _ in of])
    for name, place in (("namespace", 0), ("part", 2), ("sequence", 3)):
        made[name] = [row[place] for row in of]
    return made


def keys(numbers: list[int]) -> np.ndarray:
    return np.frombuffer(b"".join(key(n) for n in numbers), np.uint8).reshape(-1, 32)


@given(st.lists(rows, max_size=8))
def test_seen_is_a_set(batches: list[list[Row]]) -> None:
    seen, model = Seen(), set()
    for batch in batches:
        new = seen.add_new(entries(batch))
        for row, fresh in zip(batch, new.tolist(), strict=True):
            assert fresh == (row[:3] not in model)
            model.add(row[:3])


stones = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.integers(0, 12), max_size=5), st.integers(1, 50)),
    max_size=6,
    unique_by=lambda t: t[2],
)


@given(rows, stones)
def test_revoked_is_what_is_named_and_older(found: list[Row], named: list[tuple[int, list[int], int]]) -> None:
    tombstones = Tombstones()
    for place, (namespace, numbers, revokes) in enumerate(named):
        tombstones.add(Tombstone(revokes, namespace, keys(numbers), place))

    def gone(row: Row, stone: tuple[int, list[int], int]) -> bool:
        namespace, numbers, revokes = stone
        if row[3] >= revokes:
            return False
        if not numbers and namespace == 0:
            return True
        return row[0] == namespace and (not numbers or row[1] in numbers)

    expected = [any(gone(row, stone) for stone in named) for row in found]
    assert tombstones.revoked(entries(found)).tolist() == expected


def test_a_tombstone_told_twice_is_one_at_its_last_place() -> None:
    tombstones = Tombstones()
    tombstones.add(Tombstone(7, 1, keys([1]), 0))
    tombstones.add(Tombstone(7, 1, keys([1]), 4))
    tombstones.add(Tombstone(7, 1, keys([1]), 0))
    assert len(tombstones) == 1
    assert len(tombstones.within(4)) == 1
    tombstones.discard(4)
    assert not len(tombstones)


@given(st.lists(st.integers(0, 30), max_size=40), st.lists(st.integers(0, 30), max_size=4))
def test_an_orphan_has_no_whole_chain(numbers: list[int], held: list[int]) -> None:
    present = set(numbers)

    def whole(number: int) -> bool:
        return number == 0 or number - 1 in held or (number - 1 in present and whole(number - 1))

    told = orphans(entries_of(numbers), keys(held))
    assert told.tolist() == [not whole(n) for n in numbers]


def test_orphans_keep_namespaces_apart() -> None:
    mixed = np.concatenate([entries_of([0, 1, 2], 1), entries_of([2, 3], 2)])
    assert orphans(mixed).tolist() == [False, False, False, True, True]
    assert not len(orphans(np.zeros(0, ENTRY)))


@pytest.mark.parametrize("broken", [0, 1500, None])
def test_long_chains_cost_no_more_than_short_ones(broken: int | None) -> None:
    """A chain of 20,000: a loop over its levels would take minutes."""
    count = 20_000
    chain = np.zeros(count, ENTRY)
    chain["namespace"] = 1
    chain["key"] = np.random.default_rng(3).integers(1, 256, (count, 32), dtype=np.uint8)
    chain["parent"][1:] = chain["key"][:-1]
    order = np.random.default_rng(4).permutation(count)
    kept = order if broken is None else order[order != broken]
    told = orphans(chain[kept])
    assert told.tolist() == (kept > (count if broken is None else broken)).tolist()
