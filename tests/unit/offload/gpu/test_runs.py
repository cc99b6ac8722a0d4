"""Copies between two pools, merged: every byte of every slot once, and no run across a slab of the host pool."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache_offload.gpu.runs import Side, merged

PAGE = 4096


def pairs(host: list[int], device: list[int], slot_pages: int, slab_pages: int) -> list[tuple[int, int, int]]:
    room = 1000 * PAGE
    runs = merged(Side(host, room), Side(device, room), slot_pages * PAGE - 5, slab_pages * PAGE)
    return list(zip(*(column.tolist() for column in runs), strict=True))


def test_neighbours_on_both_sides_are_one_copy() -> None:
    assert pairs([4, 6, 8], [10, 12, 14], 2, 100) == [(4 * PAGE, 10 * PAGE, 6 * PAGE)]
    assert pairs([8, 4, 6], [14, 10, 12], 2, 100) == [(4 * PAGE, 10 * PAGE, 6 * PAGE)]
    assert pairs([4, 6, 8], [10, 12, 16], 2, 100) == [(4 * PAGE, 10 * PAGE, 4 * PAGE), (8 * PAGE, 16 * PAGE, 2 * PAGE)]
    assert pairs([], [], 2, 100) == []


def test_no_copy_crosses_what_is_page_locked_apart() -> None:
    assert pairs([4, 6, 8], [10, 12, 14], 2, 8) == [(4 * PAGE, 10 * PAGE, 4 * PAGE), (8 * PAGE, 14 * PAGE, 2 * PAGE)]


@given(st.data())
def test_every_slot_is_copied_exactly_where_it_belongs(data: st.DataObject) -> None:
    slot_pages = data.draw(st.integers(1, 3))
    slab_slots = data.draw(st.integers(1, 5))
    count = data.draw(st.integers(0, 12))
    places = st.lists(st.integers(0, 19), min_size=count, max_size=count, unique=True)
    host = [place * slot_pages for place in data.draw(places)]
    device = [place * slot_pages for place in data.draw(places)]
    slab = slab_slots * slot_pages
    want = {
        (h * PAGE + i * PAGE, d * PAGE + i * PAGE) for h, d in zip(host, device, strict=True) for i in range(slot_pages)
    }
    seen = []
    for h, d, size in pairs(host, device, slot_pages, slab):
        assert h // (slab * PAGE) == (h + size - 1) // (slab * PAGE)
        seen += [(h + i, d + i) for i in range(0, size, PAGE)]
    assert len(seen) == len(set(seen))
    assert set(seen) == want


@pytest.mark.parametrize(("host", "device"), [([1000], [0]), ([0], [999]), ([2**32 - 1], [0])])
def test_slots_outside_a_pool_are_refused(host: list[int], device: list[int]) -> None:
    with pytest.raises(IndexError, match="reaches out"):
        pairs(host, device, 2, 8)


@pytest.mark.parametrize(("host", "device", "size"), [([1], [1, 2], 4096), ([1], [1], 0), ([[1]], [[1]], 1)])
def test_what_does_not_fit_together_is_refused(host: list[int], device: list[int], size: int) -> None:
    with pytest.raises(ValueError, match="cannot be copied"):
        merged(Side(np.array(host), 1 << 20), Side(np.array(device), 1 << 20), size, 4096)
