"""What an earlier run left on disk: served as soon as its chain is known, dropped and counted where it never is."""

from __future__ import annotations

import numpy as np

from prefixcache.core.commands import FreeSegment, RevokeRecords
from prefixcache.core.events import ClearRequested, DiskChanged, DiskRecovered, RecoveryDone
from prefixcache.core.ids import KEY_BYTES
from prefixcache.core.reasons import DiskDrop
from prefixcache.core.spec import DiskSpec
from tests.unit.core.disk_harness import DiskHarness
from tests.unit.core.harness import Harness, chain

WAIT = 100.0


class Recovering(DiskHarness):
    """A planner that has just been started over a disk."""

    def __init__(self) -> None:
        self.orders, self.arrivals = [], []
        self.written, self.per_segment, self.room_bytes = 0, 64, 1 << 40
        Harness.__init__(self, 16, 4, disk=DiskSpec(reserve_share=0.0))
        self.send(DiskChanged(reads_on=True, writes_on=True))

    def tell(self, segment: int, letters: str, first: int = 0) -> None:
        """Blocks of a prompt from `first` on, the newest (deepest) first."""
        keys, count = chain(letters), len(letters)
        order = range(count - 1, first - 1, -1)
        own = [keys[at * KEY_BYTES : (at + 1) * KEY_BYTES] for at in order]
        parents = [keys[(at - 1) * KEY_BYTES : at * KEY_BYTES] or bytes(KEY_BYTES) for at in order]
        pages, depths = np.array([at * 2 for at in order], np.uint32), np.array(list(order), np.uint32)
        parts = np.zeros(len(own), np.uint16)
        segments = np.full(len(own), segment, np.uint32)
        self.send(DiskRecovered(1, parts, segments, pages, b"".join(own), b"".join(parents), depths))

    def found(self, letters: str) -> int:
        return self.acquire(letters, deadline_s=WAIT).planned_blocks


def test_a_whole_chain_is_served_before_the_rest_is_read() -> None:
    harness = Recovering()
    harness.tell(9, "abcd")
    assert harness.found("abcd") == 4
    assert not harness.planner.state.disk.recovered


def test_what_lacks_its_front_waits_for_it() -> None:
    harness = Recovering()
    harness.tell(9, "abcdef", first=3)
    assert harness.found("abcdef") == 0
    harness.tell(8, "abc")
    assert harness.found("abcdef") == 6
    assert harness.planner.state.stats.blocks_recovered == 6


def test_branches_come_back_as_branches() -> None:
    harness = Recovering()
    harness.tell(9, "abxy", first=2)
    harness.tell(8, "abcd")
    assert (harness.found("abcd"), harness.found("abxy")) == (4, 4)
    assert harness.planner.state.namespaces[1].table.used == 6


def test_orphans_are_dropped_and_counted_at_the_end() -> None:
    harness = Recovering()
    harness.tell(9, "abcdef", first=3)
    harness.send(RecoveryDone())
    assert harness.planner.state.stats.disk_drops[DiskDrop.ORPHANED] == 3
    assert harness.planner.state.disk.recovered
    harness.tell(8, "abc")  # nothing is taken any more
    assert harness.found("abcdef") == 0


def test_a_full_disk_is_known_before_a_write_fails() -> None:
    harness = Recovering()
    harness.tell(8, "abcd")
    harness.send(DiskRecovered(0, *[np.zeros(0, np.uint16)] * 3, b"", b"", np.zeros(0, np.uint32), empty=(7,)))
    harness.send(RecoveryDone(room_bytes=0))
    harness.pass_time(0.1)
    assert [order.segment for order in harness.take(FreeSegment)] == [7], "the one in which nothing is"


def test_blocks_that_were_stored_again_meanwhile_are_on_disk_all_the_same() -> None:
    harness = Recovering()
    harness.store("abcd")
    harness.tell(9, "abcdef")
    assert harness.planner.state.namespaces[1].table.clean_count == 6
    acquired = harness.acquire("abcdef", deadline_s=WAIT)
    assert (acquired.planned_blocks, acquired.ready_blocks) == (6, 4)


def test_what_was_cleared_since_the_start_does_not_come_back() -> None:
    harness = Recovering()
    harness.send(ClearRequested(1, chain("abc")))
    harness.tell(9, "abcdef")
    assert harness.found("abcdef") == 2
    harness.send(RecoveryDone())
    (revoked,) = [command for command in harness.all if isinstance(command, RevokeRecords)]
    below = {chain("abcdef")[at * KEY_BYTES : (at + 1) * KEY_BYTES] for at in (3, 4, 5)}
    assert {revoked.keys[at : at + KEY_BYTES] for at in range(0, len(revoked.keys), KEY_BYTES)} == below


def test_a_cleared_namespace_does_not_come_back() -> None:
    harness = Recovering()
    harness.tell(9, "abcdef", first=3)
    harness.send(ClearRequested())
    harness.tell(8, "abc")
    assert harness.found("abcdef") == 0


def test_a_block_needs_all_its_parts() -> None:
    harness = Recovering()
    keys = chain("a")
    one = np.zeros(1, np.uint32)
    harness.send(DiskRecovered(1, np.array([7], np.uint16), one + 9, one, keys, bytes(32), one))  # there is no part 7
    assert harness.found("a") == 0


def test_a_namespace_nobody_knows_is_left_alone() -> None:
    harness = Recovering()
    one = np.zeros(1, np.uint32)
    harness.send(DiskRecovered(77, np.zeros(1, np.uint16), one + 9, one, chain("a"), bytes(32), one))
    assert 9 in harness.planner.state.disk.segments  # it takes room all the same
