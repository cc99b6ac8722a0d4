"""DescribePrefix: block by block, where a prefix lies, who holds it, how long ago it was used.

Reads the planner's state inside the owner's lock; changes nothing, not even the order of eviction. Cost grows with the
prefix and with the number of leases.
"""

import bisect
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import numpy as np

from prefixcache.core.ids import Rows
from prefixcache.core.leases import Lease
from prefixcache.core.namespaces import Namespace
from prefixcache.core.planner import Planner
from prefixcache.core.radix import ROW_DTYPE, Node, Path
from prefixcache.v1 import admin_pb2 as pb
from prefixcache.v1 import common_pb2 as common

_MOST_SAMPLES: Final = 4096


class TickTimes:
    """When which tick was: the planner counts events, people think in seconds.

    Samples are kept for ever, thinned out by half (the older ones more often) when there are many, so that an idle time
    is right within a few percent of itself.
    """

    def __init__(self) -> None:
        self._ticks: list[int] = []
        self._times: list[float] = []

    def note(self, tick: int, now: float) -> None:
        """It is `now`, and the planner has seen `tick` events."""
        if self._ticks and tick <= self._ticks[-1]:
            return
        self._ticks.append(tick)
        self._times.append(now)
        if len(self._ticks) > _MOST_SAMPLES:
            half = len(self._ticks) // 2
            self._ticks[:half] = self._ticks[:half:2]
            self._times[:half] = self._times[:half:2]

    def time_of(self, tick: int) -> float | None:
        """The earliest noted time at which `tick` had happened; None when it is newer than the last note."""
        at = bisect.bisect_left(self._ticks, tick)
        return self._times[at] if at < len(self._times) else None


def describe_blocks(
    planner: Planner, namespace: int, keys: bytes, idle_of: Callable[[int], float]
) -> Iterator[pb.BlockDescription]:
    """The visible blocks of a prefix, from block 0. `idle_of(tick)` answers seconds."""
    space = planner.state.namespaces[namespace]
    if space.foreign is not None:
        return
    path = space.tree.walk(keys)
    rows = np.frombuffer(path.packed_rows(), ROW_DTYPE)
    leases = _leases_by_block(path, planner.state.leases.values())
    tiers = _tiers(space, rows)
    for block, tick in enumerate(space.table.touched[rows].tolist()):
        yield pb.BlockDescription(block=block, tiers=tiers[block], leases=leases[block], idle_s=max(idle_of(tick), 0.0))


def _tiers(space: Namespace, rows: Rows) -> list[list[common.Tier.ValueType]]:
    """Which tiers hold each block: all its full parts at least."""
    if not space.on_disk and not space.copies:
        return [[common.TIER_HOST]] * len(rows)
    on_gpu = np.zeros(len(rows), np.bool_)
    for _, copies in space.copies:
        on_gpu |= copies.held(rows)
    in_memory, on_disk = np.ones(len(rows), np.bool_), np.zeros(len(rows), np.bool_)
    if space.on_disk:
        in_memory = ~space.table.cold[rows]
        on_disk = space.table.is_clean(rows) & space.table.is_recorded(rows)
    return [
        [common.TIER_GPU] * gpu + [common.TIER_HOST] * memory + [common.TIER_DISK] * disk
        for gpu, memory, disk in zip(on_gpu.tolist(), in_memory.tolist(), on_disk.tolist(), strict=True)
    ]


def _leases_by_block(path: Path, leases: Iterable[Lease]) -> list[int]:
    """For each block of the path: leases whose prefix includes it."""
    on_path = {node: node.end for node in path.nodes}
    ends = [0] * (path.blocks + 1)
    for lease in leases:
        for pin in lease.pins:
            ends[min(_shared_blocks(pin.node, pin.depth, on_path), path.blocks)] += 1
    counts, running = [0] * path.blocks, 0
    for block in range(path.blocks - 1, -1, -1):
        running += ends[block + 1]
        counts[block] = running
    return counts


def _shared_blocks(node: Node, depth: int, on_path: dict[Node, int]) -> int:
    """How many blocks from the root a pinned prefix has in common with the path."""
    here: Node | None = node
    while here is not None:
        if here in on_path:
            return min(depth, on_path[here])
        here = here.parent
    return 0
