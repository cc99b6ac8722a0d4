"""What the tier's threads share: the lock, the disk, the segments, health, counters and the calls now in the kernel.

No thread starts here and no file is touched. Whoever changes any of it holds `lock`; nobody calls the disk or a
caller's function while holding it.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from prefixcache_offload.disk.directory import EPOCH_SHIFT, Directory
from prefixcache_offload.disk.health import Health
from prefixcache_offload.disk.options import DiskOptions
from prefixcache_offload.disk.outcomes import Outcome
from prefixcache_offload.disk.records import Entries
from prefixcache_offload.disk.seam import Disk
from prefixcache_offload.disk.segments import SegmentTable
from prefixcache_offload.disk.tombstones import Tombstones

Indexes = npt.NDArray[np.int64]
Outcomes = npt.NDArray[np.uint8]


class Ended(NamedTuple):
    """Some records of a job have ended, each exactly once over the job's life.

    which: i64[k], their numbers in the job. outcomes: u8[k] of `Outcome`. entries: ENTRY[k]; of a write with their
    place in the log, of a read as they lie there (depth, parent, codec, digest), meaningful where the outcome is OK.
    left: records of the job that have not ended yet; 0 in the job's last call.
    """

    job: int
    which: Indexes
    outcomes: Outcomes
    entries: Entries
    left: int


Done = Callable[[Ended], None]
"""Called from the tier's threads or from the caller's own inside `write`, `read`, `cancel`; quick; must not raise."""


@dataclass
class Counters:
    """Everything the tier counts. Bytes are payload unless named otherwise."""

    writes: Counter[Outcome] = field(default_factory=Counter)
    reads: Counter[Outcome] = field(default_factory=Counter)
    written_bytes: int = 0
    again_bytes: int = 0
    """Written again so that their segment could be freed."""
    device_bytes: int = 0
    """All that went to segment files: headers, padding, footers and what was written again included."""
    read_bytes: int = 0
    """As they lay on disk."""
    packed: int = 0
    """Records that went to disk in a smaller form."""
    packed_bytes: int = 0
    packed_to_bytes: int = 0
    """Bytes of theirs before and after."""
    pack_seconds: float = 0.0
    kept_raw: Counter[str] = field(default_factory=Counter)
    """Records that were written raw although the codec is on, by reason."""
    decoded_bytes: int = 0
    decode_seconds: float = 0.0
    write_calls: int = 0
    read_calls: int = 0
    write_seconds: float = 0.0
    read_seconds: float = 0.0
    sealed: int = 0
    seals_failed: int = 0
    freed_segments: int = 0
    stalls: int = 0
    over_cap_segments: int = 0
    """Oldest segments dropped at the start because the cap is smaller than what an earlier run left."""
    files_left: int = 0
    """Segment files that could not be removed; the next start finds them again."""

    @property
    def write_amplification(self) -> float:
        """Bytes to the disk per byte asked to be written; 0 before the first."""
        return self.device_bytes / self.written_bytes if self.written_bytes else 0.0


@dataclass
class Call:
    """One call now in the kernel: jobs that wait for it, and how long it may take."""

    started: float
    jobs: tuple[int, ...]
    limit_s: float
    told: bool = False


class Shared:
    """See the top of the file."""

    def __init__(
        self, directory: Directory, options: DiskOptions, clock: Callable[[], float], counters: Counters | None = None
    ) -> None:
        """Raises OSError when the segment files cannot be looked at."""
        self.directory = directory
        self.disk: Disk = directory.disk
        self.options = options
        self.clock = clock
        self.lock = threading.RLock()
        # One condition per question, so that an answer wakes only who asked: eight threads waking for every record
        # would cost more than the record.
        self.reads_wait = threading.Condition(self.lock)
        self.writes_wait = threading.Condition(self.lock)
        self.reads_done = threading.Condition(self.lock)
        self.writes_done = threading.Condition(self.lock)
        self.health = Health(clock, options.retry_s, options.retry_max_s)
        self.counters = Counters() if counters is None else counters
        self.table = SegmentTable(directory, options)
        self.tombstones = Tombstones()
        self.calls: dict[int, Call] = {}
        self.reads_pending = 0
        """Read groups waiting or in the kernel: writes let them go first."""
        self.closing = False
        self.replaced = False
        """Another directory was found where this one was."""
        self._sequence = directory.epoch << EPOCH_SHIFT
        self._call_number = 0
        self._drop_over_cap()

    def _drop_over_cap(self) -> None:
        # Oldest first: a tombstone revokes only what lies before it, so nothing that was cleared comes back.
        for number in sorted(self.table.by_number):
            if self.table.used_bytes <= self.options.cap_bytes:
                return
            segment = self.table.by_number[number]
            self.table.remove(segment)
            self.table.unlink(segment)
            self.counters.over_cap_segments += 1

    def draw_sequences(self, count: int) -> int:
        """The first of `count` sequence numbers that nobody else has."""
        first = self._sequence + 1
        self._sequence += count
        return first

    @contextmanager
    def calling(self, jobs: tuple[int, ...] = (), *, patience: float = 1.0) -> Iterator[Call]:
        """Around every call that may hang, so that the watchdog sees it; without the lock."""
        call = Call(self.clock(), jobs, self.options.stall_s * patience)
        with self.lock:
            self._call_number += 1
            number = self._call_number
            self.calls[number] = call
        try:
            yield call
        finally:
            with self.lock:
                del self.calls[number]

    def wake_all(self) -> None:
        """The tier closes: whoever waits looks again. The lock is held."""
        for condition in (self.reads_wait, self.writes_wait, self.reads_done, self.writes_done):
            condition.notify_all()

    def close_fds(self, fds: list[int]) -> None:
        """Close descriptors; without the lock. An error here loses nothing: data calls have reported theirs."""
        for fd in fds:
            try:
                self.disk.close(fd)
            except OSError:
                self.counters.files_left += 1
