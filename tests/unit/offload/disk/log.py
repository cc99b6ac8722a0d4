"""A small log for tests: blocks whose bytes follow from their number, so that right and wrong can be told apart."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from prefixcache_offload.disk import ENTRY, DiskOptions, Entries, Outcome
from prefixcache_offload.disk.cleaning import Freed
from prefixcache_offload.disk.records import KEY_BYTES, PAGE, Bytes, digest
from prefixcache_offload.disk.seam import Disk, scratch
from prefixcache_offload.disk.shared import Ended
from prefixcache_offload.disk.tier import DiskTier

PATH = "/data"
FINGERPRINT = bytes(range(1, 33))
SMALL = DiskOptions(cap_bytes=1 << 20, segment_bytes=64 << 10, writers=0, readers=0, batch_bytes=16 << 10)
LENGTHS = (1, 100, 4096, 5000, 8192, 12288)
TIMEOUT_S = 30.0


def key(number: int) -> bytes:
    """The key of block `number`; never zeros."""
    return digest(b"key%d" % number) * 2


def payload(number: int) -> bytes:
    """Its bytes."""
    return np.random.default_rng(number).bytes(LENGTHS[number % len(LENGTHS)])


def entries_of(numbers: Sequence[int], namespace: int = 1) -> Entries:
    """What `write` is told of these blocks; block n's parent is n - 1, block 0 is a first one."""
    entries = np.zeros(len(numbers), ENTRY)
    for i, number in enumerate(numbers):
        entries["namespace"][i] = namespace
        entries["key"][i] = np.frombuffer(key(number), np.uint8)
        if number:
            entries["parent"][i] = np.frombuffer(key(number - 1), np.uint8)
        entries["depth"][i] = number
        entries["length"][i] = len(payload(number))
    return entries


def memory_for(entries: Entries) -> tuple[Bytes, list[int]]:
    """Room for the payloads, each on pages of its own, and where each begins."""
    sizes = [-(-int(n) // PAGE) * PAGE for n in entries["length"]]
    at = [sum(sizes[:i]) for i in range(len(sizes))]
    return np.frombuffer(scratch(max(sum(sizes), PAGE)), np.uint8), at


class Job:
    """Gathers the ends of one job and checks that each record ends once."""

    def __init__(self, count: int) -> None:
        self.outcomes = np.full(count, 255, np.uint8)
        self.entries = np.zeros(count, ENTRY)
        self.finished = threading.Event()
        if not count:
            self.finished.set()

    def done(self, ended: Ended) -> None:
        assert (self.outcomes[ended.which] == 255).all(), "a record ended twice"
        self.outcomes[ended.which] = ended.outcomes
        self.entries[ended.which] = ended.entries
        assert ended.left == (self.outcomes == 255).sum()
        if ended.left == 0:
            self.finished.set()

    def wait(self) -> Job:
        assert self.finished.wait(TIMEOUT_S), "a job did not end"
        return self

    @property
    def told(self) -> list[Outcome]:
        return [Outcome(o) for o in self.outcomes]


class Log:
    """A tier without threads (or with), over a disk."""

    def __init__(self, disk: Disk | None = None, options: DiskOptions = SMALL, path: str = PATH) -> None:
        self.tier = DiskTier(path, options, disk)
        self.options = options
        self.namespace = self.tier.register(FINGERPRINT, b"a spec")

    def _pump(self) -> None:
        if not self.options.writers:
            self.tier.pump()

    def write(self, numbers: Sequence[int]) -> Job:
        """Write blocks; their ends, with places."""
        entries = entries_of(numbers, self.namespace)
        memory, at = memory_for(entries)
        for start, number in zip(at, numbers, strict=True):
            memory[start : start + len(payload(number))] = np.frombuffer(payload(number), np.uint8)
        job = Job(len(numbers))
        self.tier.write(1, memory, at, entries, job.done)
        self._pump()
        return job.wait()

    def read(self, entries: Entries) -> tuple[Job, list[bytes]]:
        """Read records; their ends and what lies in the targets then."""
        memory, at = memory_for(entries)
        job = Job(len(entries))
        self.tier.read(2, memory, at, entries, job.done)
        self._pump()
        job.wait()
        lengths = entries["length"].tolist()
        return job, [memory[a : a + n].tobytes() for a, n in zip(at, lengths, strict=True)]

    def clear(self, numbers: Sequence[int] = (), namespace: int | None = None) -> Job:
        """Clear blocks, or all of a namespace."""
        keys = np.frombuffer(b"".join(key(n) for n in numbers), np.uint8).reshape(-1, KEY_BYTES)
        job = Job(1)
        self.tier.clear(self.namespace if namespace is None else namespace, keys, job.done)
        self._pump()
        return job.wait()

    def free(self, segment: int, keep: Entries) -> Freed:
        """Free a segment."""
        told: list[Freed] = []
        finished = threading.Event()

        def done(freed: Freed) -> None:
            told.append(freed)
            finished.set()

        self.tier.free(segment, keep, done)
        self._pump()
        assert finished.wait(TIMEOUT_S), "freeing did not end"
        assert len(told) == 1
        return told[0]

    def recover(self) -> Entries:
        """All that a restart tells."""
        found = [recovered.entries for recovered in self.tier.recovery]
        return np.concatenate([np.zeros(0, ENTRY), *found])

    def check(self, entries: Entries) -> set[int]:
        """Read everything; what comes back OK must be right. Answer the numbers of those that did."""
        job, read = self.read(entries)
        right = set()
        for i, outcome in enumerate(job.told):
            number = int(entries["depth"][i])
            if outcome is Outcome.OK:
                assert read[i] == payload(number), f"wrong bytes for block {number}"
                assert job.entries["key"][i].tobytes() == key(number)
                right.add(number)
        return right


def numbers_of(entries: Entries) -> list[int]:
    """Which blocks these are."""
    return [int(n) for n in entries["depth"]]
