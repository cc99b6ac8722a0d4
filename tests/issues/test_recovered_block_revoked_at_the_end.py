"""A block whose parts were told apart within one segment, another block's between them, was whole with the first and
then begun anew with the second; at the end that beginning counted as an orphan and its key was revoked on disk, so the
next restart lost a block that this one served."""

from __future__ import annotations

import numpy as np

from prefixcache.core.commands import RevokeRecords
from prefixcache.core.events import DiskChanged, DiskRecovered, RecoveryDone
from prefixcache.core.ids import KEY_BYTES, GroupKind
from prefixcache.core.reasons import DiskDrop
from prefixcache.core.spec import DiskSpec, GroupSpec, NamespaceSpec, PartSpec
from tests.unit.core.disk_harness import DiskHarness
from tests.unit.core.harness import Harness, chain

WITH_STATES = NamespaceSpec(
    4, (GroupSpec(GroupKind.FULL), GroupSpec(GroupKind.STATE)), (PartSpec(0, 1, 4096), PartSpec(1, 1, 4096))
)


class Recovering(DiskHarness):
    def __init__(self) -> None:
        self.orders, self.arrivals = [], []
        self.written, self.per_segment, self.room_bytes = 0, 64, 1 << 40
        Harness.__init__(self, 16, 4, WITH_STATES, disk=DiskSpec(reserve_share=0.0))
        self.send(DiskChanged(reads_on=True, writes_on=True))


def test_parts_of_a_block_may_come_apart() -> None:
    harness = Recovering()
    keys = chain("ab")
    first, second = keys[:KEY_BYTES], keys[KEY_BYTES:]
    # Newest first: the second block's full part, both parts of the first, the second's state.
    told = (
        (second, first, 1, 0),
        (first, bytes(KEY_BYTES), 0, 1),
        (first, bytes(KEY_BYTES), 0, 0),
        (second, first, 1, 1),
    )
    event = DiskRecovered(
        1,
        np.array([part for *_, part in told], np.uint16),
        np.ones(len(told), np.uint32),
        np.array([8, 6, 4, 2], np.uint32),
        b"".join(key for key, *_ in told),
        b"".join(parent for _, parent, *_ in told),
        np.array([depth for _, _, depth, _ in told], np.uint32),
    )
    harness.send(event)
    out = harness.send(RecoveryDone(complete=True))
    stats = harness.planner.state.stats
    assert not [each for each in out if isinstance(each, RevokeRecords)]
    assert stats.blocks_recovered == 2
    assert stats.disk_drops[DiskDrop.ORPHANED] == 0
    space = harness.planner.state.namespaces[1]
    assert all((part.segments[:2] == 1).all() for part in space.table.parts)
