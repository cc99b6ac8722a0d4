"""What waits to be written: jobs, and their records. Values only; who takes them when is `writer`'s business."""

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import RLock

import numpy as np

from prefixcache_offload.disk.records import PAGE, Bytes, Entries, Mask, Pages, digest, pages_of
from prefixcache_offload.disk.seam import scratch
from prefixcache_offload.disk.shared import Done, Indexes


@dataclass(eq=False, slots=True)
class WriteJob:
    """Records to append. entries: ENTRY[n], the writer's own copy; digested: whether their digests are filled in.
    expected: u8[n, 16], digests that the payloads must have, zeros where nothing is known. again: they are kept from a
    segment being freed, in the form they have there, so they go first and may use the reserve."""

    job: int
    memory: Bytes
    at: Indexes
    entries: Entries
    done: Done
    digested: bool = False
    expected: Bytes | None = None
    again: bool = False
    admitted: Callable[[Entries], None] | None = None
    """Called with the lock held when the sequence numbers are drawn."""
    left: int = 0
    turn: RLock = field(default_factory=RLock)
    """Held around each call of `done`, so that the call with nothing left comes last."""
    segments: Pages = field(init=False)
    pages: Pages = field(init=False)
    """Columns of `entries`, found once and not once a record."""
    checked: Mask = field(init=False)
    """Which payloads have a digest that they must have."""

    def __post_init__(self) -> None:
        """Look at all records at once for what each of them will be asked."""
        self.segments, self.pages = self.entries["segment"], self.entries["page"]
        self.checked = np.zeros(len(self.entries), np.bool_)
        if self.expected is not None:
            self.checked[:] = self.expected.any(axis=1)


@dataclass(eq=False, slots=True)
class Item:
    """One record that waits. length: of the block's bytes. size: of the payload as it goes to disk. stored: its smaller
    form, whole pages, once it is made; waits_until: how long it may wait for that on the tier's clock, 0 for not at
    all."""

    job: WriteJob
    which: int
    length: int
    size: int
    is_tombstone: bool
    stored: memoryview | None = None
    waits_until: float = 0.0

    @property
    def pages(self) -> int:
        """Pages of the record, header included."""
        return 1 + pages_of(self.size)

    def store(self, smaller: memoryview) -> None:
        """Its smaller form is made."""
        self.stored, self.size = smaller, smaller.nbytes

    def payload(self) -> memoryview:
        """What is to be written, u8[size]."""
        if self.stored is not None:
            return self.stored
        start = int(self.job.at[self.which])
        return self.job.memory[start : start + self.size].data

    def is_corrupt(self) -> bool:
        """Whether the block's bytes are not those that its writer expects."""
        if self.job.expected is None or not self.job.checked[self.which]:
            return False
        start = int(self.job.at[self.which])
        expected: bytes = self.job.expected[self.which].tobytes()
        return digest(self.job.memory[start : start + self.length]) != expected

    def buffer(self) -> memoryview | None:
        """The same on whole pages: where it lies if direct calls accept it there, else a copy; None for nothing."""
        size = self.size
        rounded, start, memory = pages_of(size) * PAGE, int(self.job.at[self.which]), self.job.memory
        if self.stored is not None or not rounded:
            return self.stored
        if not (memory.ctypes.data + start) % PAGE and start + rounded <= memory.size:
            return memory[start : start + rounded].data
        copy = scratch(rounded)
        np.copyto(np.frombuffer(copy, np.uint8)[:size], memory[start : start + size])
        return copy
