"""A crash at every changing call of a story that writes, rolls, seals, clears, frees with re-appending and restarts.

After each: no record is told that is not whole and right; whatever had ended well is there; what had been cleared is
not; files keep under the cap; and the log goes on working.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from prefixcache_offload.disk import DiskOptions, Outcome
from tests.unit.offload.disk.fake_disk import Crash, Crashed, FakeDisk
from tests.unit.offload.disk.log import Log, entries_of, numbers_of

OPTIONS = DiskOptions(cap_bytes=448 << 10, segment_bytes=64 << 10, writers=0, readers=0, batch_bytes=16 << 10)


@dataclass
class Truth:
    """What must, and what may be found after a crash."""

    stored: set[int] = field(default_factory=set)
    asked: set[int] = field(default_factory=set)
    cleared: set[int] = field(default_factory=set)
    clearing: set[int] = field(default_factory=set)


def write(log: Log, truth: Truth, numbers: range) -> dict[int, np.void]:
    truth.asked |= set(numbers)
    job = log.write(numbers)
    done = {n: job.entries[i] for i, n in enumerate(numbers) if job.told[i] is Outcome.OK}
    truth.stored |= set(done)
    return done


def clear(log: Log, truth: Truth, numbers: set[int]) -> None:
    truth.clearing |= numbers
    truth.stored -= numbers
    if log.clear(sorted(numbers)).told == [Outcome.OK]:
        truth.cleared |= numbers


def story(disk: FakeDisk, truth: Truth) -> None:
    """Small, and every kind of step is in it."""
    log = Log(disk, OPTIONS)
    places = write(log, truth, range(8))
    clear(log, truth, {2, 6})
    places |= write(log, truth, range(8, 14))
    first = min(int(e["segment"]) for e in places.values())
    keep = {n: e for n, e in places.items() if e["segment"] == first and n in truth.stored and n % 2 == 0}
    dropped = {n for n, e in places.items() if e["segment"] == first and n not in keep}
    truth.stored -= dropped
    freed = log.free(first, np.array(list(keep.values())))
    assert freed.freed
    assert (freed.outcomes == Outcome.OK).all()
    write(log, truth, range(14, 20))
    log.tier.register(bytes(range(2, 34)), b"another spec")
    assert log.tier.flush(1.0)
    second = int(log.tier.segments()[0].number)
    gone = {n for n, e in places.items() if e["segment"] == second}
    truth.stored -= gone
    assert log.free(second, entries_of([])).freed
    log.tier.close()


def check_after(disk: FakeDisk, truth: Truth) -> None:
    found = disk.after_kill()
    log = Log(found, OPTIONS)
    told = log.recover()
    there = set(numbers_of(told))
    assert len(there) == len(told), "a block was told twice"
    assert log.check(told) == there, "a record was told that is not whole"
    assert truth.stored <= there, "what had ended well is lost"
    assert there <= truth.asked
    assert not there & truth.cleared, "what was cleared came back"
    assert there <= truth.asked - truth.cleared
    assert found.total_bytes <= OPTIONS.cap_bytes
    assert sum(row.live_records for row in log.tier.segments()) == len(there)
    log.write(range(100, 104))
    log.tier.close()
    again = Log(found.after_kill(), OPTIONS)
    assert set(numbers_of(again.recover())) == there | set(range(100, 104)), "the second restart found otherwise"
    again.tier.close()


def all_steps() -> list[str]:
    disk = FakeDisk()
    story(disk, Truth())
    return disk.calls


STEPS = all_steps()


def test_the_story_has_every_kind_of_step() -> None:
    assert {"create", "pwrite", "allocate", "truncate", "rename", "unlink", "sync"} <= set(STEPS)


@pytest.mark.parametrize("leaves", ["nothing", "head", "tail", "whole"])
def test_crash_at_every_step(leaves: str) -> None:
    for at, kind in enumerate(STEPS):
        if kind != "pwrite" and leaves in ("head", "tail"):
            continue
        disk, truth = FakeDisk(), Truth()
        disk.crash = Crash(at, leaves)
        with pytest.raises(Crashed):
            story(disk, truth)
        check_after(disk, truth)


@pytest.mark.parametrize("leaves", ["nothing", "tail", "whole"])
def test_crash_while_restarting(leaves: str) -> None:
    """The first run is killed before it can seal; the second one is killed at every step of its own."""
    before, truth = FakeDisk(), Truth()
    log = Log(before, OPTIONS)
    write(log, truth, range(8))
    clear(log, truth, {3})
    for at in range(40):
        disk = before.after_kill()
        disk.crash = Crash(at, leaves)
        try:
            again = Log(disk, OPTIONS)
            again.recover()
            again.tier.close()
        except Crashed:
            check_after(disk, truth)
            continue
        assert at > 5, "the restart has changing steps"
        break


def test_power_cut_keeps_what_was_flushed() -> None:
    for seed in range(30):
        disk, truth = FakeDisk(), Truth()
        log = Log(disk, OPTIONS)
        write(log, truth, range(8))
        clear(log, truth, {1})
        assert log.tier.flush(1.0)
        log.write(range(8, 12))
        after = Log(disk.after_power_cut(seed), OPTIONS)
        told = after.recover()
        assert truth.stored <= after.check(told)
        assert not set(numbers_of(told)) & truth.cleared
        after.tier.close()
