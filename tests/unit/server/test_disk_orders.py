"""Orders about records become jobs of the log, and the ends of those become events."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from prefixcache.core import commands as c
from prefixcache.core import events as e
from prefixcache.server.disk_orders import DiskOrders
from prefixcache_offload.disk import ENTRY, Outcome
from prefixcache_offload.disk.shared import Ended


class FakeTier:
    """Keeps what it was told to do; `done` is the caller's end of it."""

    free_bytes = 7

    def write(self, job: int, memory: Any, at: Any, entries: Any, done: Any, expected: Any) -> None:
        self.done = done

    read = write


def records(count: int) -> c.Records:
    numbers = np.arange(count, dtype=np.uint32)
    return c.Records(
        1, np.zeros(count, np.uint16), numbers, numbers, numbers, numbers, b"k" * 32 * count, b"p" * 32 * count, numbers
    )


def made() -> tuple[DiskOrders, FakeTier, list[e.Event]]:
    """Orders of one namespace over a fake tier, and the events they tell."""
    events: list[e.Event] = []
    part = SimpleNamespace(size_bytes=4096, group=0)
    namespace = SimpleNamespace(spec=SimpleNamespace(parts=(part,), groups=(0,)), value_bytes=(2,))
    shell: Any = SimpleNamespace(namespaces={1: namespace}, background=SimpleNamespace(post=events.append))
    report: Any = SimpleNamespace()
    orders = DiskOrders(np.zeros(1 << 20, np.uint8), report, lambda: None)
    tier: Any = FakeTier()
    orders.shell, orders.tier, orders.names = shell, tier, {1: 1}
    return orders, tier, events


def told(which: list[int], outcomes: list[Outcome], left: int) -> Ended:
    entries = np.zeros(len(which), ENTRY)
    entries["segment"], entries["page"] = 3, np.array(which) * 2
    return Ended(5, np.array(which), np.array(outcomes, np.uint8), entries, left)


def test_a_write_is_one_event_however_many_batches_it_took() -> None:
    orders, tier, events = made()
    orders._write(c.WriteRecords(5, 0, records(3), np.zeros((3, 16), np.uint8)))
    tier.done(told([2], [Outcome.OK], 2))
    assert not events
    tier.done(told([0, 1], [Outcome.NO_ROOM, Outcome.MISMATCH], 0))
    (event,) = events
    assert isinstance(event, e.RecordsWritten)
    assert (event.job, event.room_bytes) == (5, 7)
    assert event.index.tolist() == [2, 0, 1]
    assert event.ends.tolist() == [e.WriteEnd.OK, e.WriteEnd.NO_ROOM, e.WriteEnd.CORRUPT]
    assert (event.segments.tolist(), event.pages.tolist()) == ([3, 3, 3], [4, 0, 2])


def test_a_read_is_an_event_a_call_so_that_the_first_blocks_come_early() -> None:
    orders, tier, events = made()
    tier.read = lambda job, memory, at, entries, done: setattr(tier, "done", done)
    orders._read(c.ReadRecords(5, 0, records(4)))
    tier.done(told([0, 1], [Outcome.OK, Outcome.MISMATCH], 2))
    tier.done(told([2, 3], [Outcome.UNKNOWN_CODEC, Outcome.IO_ERROR], 0))
    ends = [event.ends.tolist() for event in events if isinstance(event, e.RecordsRead)]
    assert ends == [[e.ReadEnd.OK, e.ReadEnd.LOST], [e.ReadEnd.LOST, e.ReadEnd.FAILED]]


def test_what_a_read_ends_at_once_is_told_behind_the_planners_other_orders() -> None:
    orders, tier, events = made()
    off = told([0, 1], [Outcome.TIER_OFF, Outcome.TIER_OFF], 0)
    tier.read = lambda job, memory, at, entries, done: done(off)
    orders._read(c.ReadRecords(5, 0, records(2)))
    orders.tier = None
    orders._read(c.ReadRecords(6, 0, records(2)))
    assert not events
    orders._worker.start()
    assert orders.pass_all()
    orders.stop()
    assert [(event.job, event.ends.tolist()) for event in events if isinstance(event, e.RecordsRead)] == [
        (5, [e.ReadEnd.FAILED] * 2),
        (6, [e.ReadEnd.FAILED] * 2),
    ]
