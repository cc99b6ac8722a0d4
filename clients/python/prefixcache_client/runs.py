"""Slots of blocks, as arrays: what Acquire and Reserve answer, checked and cut to what a copy needs.

Per-block Python objects are too dear for the critical path, so a run keeps the packed fields as numpy views of the
message. It must not know pools or transports.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from prefixcache.v1 import cache_pb2, common_pb2
from prefixcache_client.blocks import BlockFormat
from prefixcache_client.errors import Unreachable


@dataclass(frozen=True, slots=True)
class SlotRun:
    """Slots of one part in one pool.

    `blocks`: i64[n], positions in the prompt, ascending; `slots`: u32[n]; `generations`: u64[n]. `heads`, `layers`:
    what of each block this process writes, of several that store together; None is all.
    """

    part: int
    pool: int
    blocks: npt.NDArray[np.int64]
    slots: npt.NDArray[np.uint32]
    generations: npt.NDArray[np.uint64]
    heads: range | None = None
    layers: range | None = None

    def within(self, wanted: range) -> "SlotRun | None":
        """The blocks of this run that lie in `wanted`, or None."""
        low, high = np.searchsorted(self.blocks, (wanted.start, wanted.stop)).tolist()
        if low == 0 and high == self.blocks.size:
            return self if high else None
        if low >= high:
            return None
        cut = slice(low, high)
        return replace(self, blocks=self.blocks[cut], slots=self.slots[cut], generations=self.generations[cut])

    @property
    def count(self) -> int:
        """Number of blocks."""
        return int(self.blocks.size)


def leased_runs(
    form: BlockFormat, runs: Iterable[common_pb2.PartRun], blocks: range, planned: int | None = None
) -> list[SlotRun]:
    """The runs of an answer that tells `blocks` to be ready, cut to them.

    planned: where the promised prefix ends, if not with them: of a sliding group it needs its last window.

    Raises Unreachable where the server contradicts itself: a part that lacks a block it needs would be garbage in a
    cache.
    """
    cut = (_run(form, run, _consecutive(run.first_block, len(run.slots) // 4)).within(blocks) for run in runs)
    leased = [run for run in cut if run is not None]
    end = blocks.stop if planned is None else planned
    for part in form.parts:
        needed = max(blocks.start, end - form.needed_blocks[part.index])
        for run in leased:
            if run.part == part.index and run.blocks[0] <= needed:
                needed = max(needed, int(run.blocks[-1]) + 1)
        if needed < blocks.stop:
            raise Unreachable(f"the server leased {blocks.stop} blocks without block {needed} of part {part.index}")
    return leased


def foreign_runs(
    form: BlockFormat, runs: Iterable[common_pb2.PartRun], missing: npt.NDArray[np.bool_], count: int
) -> list[SlotRun]:
    """The runs of an answer about opaque keys: of every part the same `count` of those that are `missing` yet (bool[n],
    which is changed).

    Raises Unreachable where the server contradicts itself.
    """
    leased = [_run(form, run, _consecutive(run.first_block, len(run.slots) // 4)) for run in runs]
    told = [_places(leased, part.index) for part in form.parts]
    places = told[0]
    if places.size != count or any(not np.array_equal(each, places) for each in told):
        raise Unreachable(f"the server leased other blocks than the {count} it told")
    promised = np.flatnonzero(missing)
    if not np.isin(places, promised).all() or np.unique(places).size != count:
        raise Unreachable("the server leased keys that it did not promise, or twice")
    missing[places] = False
    return leased


def _places(runs: Iterable[SlotRun], part: int) -> npt.NDArray[np.int64]:
    """All blocks of one part."""
    told = [run.blocks for run in runs if run.part == part]
    return np.concatenate(told) if told else np.empty(0, np.int64)


def granted_runs(form: BlockFormat, grants: Iterable[cache_pb2.PartGrant], blocks: range) -> list[SlotRun]:
    """The grants of a ReserveResponse to a request for `blocks`. Raises Unreachable as `leased_runs`."""
    runs = [_run(form, grant, np.frombuffer(_whole(grant.blocks, 4), "<u4").astype(np.int64)) for grant in grants]
    for run in runs:
        if run.count and not blocks.start <= int(run.blocks.min()) <= int(run.blocks.max()) < blocks.stop:
            raise Unreachable("the server granted blocks that were not asked for")
    return runs


def _consecutive(first: int, count: int) -> npt.NDArray[np.int64]:
    return np.arange(first, first + count, dtype=np.int64)


def _run(form: BlockFormat, item: common_pb2.PartRun | cache_pb2.PartGrant, blocks: npt.NDArray[np.int64]) -> SlotRun:
    slots = np.frombuffer(_whole(item.slots, 4), "<u4")
    generations = np.frombuffer(_whole(item.generations, 8), "<u8")
    if not blocks.size == slots.size == generations.size or item.part >= len(form.parts):
        raise Unreachable("the server's answer contradicts itself (blocks, slots, generations or part)")
    return SlotRun(item.part, item.pool, blocks, slots, generations)


def _whole(data: bytes, size: int) -> bytes:
    if len(data) % size:
        raise Unreachable(f"the server sent {len(data)} bytes for values of {size}")
    return data
