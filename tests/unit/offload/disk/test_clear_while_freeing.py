"""A clear between the reading and the appending again of a segment's records, and kill -9 at every step after it.

What was cleared must not come back: neither from the old copy, nor from one that was appended behind the tombstone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from prefixcache_offload.disk import Outcome
from prefixcache_offload.disk.records import KEY_BYTES
from prefixcache_offload.disk.seam import Buffer
from tests.unit.offload.disk.fake_disk import Crash, Crashed, FakeDisk
from tests.unit.offload.disk.log import Job, Log, key, numbers_of
from tests.unit.offload.disk.test_crashes import OPTIONS

CLEARED = {2, 4}


class ClearsWhileReading(FakeDisk):
    """Calls `during` once, when the first record of the segment being freed is read."""

    def __init__(self) -> None:
        super().__init__()
        self.during = lambda: None

    def pread(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        got = super().pread(fd, buffers, offset)
        during, self.during = self.during, lambda: None
        during()
        return got


def story(disk: ClearsWhileReading, cleared: Job) -> None:
    """Frees a segment of which all is to be kept; two of its blocks are cleared while it is read."""
    log = Log(disk, OPTIONS)
    job = log.write(range(8))
    log.write(range(8, 14))
    first = int(job.entries["segment"].min())
    keep = job.entries[job.entries["segment"] == first]
    assert set(numbers_of(keep)) >= CLEARED
    keys = np.frombuffer(b"".join(key(number) for number in sorted(CLEARED)), np.uint8).reshape(-1, KEY_BYTES)
    disk.during = lambda: log.tier.clear(log.namespace, keys, cleared.done)
    freed = log.free(first, keep)
    assert freed.freed
    ends = dict(zip(numbers_of(keep), freed.outcomes.tolist(), strict=True))
    assert {number for number, end in ends.items() if end == Outcome.REVOKED} == CLEARED
    log.tier.close()


def all_steps() -> list[str]:
    disk, cleared = ClearsWhileReading(), Job(1)
    story(disk, cleared)
    assert cleared.told == [Outcome.OK]
    return disk.calls


STEPS = all_steps()


@pytest.mark.parametrize("leaves", ["nothing", "whole"])
def test_what_was_cleared_while_its_segment_was_freed_stays_away(leaves: str) -> None:
    answered = 0
    for at in range(len(STEPS)):
        disk = ClearsWhileReading()
        disk.crash = Crash(at, leaves)
        cleared = Job(1)
        with pytest.raises(Crashed):
            story(disk, cleared)
        after = Log(disk.after_kill(), OPTIONS)
        there = set(numbers_of(after.recover()))
        after.tier.close()
        if cleared.outcomes[0] == Outcome.OK:
            answered += 1
            assert not there & CLEARED, f"step {at} ({STEPS[at]}) brought back what was cleared"
    assert answered > 2, "no crash came after the clear was answered"
