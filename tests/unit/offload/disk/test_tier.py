"""The tier as its owner sees it: queues, order, room, freeing, clearing, priorities, flush and many threads."""

from __future__ import annotations

import os
import random
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from prefixcache_offload.disk import ENTRY, DiskOptions, Outcome
from prefixcache_offload.disk.options import DiskCodec
from prefixcache_offload.disk.reader import group_neighbours
from prefixcache_offload.disk.records import PAGE, Kind, digest, record_pages
from tests.e2e.processes import wait_until
from tests.unit.offload.disk.fake_disk import FakeDisk
from tests.unit.offload.disk.log import PATH, SMALL, Job, Log, entries_of, memory_for, numbers_of, payload

MIB = 1 << 20
BIG = DiskOptions(cap_bytes=24 * MIB, segment_bytes=MIB, writers=3, readers=3, queue_bytes=MIB)


def test_order_in_the_log_is_the_order_of_writing_and_of_sequence() -> None:
    log = Log(FakeDisk())
    job = log.write(range(30))
    place = job.entries["segment"].astype(np.int64) << 32 | job.entries["page"]
    assert (np.diff(place) > 0).all()
    assert (np.diff(job.entries["sequence"].astype(np.int64)) > 0).all()


def test_a_batch_is_one_call_and_neighbours_are_read_with_one() -> None:
    disk = FakeDisk()
    log = Log(disk, replace(SMALL, segment_bytes=512 << 10, batch_bytes=256 << 10))
    calls = disk.counts["pwrite"]
    job = log.write(range(12))
    assert disk.counts["pwrite"] == calls + 1
    calls = disk.counts["pread"]
    assert log.check(job.entries[::-1]) == set(range(12)), "whatever order they are asked in"
    assert disk.counts["pread"] == calls + 1


def test_groups_end_at_segments_gaps_and_sizes_and_begin_with_the_first_wanted() -> None:
    entries = np.zeros(6, ENTRY)
    entries["length"] = PAGE
    entries["segment"] = [2, 2, 2, 2, 1, 2]
    entries["page"] = [0, 2, 6, 50, 9, 4]
    assert group_neighbours(entries, 1 << 20) == [[0, 1, 5, 2], [3], [4]]
    assert group_neighbours(entries[:3], 12 * PAGE) == [[0, 1, 2]]
    assert group_neighbours(entries[:3], 8 * PAGE) == [[0, 1], [2]], "the first bytes come early"
    sizes = [sum(int(entries["length"][i]) for i in group) for group in group_neighbours(entries, 2 * PAGE)]
    assert max(sizes) <= 2 * PAGE
    assert group_neighbours(entries, 1) == [[0], [1], [2], [3], [4], [5]]


def test_bytes_that_changed_in_memory_are_not_taken_for_the_block() -> None:
    disk = FakeDisk()
    log = Log(disk)
    entries = entries_of([3, 4, 5], log.namespace)
    memory, at = memory_for(entries)
    expected = np.zeros((3, 16), np.uint8)
    for i, (start, number) in enumerate(zip(at, (3, 4, 5), strict=True)):
        memory[start : start + len(payload(number))] = np.frombuffer(payload(number), np.uint8)
        expected[i] = np.frombuffer(digest(payload(number)), np.uint8) if number != 5 else 0
    memory[at[1] + 7] ^= 1
    job = Job(3)
    log.tier.write(1, memory, at, entries, job.done, expected)
    log.tier.pump()
    assert set(job.told) == {Outcome.OK}, "nobody looks before it is read"
    told, _ = log.read(job.entries)
    assert told.told == [Outcome.OK, Outcome.MISMATCH, Outcome.OK]
    for sealed in (False, True):
        after = Log(disk.after_kill())
        found = after.recover()
        told, _ = after.read(np.array([found[i] for i in range(len(found))]))
        assert [number for number, end in zip(numbers_of(found), told.told, strict=True) if end is Outcome.OK] == [5, 3]
        after.tier.close()
        if not sealed:
            log.tier.close()


def test_memory_that_is_not_on_pages_goes_through_a_copy() -> None:
    log = Log(FakeDisk())
    entries = entries_of([3, 4], log.namespace)
    memory = np.zeros(30000, np.uint8)
    at = [1, 6001]
    for start, number in zip(at, [3, 4], strict=True):
        memory[start : start + len(payload(number))] = np.frombuffer(payload(number), np.uint8)
    job = Job(2)
    log.tier.write(1, memory, at, entries, job.done)
    log.tier.pump()
    assert log.check(job.wait().entries) == {3, 4}
    target = np.full(30000, 7, np.uint8)
    back = Job(2)
    log.tier.read(1, target, at, job.entries, back.done)
    log.tier.pump()
    assert back.wait().told == [Outcome.OK] * 2
    assert np.array_equal(target[at[0] : at[0] + 5000], memory[at[0] : at[0] + 5000])
    assert (target[at[0] + 5000 : at[1]] == 7).all(), "nothing beside the payload is touched"


def test_places_outside_the_memory_are_refused() -> None:
    log = Log(FakeDisk())
    entries = entries_of([3], log.namespace)
    with pytest.raises(ValueError, match="write to"):
        log.tier.read(1, np.frombuffer(bytes(9000), np.uint8), [0], entries, Job(1).done)
    for at in ([-1], [PAGE], [0, 0]):
        with pytest.raises(ValueError, match=r"reaches out|places for"):
            log.tier.write(1, np.zeros(5001, np.uint8), at, entries, Job(1).done)


def test_a_full_queue_drops_and_counts() -> None:
    disk = FakeDisk()
    log = Log(disk, replace(SMALL, queue_bytes=16 << 10))
    entries = entries_of(range(12), log.namespace)
    memory, at = memory_for(entries)
    job = Job(12)
    log.tier.write(1, memory, at, entries, job.done)
    dropped = int((job.outcomes == Outcome.QUEUE_FULL).sum())
    assert dropped > 0
    assert log.tier.status().queued_write_bytes <= 16 << 10
    log.tier.pump()
    assert job.wait().told.count(Outcome.OK) == 12 - dropped
    assert log.tier.counters.writes[Outcome.QUEUE_FULL] == dropped


def test_a_record_larger_than_a_segment_has_no_room() -> None:
    log = Log(FakeDisk())
    entries = entries_of([0], log.namespace)
    entries["length"] = SMALL.segment_bytes
    job = Job(1)
    log.tier.write(1, np.zeros(SMALL.segment_bytes, np.uint8), [0], entries, job.done)
    assert job.told == [Outcome.NO_ROOM]


def test_a_full_log_says_no_room_and_freeing_makes_some() -> None:
    log = Log(FakeDisk())
    job = log.write(range(100))
    assert set(job.told) == {Outcome.OK, Outcome.NO_ROOM}
    status = log.tier.status()
    assert status.free_bytes < log.options.new_segment_bytes
    good = job.entries[[o is Outcome.OK for o in job.told]]
    first = int(good["segment"].min())
    keep = good[good["segment"] == first][:3]
    freed = log.free(first, keep)
    assert freed.freed, "the room kept back is for this"
    assert (freed.outcomes == Outcome.OK).all()
    assert log.check(freed.entries) == set(numbers_of(keep))
    assert log.read(keep)[0].told == [Outcome.GONE] * 3
    assert log.tier.status().used_bytes <= log.options.cap_bytes
    counters = log.tier.counters
    assert counters.again_bytes == int(keep["length"].sum())
    assert counters.write_amplification == pytest.approx(counters.device_bytes / counters.written_bytes)
    assert counters.device_bytes > counters.written_bytes + counters.again_bytes


def test_freeing_stops_where_the_disk_does_and_loses_nothing() -> None:
    disk = FakeDisk()
    log = Log(disk)
    job = log.write(range(12))
    first = job.entries[job.entries["segment"] == 1]
    disk.errors["pwrite"] = 5, 1
    freed = log.free(1, first)
    assert not freed.freed
    log.tier._shared.health.recovered()
    assert log.check(first) == set(numbers_of(first))
    assert log.free(1, first).freed


def test_freeing_what_is_not_recovered_yet_waits() -> None:
    """A segment nobody has looked into may hold what was cleared: forgetting that would bring it back."""
    disk = FakeDisk()
    log = Log(disk)
    log.write(range(12))
    log.tier.close()
    again = Log(disk.after_kill())
    assert not again.free(1, entries_of([])).freed
    assert len(again.recover()) == 12
    assert again.free(1, entries_of([])).freed
    assert again.free(99, entries_of([])).freed, "what is not there is free"


def test_an_open_segment_can_be_freed() -> None:
    disk = FakeDisk()
    log = Log(disk)
    job = log.write([0, 1])
    assert log.free(int(job.entries["segment"][0]), job.entries).freed
    assert set(log.write([2]).told) == {Outcome.OK}
    log.tier.close()
    assert set(numbers_of(Log(disk.after_kill()).recover())) == {0, 1, 2}


@pytest.mark.parametrize("what", ["keys", "namespace", "all"])
def test_clear_survives_restarts_and_the_freeing_of_its_own_segment(what: str) -> None:
    disk = FakeDisk()
    log = Log(disk)
    written = log.write(range(8))
    arguments = {"keys": ([2, 5], None), "namespace": ((), None), "all": ((), 0)}[what]
    expected = {0, 1, 3, 4, 6, 7} if what == "keys" else set()
    assert log.clear(*arguments).told == [Outcome.OK]
    log.write(range(8, 30))
    for restart in range(3):
        log.tier.close()
        disk = disk.after_kill()
        log = Log(disk)
        told = log.recover()
        assert {n for n in numbers_of(told) if n < 8} == expected
        assert restart or log.tier.recovery.counters.revoked == 8 - len(expected)
        # Free the segment that the tombstone lies in now, keeping what is in it.
        place = log.tier._shared.tombstones._all[0].segment
        assert place > int(written.entries["segment"].min())
        assert log.free(place, told[told["segment"] == place]).freed
    oldest = int(written.entries["segment"].min())
    for row in log.tier.segments():
        if row.number <= oldest + 1:
            assert log.free(row.number, entries_of([])).freed
    place = log.tier._shared.tombstones._all[0].segment
    assert log.free(place, entries_of([])).freed
    assert not len(log.tier._shared.tombstones), "nothing older is left: it is not carried on for ever"


def test_what_is_stored_again_after_a_clear_stays() -> None:
    disk = FakeDisk()
    log = Log(disk)
    log.write(range(4))
    log.clear(range(4))
    log.write([1, 2])
    log.tier.close()
    assert set(numbers_of(Log(disk.after_kill()).recover())) == {1, 2}


def test_a_clear_during_recovery_and_during_freeing_counts() -> None:
    disk = FakeDisk()
    log = Log(disk)
    job = log.write(range(12))
    log.tier.close()
    again = Log(disk.after_kill())
    again.tier.clear(again.namespace, np.zeros((0, 32), np.uint8), Job(1).done)
    assert not len(again.recover()), "also while it is on its way to the disk"
    log = Log(disk.after_kill())
    log.recover()
    ended = threading.Event()
    log.tier.free(1, job.entries[job.entries["segment"] == 1], lambda freed: ended.set())
    log.tier.clear(log.namespace, np.zeros((0, 32), np.uint8), Job(1).done)
    log.tier.pump()
    assert ended.is_set()
    log.tier.close()
    last = log.tier._shared.disk
    assert isinstance(last, FakeDisk)
    assert not len(Log(last.after_kill()).recover()), "appending again must not outlive the clear"


def test_live_bytes_follow_writes_drops_and_restarts() -> None:
    disk = FakeDisk()
    log = Log(disk)
    job = log.write(range(20))
    log.tier.drop(job.entries[:5])
    rows = {row.number: row for row in log.tier.segments()}
    left = job.entries[5:]
    for number, row in rows.items():
        mine = left[left["segment"] == number]
        assert (row.live_bytes, row.live_records) == (int(mine["length"].sum()), len(mine))
    assert log.tier.status().live_bytes == int(left["length"].sum())
    log.write(range(5))
    log.tier.close()
    again = Log(disk.after_kill())
    told = again.recover()
    assert len(told) == 20
    assert again.tier.recovery.counters.superseded == 5
    assert again.tier.status().live_bytes == int(told["length"].sum())


def test_recovery_goes_newest_first_beside_reads_and_writes() -> None:
    disk = FakeDisk()
    log = Log(disk)
    log.write(range(30))
    log.tier.close()
    again = Log(disk.after_kill())
    seen: list[int] = []
    for recovered in again.tier.recovery:
        seen += recovered.segments
        assert again.check(recovered.entries) == set(numbers_of(recovered.entries)), "served before the scan ends"
        assert set(again.write([100 + len(seen)]).told) == {Outcome.OK}
    assert seen == sorted(seen, reverse=True)
    assert recovered.left == 0


def test_cancelled_reads_end_and_those_begun_end_as_they_do() -> None:
    log = Log(FakeDisk())
    written = log.write(range(12))
    memory, at = memory_for(written.entries)
    job, other = Job(12), Job(12)
    log.tier.read(5, memory, at, written.entries, job.done)
    log.tier.read(6, memory.copy(), at, written.entries, other.done)
    log.tier.cancel(5)
    assert job.told == [Outcome.CANCELLED] * 12
    log.tier.pump()
    assert other.told == [Outcome.OK] * 12
    assert log.tier.status().queued_read_bytes == 0


def test_everything_ends_at_close() -> None:
    log = Log(FakeDisk())
    entries = entries_of(range(4), log.namespace)
    memory, at = memory_for(entries)
    written, read = Job(4), Job(4)
    log.tier.write(1, memory, at, entries, written.done)
    log.tier.read(2, memory, at, entries, read.done)
    assert log.tier.close(drain=False)
    assert read.told == [Outcome.SHUT_DOWN] * 4
    assert written.told == [Outcome.SHUT_DOWN] * 4
    late = Job(4)
    log.tier.write(3, memory, at, entries, late.done)
    assert late.told == [Outcome.SHUT_DOWN] * 4


def test_reads_go_before_writes() -> None:
    """While a read is in the kernel, a write waits for it, but not for ever."""
    disk = FakeDisk()
    log = Log(disk, replace(SMALL, writers=1, readers=1, write_patience_s=1000.0))
    written = log.write(range(2))
    disk.hang("pread")
    memory, at = memory_for(written.entries)
    read = Job(2)
    log.tier.read(1, memory, at, written.entries, read.done)
    assert disk.wait_for_hanging("pread")
    calls = disk.counts["pwrite"]
    entries = entries_of(range(2, 4), log.namespace)
    behind = Job(2)
    log.tier.write(2, *memory_for(entries), entries, behind.done)
    with log.tier._shared.lock:
        assert disk.counts["pwrite"] == calls
    disk.let_go()
    assert read.wait().told == [Outcome.OK] * 2
    assert behind.wait().told == [Outcome.OK] * 2
    log.tier.close()


def test_flush_waits_for_what_was_submitted_and_syncs_it() -> None:
    disk = FakeDisk()
    log = Log(disk)
    entries = entries_of(range(4), log.namespace)
    memory, at = memory_for(entries)
    job = Job(4)
    log.tier.write(1, memory, at, entries, job.done)
    assert log.tier.flush(1.0)
    assert job.told == [Outcome.OK] * 4
    file = disk.files[f"{PATH}/segment-00000001"]
    assert file.synced == bytes(file.data)
    disk.errors["sync"] = 5, 1
    log.write([9])
    assert not log.tier.flush(1.0)


def test_kinds_cannot_be_chosen_by_the_caller() -> None:
    log = Log(FakeDisk())
    entries = entries_of([0], log.namespace)
    entries["kind"] = Kind.TOMBSTONE
    job = Job(1)
    log.tier.write(1, *memory_for(entries), entries, job.done)
    log.tier.pump()
    assert job.wait().entries["kind"][0] == Kind.BLOCK


def test_whoever_writes_or_packs_lets_others_have_the_core_first(tmp_path: Path) -> None:
    log = Log(None, replace(BIG, codec=DiskCodec.LOSSLESS), str(tmp_path / "data"))
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def niceness() -> dict[str, int]:
        return {
            each.name.rpartition("-")[0]: os.getpriority(os.PRIO_PROCESS, each.native_id or 0)
            for each in log.tier._threads
        }

    try:
        assert wait_until(lambda: niceness() == {"disk-write": max(own, 5), "disk-read": own, "disk-pack": 19})
    finally:
        log.tier.close()


@pytest.mark.slow
def test_a_storm_of_threads_keeps_every_promise(tmp_path: Path) -> None:
    """Writers, readers and a cleaner on a real directory; every end once, every byte right, the cap held."""
    log = Log(None, BIG, str(tmp_path / "data"))
    lock, known, failed = threading.Lock(), {}, []
    until = time.monotonic() + 3.0

    def goes_on() -> bool:
        """For three seconds; on a machine that is busy elsewhere until something was freed."""
        now = time.monotonic()
        return now < until or (not log.tier.counters.freed_segments and now < until + 60.0)

    def write(first: int) -> None:
        number = first
        while goes_on():
            job = log.write(range(number, number + 16))
            with lock:
                known.update({number + i: job.entries[i] for i, told in enumerate(job.told) if told is Outcome.OK})
            number += 16

    def read(seed: int) -> None:
        chance = random.Random(seed)
        while goes_on():
            with lock:
                some = chance.sample(list(known.values()), min(len(known), 24))
            if some:
                log.check(np.array(some))

    def clean() -> None:
        while goes_on():
            status = log.tier.status()
            if status.used_bytes > BIG.cap_bytes:
                failed.append(status)
            if status.free_bytes >= 4 * MIB:
                continue
            oldest = log.tier.segments()[0]
            with lock:
                mine = {n: e for n, e in known.items() if e["segment"] == oldest.number}
            keep = {n: e for n, e in mine.items() if n % 8 == 0}
            freed = log.free(oldest.number, np.array(list(keep.values()) or np.zeros(0, ENTRY)))
            with lock:
                for n in mine:
                    del known[n]
                known.update({n: e for n, e, o in zip(keep, freed.entries, freed.outcomes, strict=True) if not o})

    threads = [threading.Thread(target=write, args=(n * 10**6,)) for n in range(2)]
    threads += [threading.Thread(target=read, args=(n,)) for n in range(2)]
    threads += [threading.Thread(target=clean)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert log.tier.counters.freed_segments > 0
    assert log.check(np.array(list(known.values()))) == set(known)
    assert log.tier.close()
    again = Log(None, BIG, str(tmp_path / "data"))
    told = again.recover()
    assert set(known) <= set(numbers_of(told))
    assert again.check(told) == set(numbers_of(told))
    again.tier.close()


def test_restart_of_100_000_blocks_takes_under_a_second(tmp_path: Path) -> None:
    """Footers alone: 400 segments of 250 blocks, made of holes so that no data is written."""
    from prefixcache_offload.disk.directory import segment_name
    from prefixcache_offload.disk.records import make_footer

    options = DiskOptions(cap_bytes=1 << 40, segment_bytes=1 << 30, writers=0, readers=0)
    log = Log(None, options, str(tmp_path))
    nonce = log.tier._shared.directory.nonce
    log.tier.close()
    keys = np.random.default_rng(1).integers(256, size=(100_000, 32), dtype=np.uint8)
    for number in range(1, 401):
        entries = np.zeros(250, ENTRY)
        entries["key"] = keys[250 * (number - 1) : 250 * number]
        entries["namespace"], entries["segment"], entries["kind"], entries["length"] = 1, number, Kind.BLOCK, 2 * MIB
        entries["page"] = np.cumsum(record_pages(entries)) - record_pages(entries)
        entries["sequence"] = np.arange(250) + 250 * number
        end = int(record_pages(entries).sum())
        with open(tmp_path / segment_name(number), "wb") as file:
            file.seek(end * PAGE)
            file.write(make_footer(entries, number, end, nonce))
    again = Log(None, options, str(tmp_path))
    start = time.thread_time()
    assert len(again.recover()) == 100_000
    assert time.thread_time() - start < 1.0, "CPU time, because the machine may be busy with other things"
    again.tier.close()
