"""Whole slots in one call: the bytes are right for every spacing of slots, and nothing reaches out of the pool."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefixcache_offload import copying
from prefixcache_offload.copying import copy_from_slots, copy_to_slots

GRANULE = 4096


def filled(granules: int, extra: int = 0) -> np.ndarray:
    return np.random.default_rng(granules).integers(0, 256, granules * GRANULE + extra, dtype=np.uint8)


@pytest.fixture(params=[1, 1 << 60], ids=["rows", "loop"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Force one of the two ways of copying."""
    monkeypatch.setattr(copying, "MIN_ROW_BYTES", request.param)


@pytest.mark.usefixtures("way")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    slots=st.lists(st.integers(0, 30), max_size=8),
    slot_bytes=st.sampled_from([1, 3, 100, GRANULE, GRANULE + 12, 2 * GRANULE]),
    base=st.sampled_from([0, 1]),
)
def test_loading_equals_slicing(slots: list[int], slot_bytes: int, base: int) -> None:
    pool = filled(40)
    slots = [slot + base for slot in slots]
    target = np.zeros(len(slots) * slot_bytes, np.uint8)
    copy_from_slots(pool, slots, target)
    parts = [pool[s * GRANULE : s * GRANULE + slot_bytes] for s in slots]
    assert target.tobytes() == b"".join(part.tobytes() for part in parts)


@pytest.mark.usefixtures("way")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    slots=st.lists(st.integers(0, 15), max_size=8, unique=True),
    slot_bytes=st.sampled_from([1, 100, GRANULE, GRANULE + 12, 2 * GRANULE]),
)
def test_storing_changes_those_slots_and_nothing_else(slots: list[int], slot_bytes: int) -> None:
    pool = filled(40)
    expected = pool.copy()
    places = [2 * slot for slot in slots]
    source = np.random.default_rng(1).integers(0, 256, len(slots) * slot_bytes, dtype=np.uint8)
    for i, place in enumerate(places):
        expected[place * GRANULE : place * GRANULE + slot_bytes] = source[i * slot_bytes : (i + 1) * slot_bytes]
    copy_to_slots(pool, places, source)
    assert np.array_equal(pool, expected)


def test_bad_sizes_are_refused_before_a_byte_moves() -> None:
    pool = filled(4)
    before = pool.copy()
    flat = np.zeros(2 * GRANULE, np.uint8)
    with pytest.raises(IndexError):
        copy_to_slots(pool, [0, 4], flat)
    with pytest.raises(IndexError):
        copy_from_slots(pool, [3], flat)
    with pytest.raises(ValueError, match="equal length"):
        copy_to_slots(pool, [0, 1, 2], flat)
    with pytest.raises(ValueError, match="no slot"):
        copy_to_slots(pool, [], flat)
    with pytest.raises(ValueError, match="contiguous"):
        copy_to_slots(pool, [0], flat[::2])
    with pytest.raises(OverflowError):
        copy_to_slots(pool, [-1], flat)
    assert np.array_equal(pool, before)
    assert not flat.any()


def test_a_read_only_pool_is_not_written() -> None:
    pool = filled(2)
    pool.setflags(write=False)
    with pytest.raises(ValueError, match="read-only"):
        copy_to_slots(pool, [0], np.zeros(GRANULE, np.uint8))
