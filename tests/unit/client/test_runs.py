"""What a server may answer about slots, and what contradicts itself."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.identity.layout import GroupKind, LayerGroup, Layout
from prefixcache.v1 import cache_pb2, common_pb2
from prefixcache_client.blocks import BlockFormat
from prefixcache_client.errors import Unreachable
from prefixcache_client.runs import SlotRun, foreign_runs, granted_runs, leased_runs

FORM = BlockFormat(
    Layout.of(
        LayerGroup(GroupKind.FULL, (0, 2), 1, 8, 8, "float32"),
        LayerGroup(GroupKind.SLIDING, (1,), 1, 8, 8, "float32", 33),
    ),
    16,
)


def part_run(part: int, first: int, count: int, *, generations: int | None = None) -> common_pb2.PartRun:
    slots = np.arange(count, dtype="<u4").tobytes()
    numbers = np.arange(count if generations is None else generations, dtype="<u8").tobytes()
    return common_pb2.PartRun(part=part, first_block=first, slots=slots, generations=numbers)


def test_opaque_keys_are_leased_as_told() -> None:
    form = BlockFormat(Layout.opaque(4096, 16, "native:a:b"), 16, foreign=True)
    missing = np.array([1, 1, 0, 0, 1], np.bool_)
    runs = foreign_runs(form, [part_run(0, 1, 1), part_run(0, 4, 1)], missing, 2)
    assert [run.blocks.tolist() for run in runs] == [[1], [4]]
    assert missing.tolist() == [True, False, False, False, False]
    for told in ([part_run(0, 0, 2)], []):
        with pytest.raises(Unreachable, match="other blocks"):
            foreign_runs(form, told, missing, 1)
    with pytest.raises(Unreachable, match="did not promise"):
        foreign_runs(form, [part_run(0, 7, 1)], missing, 1)  # beyond what was asked for
    with pytest.raises(Unreachable, match="did not promise"):
        foreign_runs(form, [part_run(0, 2, 1)], missing, 1)  # not there
    with pytest.raises(Unreachable, match="did not promise"):
        foreign_runs(form, [part_run(0, 4, 1)], missing, 1)  # told before
    foreign_runs(form, [part_run(0, 0, 1)], missing, 1)
    assert not missing.any()


def test_a_lease_is_whole() -> None:
    runs = leased_runs(FORM, [part_run(0, 0, 4), part_run(0, 4, 6), part_run(1, 8, 2)], range(10))
    assert [(run.part, run.blocks[0], run.count) for run in runs] == [(0, 0, 4), (0, 4, 6), (1, 8, 2)]


def test_blocks_beyond_the_promise_are_cut_off() -> None:
    runs = leased_runs(FORM, [part_run(0, 0, 12), part_run(1, 0, 12)], range(2, 10))
    assert [(run.blocks[0], run.blocks[-1]) for run in runs] == [(2, 9), (2, 9)]
    assert runs[0].slots.tolist() == list(range(2, 10)), "slots stay with their blocks"


@pytest.mark.parametrize(
    "runs",
    [
        [part_run(0, 0, 10)],
        [part_run(0, 0, 10), part_run(1, 9, 1)],
        [part_run(0, 0, 9), part_run(1, 8, 2)],
        [part_run(0, 1, 9), part_run(1, 8, 2)],
        [part_run(0, 0, 4), part_run(0, 5, 5), part_run(1, 8, 2)],
        [part_run(0, 0, 10, generations=9), part_run(1, 8, 2)],
        [part_run(2, 0, 10)],
        [common_pb2.PartRun(slots=b"abc", generations=b"")],
    ],
)
def test_a_lease_with_a_hole_is_refused(runs: list[common_pb2.PartRun]) -> None:
    with pytest.raises(Unreachable):
        leased_runs(FORM, runs, range(10))


def test_of_a_prefix_that_still_comes_only_its_last_window_is_needed() -> None:
    (run,) = leased_runs(FORM, [part_run(0, 0, 6)], range(6), 10)
    assert (run.part, run.count) == (0, 6)
    assert len(leased_runs(FORM, [part_run(0, 6, 4), part_run(1, 8, 2)], range(6, 10), 10)) == 2
    with pytest.raises(Unreachable):
        leased_runs(FORM, [part_run(0, 6, 4), part_run(1, 9, 1)], range(6, 10), 10)


def test_the_engines_own_blocks_are_not_needed() -> None:
    assert len(leased_runs(FORM, [part_run(0, 9, 1), part_run(1, 9, 1)], range(9, 10))) == 2


def grant(blocks: list[int]) -> cache_pb2.PartGrant:
    count = len(blocks)
    return cache_pb2.PartGrant(
        blocks=np.array(blocks, "<u4").tobytes(),
        slots=np.arange(count, dtype="<u4").tobytes(),
        generations=np.arange(count, dtype="<u8").tobytes(),
    )


def test_grants_with_gaps() -> None:
    (run,) = granted_runs(FORM, [grant([2, 3, 7])], range(2, 8))
    assert (run.blocks.tolist(), run.slots.tolist()) == ([2, 3, 7], [0, 1, 2])


@pytest.mark.parametrize("blocks", [[1, 2], [7, 8], [0xFFFFFFFF]])
def test_grants_nobody_asked_for_are_refused(blocks: list[int]) -> None:
    with pytest.raises(Unreachable, match="not asked for"):
        granted_runs(FORM, [grant(blocks)], range(2, 8))


@given(blocks=st.lists(st.integers(0, 40), unique=True).map(sorted), start=st.integers(0, 41), size=st.integers(0, 41))
def test_within_is_a_filter(blocks: list[int], start: int, size: int) -> None:
    count = len(blocks)
    run = SlotRun(
        0, 0, np.array(blocks, np.int64), np.arange(count, dtype=np.uint32), np.arange(count, dtype=np.uint64)
    )
    wanted = range(start, start + size)
    cut = run.within(wanted)
    expected = [(block, slot) for slot, block in enumerate(blocks) if block in wanted]
    got = [] if cut is None else list(zip(cut.blocks.tolist(), cut.slots.tolist(), strict=True))
    assert got == expected
