"""Runs the crash story on a real directory in forked children, each of which kills itself with SIGKILL at one step.

    python -m tests.unit.offload.disk.killed_log FOLDER            every step, before and after each changing call
    python -m tests.unit.offload.disk.killed_log FOLDER threads    writes with threads until somebody kills it

Standard output: one JSON line per killed child (its directory and what it had been told), or per block written.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from prefixcache_offload.disk import Outcome
from prefixcache_offload.disk.seam import Buffer, RealDisk
from tests.unit.offload.disk.log import SMALL, Job, Log, entries_of, memory_for, payload


@dataclass
class Told:
    """What the child knew for sure when it was killed; it writes it down after every end."""

    stored: list[int] = field(default_factory=list)
    clearing: list[int] = field(default_factory=list)
    cleared: list[int] = field(default_factory=list)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


class Killing(RealDisk):
    """Kills this process at the n-th changing call: before it, or after it (a write: after its first half)."""

    def __init__(self, at: int, *, after: bool) -> None:
        self._at, self._after, self.calls = at, after, 0

    def _step(self) -> bool:
        """True if the call about to be made is the last; ends here if not even that one is to be made."""
        self.calls += 1
        last = self.calls - 1 == self._at
        if last and not self._after:
            os.kill(os.getpid(), signal.SIGKILL)
        return last

    def pwrite(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        if self._step():
            super().pwrite(fd, buffers[: -(-len(buffers) // 2)], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().pwrite(fd, buffers, offset)

    def allocate(self, fd: int, size_bytes: int) -> None:
        last = self._step()
        super().allocate(fd, size_bytes)
        self._end(last=last)

    def truncate(self, fd: int, size_bytes: int) -> None:
        last = self._step()
        super().truncate(fd, size_bytes)
        self._end(last=last)

    def unlink(self, path: str) -> None:
        last = self._step()
        super().unlink(path)
        self._end(last=last)

    def rename(self, source: str, target: str) -> None:
        last = self._step()
        super().rename(source, target)
        self._end(last=last)

    @staticmethod
    def _end(*, last: bool) -> None:
        if last:
            os.kill(os.getpid(), signal.SIGKILL)


def story(folder: Path, at: int, *, after: bool) -> int:
    """Write, clear, roll, seal, free with re-appending, restart. Answer the changing calls."""
    told, note = Told(), folder / "told.json"
    told.save(note)
    disk = Killing(at, after=after)
    log = Log(disk, replace(SMALL, cap_bytes=512 << 10), str(folder / "data"))
    job = log.write(range(10))
    told.stored = [n for n in range(10) if job.told[n] is Outcome.OK]
    told.save(note)
    told.clearing = [3]
    told.stored.remove(3)
    told.save(note)
    log.clear([3])
    told.cleared = [3]
    told.save(note)
    first = int(job.entries["segment"][0])
    mine = [n for n in told.stored if job.entries["segment"][n] == first]
    keep = [n for n in mine if n % 2 == 0]
    told.stored = [n for n in told.stored if n not in mine or n in keep]
    told.save(note)
    log.free(first, job.entries[keep])
    log.write(range(10, 14))
    told.stored += range(10, 14)
    told.save(note)
    log.tier.close()
    again = Log(disk, replace(SMALL, cap_bytes=512 << 10), str(folder / "data"))
    again.recover()
    again.tier.close()
    return disk.calls


def every_step(folder: Path) -> None:
    (folder / "whole").mkdir()
    steps = story(folder / "whole", -1, after=False)
    for at in range(steps):
        for after in (False, True):
            place = folder / f"{at}-{after}"
            place.mkdir()
            child = os.fork()
            if child == 0:
                story(place, at, after=after)
                os._exit(0)
            _, status = os.waitpid(child, 0)
            print(json.dumps({"folder": str(place), "killed": os.WIFSIGNALED(status)}), flush=True)


def with_threads(folder: Path) -> None:
    log = Log(None, replace(SMALL, cap_bytes=64 << 20, segment_bytes=1 << 20, writers=2, readers=2), str(folder))
    number = 0
    while True:
        numbers = range(number, number + 8)
        entries = entries_of(numbers, log.namespace)
        memory, at = memory_for(entries)
        for start, n in zip(at, numbers, strict=True):
            memory[start : start + len(payload(n))] = bytearray(payload(n))
        job = Job(8)
        log.tier.write(1, memory, at, entries, job.done)
        job.wait()
        print(json.dumps([n for n, o in zip(numbers, job.told, strict=True) if o is Outcome.OK]), flush=True)
        number += 8


if __name__ == "__main__":
    if sys.argv[2:] == ["threads"]:
        with_threads(Path(sys.argv[1]))
    else:
        every_step(Path(sys.argv[1]))
