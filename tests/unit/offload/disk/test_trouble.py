"""A full, failing, hanging, vanishing or read-only disk: off with a reason, every job ended, and on again by itself."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from prefixcache_offload.disk import DiskOptions, DiskRefused, Outcome, Refusal, Trouble
from prefixcache_offload.disk.health import HealthReport
from tests.unit.offload.disk.fake_disk import FakeDisk, File
from tests.unit.offload.disk.log import PATH, SMALL, TIMEOUT_S, Job, Log, entries_of, key, memory_for

THREADS = replace(SMALL, writers=2, readers=2, stall_s=0.2, retry_s=0.05, retry_max_s=0.2)
EVERY_TIME = -1


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def health(log: Log) -> HealthReport:
    return log.tier.status().health


def retry(log: Log) -> None:
    """Let the pause pass, then look once."""
    log.tier._shared.health._retry_at = 0.0
    log.tier.pump()


def test_full_file_system_stops_writes_only_and_is_tried_again() -> None:
    disk = FakeDisk()
    log = Log(disk)
    first = log.write(range(4))
    disk.free_bytes = disk.total_bytes
    more = log.write(range(4, 12))
    assert Outcome.OK in more.told, "the open segment takes what it has room for"
    assert {Outcome.OK, Outcome.TIER_OFF} == set(more.told)
    assert (health(log).writes_off, health(log).reads_off) == (Trouble.NO_SPACE, None)
    assert log.check(first.entries) == set(range(4)), "what is there is served"
    assert set(log.write([20]).told) == {Outcome.TIER_OFF}
    retry(log)
    assert health(log).writes_off is Trouble.NO_SPACE, "nothing has changed"
    disk.free_bytes = 1 << 40
    retry(log)
    assert health(log).writes_off is None
    assert set(log.write([20]).told) == {Outcome.OK}
    log.tier.close()


@pytest.mark.parametrize(
    ("code", "outcome", "trouble"),
    [
        (errno.ENOSPC, Outcome.NO_SPACE, Trouble.NO_SPACE),
        (errno.EIO, Outcome.IO_ERROR, Trouble.IO_ERROR),
        (errno.EROFS, Outcome.IO_ERROR, Trouble.READ_ONLY),
    ],
)
def test_a_write_that_fails_ends_its_records_and_loses_no_other(code: int, outcome: Outcome, trouble: Trouble) -> None:
    disk = FakeDisk()
    log = Log(disk)
    before = log.write(range(3))
    disk.errors["pwrite"] = code, 1
    failed = log.write([3])
    assert failed.told == [outcome]
    assert health(log).writes_off is trouble
    retry(log)
    after = log.write(range(4, 6))
    assert set(after.told) == {Outcome.OK}
    told = Log(disk.after_kill()).recover()
    assert {int(n) for n in told["depth"]} == {0, 1, 2, 4, 5}
    assert log.check(np.concatenate([before.entries, after.entries])) == {0, 1, 2, 4, 5}


def test_a_segment_that_cannot_be_sealed_is_scanned_at_the_next_start() -> None:
    disk = FakeDisk()
    log = Log(disk)
    log.write(range(3))
    disk.errors["truncate"] = errno.EIO, 1
    log.tier.close()
    assert log.tier.counters.seals_failed == 1
    again = Log(disk.after_kill())
    assert {int(n) for n in again.recover()["depth"]} == {0, 1, 2}
    assert again.tier.recovery.counters.scanned == 1


def test_one_bad_sector_is_a_miss_and_several_in_a_row_are_a_bad_disk() -> None:
    disk = FakeDisk()
    log = Log(disk)
    job = log.write([0])
    disk.errors["pread"] = errno.EIO, 1
    assert log.read(job.entries)[0].told == [Outcome.IO_ERROR]
    assert not health(log).reads_off
    assert log.check(job.entries) == {0}
    disk.errors["pread"] = errno.EIO, EVERY_TIME
    for _ in range(SMALL.read_errors_until_off):
        assert log.read(job.entries)[0].told == [Outcome.IO_ERROR]
    assert log.read(job.entries)[0].told == [Outcome.TIER_OFF]
    assert health(log).reads_off is Trouble.IO_ERROR
    retry(log)
    assert health(log).reads_off is Trouble.IO_ERROR, "the probe cannot read back what it wrote"
    disk.errors.clear()
    retry(log)
    assert log.check(job.entries) == {0}


@pytest.mark.parametrize("how", ["names gone", "another inode"])
def test_a_directory_that_vanishes(how: str) -> None:
    disk = FakeDisk()
    log = Log(disk)
    job = log.write(range(3))
    files, inode = dict(disk.files), disk.inode
    if how == "names gone":
        disk.files.clear()
    else:
        disk.inode = 2
    log.tier.pump()
    assert health(log).reads_off is Trouble.DIRECTORY_GONE
    assert set(log.write([5]).told) == {Outcome.TIER_OFF}
    retry(log)
    assert health(log).reads_off is Trouble.DIRECTORY_GONE
    disk.files.update(files)
    disk.inode = inode
    retry(log)
    assert log.check(job.entries) == {0, 1, 2}


def test_a_file_system_that_turns_read_only() -> None:
    disk = FakeDisk()
    log = Log(disk)
    job = log.write(range(3))
    disk.read_only = True
    log.tier.pump()
    assert (health(log).writes_off, health(log).reads_off) == (Trouble.READ_ONLY, None)
    assert log.check(job.entries) == {0, 1, 2}
    disk.read_only = False
    retry(log)
    assert set(log.write([5]).told) == {Outcome.OK}


def test_short_calls_are_carried_on() -> None:
    disk = FakeDisk()
    log = Log(disk)
    disk.most_bytes = 4096
    job = log.write(range(12))
    assert set(job.told) == {Outcome.OK}
    assert log.check(job.entries) == set(range(12))


@pytest.mark.parametrize("kind", ["pread", "pwrite", "allocate", "space"])
def test_a_call_that_hangs_turns_the_tier_off_and_its_return_turns_it_on(kind: str) -> None:
    disk = FakeDisk()
    log = Log(disk, THREADS)
    told: list[HealthReport] = []
    stalled = threading.Event()

    def changed(report: HealthReport) -> None:
        told.append(report)
        if report.writes_off is Trouble.STALLED:
            stalled.set()

    log.tier.watch(changed)
    written = log.write(range(4))
    disk.hang(kind)
    memory, at = memory_for(written.entries)
    begun = [Job(4), Job(4)]
    log.tier.read(7, memory, at, written.entries, begun[0].done)
    fresh = entries_of(range(8, 12))
    log.tier.write(8, *memory_for(fresh), fresh, begun[1].done)
    assert disk.wait_for_hanging(kind)
    assert stalled.wait(TIMEOUT_S)
    refused = Job(4)
    log.tier.read(9, memory, at, written.entries, refused.done)
    assert refused.wait().told == [Outcome.TIER_OFF] * 4
    if kind == "pread":
        assert log.tier.hanging() == {7}
        assert not begun[0].finished.is_set(), "memory that the kernel may still write to is not given back"
    disk.let_go()
    for job in begun:
        job.wait()
    wait_until(lambda: not health(log).writes_off)
    assert log.check(written.entries) == set(range(4))
    assert told[0].writes_off is Trouble.STALLED
    assert log.tier.close()


def test_closing_while_a_read_hangs_says_so() -> None:
    disk = FakeDisk()
    log = Log(disk, THREADS)
    written = log.write(range(4))
    disk.hang("pread")
    memory, at = memory_for(written.entries)
    job = Job(4)
    log.tier.read(1, memory, at, written.entries, job.done)
    assert disk.wait_for_hanging("pread")
    assert not log.tier.close(0.05)
    disk.let_go()
    job.wait()
    assert log.tier.close()


def test_a_thread_that_dies_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(threading, "excepthook", seen.append)
    log = Log(FakeDisk(), THREADS)

    def broken(_: object) -> None:
        raise RuntimeError("a bug of the caller")

    memory, at = memory_for(entries_of([0]))
    log.tier.write(1, memory, at, entries_of([0]), broken)
    wait_until(lambda: health(log).writes_off is Trouble.THREAD_DIED)
    assert not log.tier.status().threads_alive
    assert set(log.write([1]).told) == {Outcome.TIER_OFF}
    wait_until(lambda: bool(seen))
    log.tier.close()


# --- real file systems ---------------------------------------------------------------------------------------------


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts a file system in memory; needs root, and a kernel that lets it."""
    points: list[Path] = []

    def mount(kind: str, options: str = "") -> Path:
        if os.geteuid() != 0:
            pytest.skip("mounting needs root; the same is injected at the seam above")
        point = tmp_path / kind
        point.mkdir()
        line = ["mount", "-t", kind, *(["-o", options] if options else []), "none", str(point)]
        if subprocess.run(line, capture_output=True, check=False).returncode:
            pytest.skip(f"{kind} cannot be mounted here; the same is injected at the seam above")
        points.append(point)
        return point

    yield mount
    for point in points:
        subprocess.run(["umount", "-l", str(point)], check=True)


def test_ramfs_refuses_direct_calls_and_works_without(mounted: Callable[..., Path]) -> None:
    point = mounted("ramfs")
    log = Log(None, SMALL, str(point))
    assert not log.tier.status().direct
    job = log.write(range(20))
    assert log.check(job.entries) == set(range(20))
    log.tier.close()
    again = Log(None, SMALL, str(point))
    told = again.recover()
    assert again.check(told) == set(range(20))
    again.tier.close()


def test_a_tmpfs_of_one_mib_fills_up(mounted: Callable[..., Path]) -> None:
    point = mounted("tmpfs", "size=1m")
    options = DiskOptions(cap_bytes=4 << 20, segment_bytes=128 << 10, writers=0, readers=0)
    log = Log(None, options, str(point))
    job = log.write(range(400))
    stored = {n for n, o in enumerate(job.told) if o is Outcome.OK}
    assert 20 < len(stored) < 400
    assert health(log).writes_off is Trouble.NO_SPACE
    good = job.entries[[o is Outcome.OK for o in job.told]]
    assert log.check(good) == stored
    number = log.tier.segments()[0].number
    assert log.free(number, entries_of([])).freed
    retry(log)
    assert set(log.write([500]).told) == {Outcome.OK}
    log.tier.close()


def test_a_full_disk_at_the_start_is_refused_with_a_reason() -> None:
    disk = FakeDisk()
    disk.errors["pwrite"] = errno.ENOSPC, EVERY_TIME
    with pytest.raises(DiskRefused) as told:
        Log(disk)
    assert told.value.reason is Refusal.UNUSABLE
    disk.errors.clear()
    Log(disk).tier.close()


def test_direct_calls_refused_at_the_first_write_only() -> None:
    disk = FakeDisk(direct="refused_at_write")
    log = Log(disk)
    assert not log.tier.status().direct
    assert log.check(log.write(range(9)).entries) == set(range(9))


def test_a_segment_deleted_by_hand_is_a_miss() -> None:
    disk = FakeDisk()
    log = Log(disk)
    log.write(range(20))
    log.tier.close()
    found = disk.after_kill()
    del found.files[f"{PATH}/segment-00000002"]
    found.files[f"{PATH}/segment-zzz"] = File()
    again = Log(found)
    told = again.recover()
    assert 0 < len(told) < 20
    lost = entries_of([5], again.namespace)
    lost["segment"], lost["page"] = 2, 0
    assert again.read(lost)[0].told == [Outcome.GONE]
    assert again.check(told) == {int(n) for n in told["depth"]}
    assert key(1) == told["key"][list(told["depth"]).index(1)].tobytes()
