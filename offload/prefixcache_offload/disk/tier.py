"""The disk tier as one thing: open, recover, write, read, free, clear, flush, close, and the state of its health.

Puts the parts together and owns the threads. What to write, read, keep or forget is told by the caller; every job ends
exactly once per record, on a callback that may come from any of the tier's threads. Several threads may call.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from prefixcache_offload.disk.cleaning import Cleaner, FreedCall, submit_tombstone
from prefixcache_offload.disk.directory import open_directory
from prefixcache_offload.disk.health import HealthReport
from prefixcache_offload.disk.namespaces import NamespaceBook
from prefixcache_offload.disk.options import DiskOptions
from prefixcache_offload.disk.outcomes import DiskRefused, Outcome, Refusal, Trouble
from prefixcache_offload.disk.packing import CodecReport, Packer
from prefixcache_offload.disk.probing import probe_read
from prefixcache_offload.disk.queued import WriteJob
from prefixcache_offload.disk.reader import Reader, ReadJob
from prefixcache_offload.disk.records import KEY_BYTES, Bytes, Codec, Entries, Kind, stored_bytes
from prefixcache_offload.disk.recovery import Recovery
from prefixcache_offload.disk.seam import Disk, RealDisk
from prefixcache_offload.disk.shared import Counters, Done, Indexes, Shared
from prefixcache_offload.disk.tombstones import Tombstone
from prefixcache_offload.disk.watch import Prober, Watchdog
from prefixcache_offload.disk.writer import Writer

_LOWEST_PRIORITY = 19
_WRITERS_PRIORITY = 5
"""Whoever answers a request gets the core first; a busy machine leaves a writer a quarter, and a tenth is enough."""


class SegmentRow(NamedTuple):
    """One segment for whoever chooses what to free. stage: name of `Stage`."""

    number: int
    size_bytes: int
    live_bytes: int
    live_records: int
    stage: str


@dataclass(frozen=True)
class DiskStatus:
    """A picture of the tier at one moment. Bytes per second are of the time spent in calls, 0 before the first."""

    health: HealthReport
    direct: bool
    cap_bytes: int
    used_bytes: int
    free_bytes: int
    live_bytes: int
    segments: int
    queued_write_bytes: int
    queued_read_bytes: int
    read_bytes_per_s: float
    write_bytes_per_s: float
    threads_alive: bool
    codec: CodecReport


class DiskTier:
    """See the top of the file."""

    def __init__(
        self,
        path: str,
        options: DiskOptions,
        disk: Disk | None = None,
        clock: Callable[[], float] = time.monotonic,
        counters: Counters | None = None,
    ) -> None:
        """Lock and open a data directory; no segment is read yet. counters: to go on with. Raises DiskRefused."""
        directory = open_directory(disk or RealDisk(), path)
        try:
            self._shared = Shared(directory, options, clock, counters)
            self._book = NamespaceBook(directory, options.meta_cap_bytes // 4)
        except OSError as error:
            directory.close()
            raise DiskRefused(Refusal.UNUSABLE, f"cannot read {path}: {error}") from error
        self._book_lock = threading.Lock()
        self._writer = Writer(self._shared)
        self._reader = Reader(self._shared)
        self._cleaner = Cleaner(self._shared, self._reader, self._writer)
        self._watchdog = Watchdog(self._shared, self._reader, self._writer)
        self._prober = Prober(self._shared)
        self.recovery = Recovery(self._shared)
        """Iterate it once, on a thread of your own, to be told what is there."""
        self._threads = [
            *self._started(options.writers, "write", self._writer, nice=_WRITERS_PRIORITY),
            *self._started(options.readers, "read", self._reader),
            *self._started(options.packer_threads, "pack", self._writer.packer, nice=_LOWEST_PRIORITY),
        ]
        if self._threads:
            self._watchdog.start()
            self._prober.start()

    def _started(
        self, count: int, name: str, worker: Writer | Reader | Packer, *, nice: int = 0
    ) -> list[threading.Thread]:
        def run() -> None:
            if nice:
                thread = threading.get_native_id()
                os.setpriority(os.PRIO_PROCESS, thread, max(os.getpriority(os.PRIO_PROCESS, thread), nice))
            whole = False
            try:
                while worker.wait_for_work():
                    worker.step()
                whole = True
            finally:
                if not whole:
                    self._watchdog.thread_died()

        threads = [threading.Thread(target=run, name=f"disk-{name}-{i}", daemon=True) for i in range(count)]
        for thread in threads:
            thread.start()
        return threads

    # --- bytes -----------------------------------------------------------------------------------------------------

    def write(
        self, job: int, memory: Bytes, at: npt.ArrayLike, entries: Entries, done: Done, expected: Bytes | None = None
    ) -> None:
        """Append records. payload i is memory[at[i] : at[i] + length]; it must not change until its end is told.

        entries: ENTRY[n] with namespace, key, parent, depth, part, group, value_bytes and length; place, sequence
        and form are filled in on a copy. expected: u8[n, 16], the xxh3-128 that the payloads must have, zeros where it
        is not known; where it is another one the read ends as MISMATCH, and already the write if it makes the record
        smaller. Raises ValueError for a range outside the memory.
        """
        own, places = entries.copy(), _inside(memory, at, entries)
        own["kind"], own["codec"], own["pages"] = Kind.BLOCK, Codec.RAW, 0
        self._writer.submit(WriteJob(job, memory, places, own, done, expected=expected))

    def read(self, job: int, memory: Bytes, at: npt.ArrayLike, entries: Entries, done: Done) -> None:
        """Read records to memory[at[i] : at[i] + length], writable. See `reader.ReadJob` for what entries must hold.

        The memory belongs to the read until its end is told, also when the caller has lost interest. Raises ValueError.
        """
        if not memory.flags.writeable:
            raise ValueError("a read wants memory that it may write to")
        self._reader.submit(ReadJob(job, memory, _inside(memory, at, entries), entries.copy(), done))

    def cancel(self, job: int) -> None:
        """End the reads of a job that have not begun."""
        self._reader.cancel(job)

    def free(self, segment: int, keep: Entries, done: FreedCall) -> None:
        """Give a segment's room back, after appending again what is to be kept. See `cleaning`."""
        self._cleaner.free(segment, keep, done)

    def clear(self, namespace: int, keys: Bytes, done: Done) -> None:
        """Revoke, also after restarts, what was submitted before now: the keys u8[n, 32] of a namespace; no keys: all
        of it; namespace 0 and no keys: all. The caller forgets its own entries (and says so with `drop`)."""
        tombstone = Tombstone(0, namespace, np.asarray(keys, np.uint8).reshape(-1, KEY_BYTES), 0)
        submit_tombstone(self._shared, self._writer, tombstone, done)

    def drop(self, entries: Entries) -> None:
        """These records are of no more use: they no longer count as live in their segments."""
        with self._shared.lock:
            for number in np.unique(entries["segment"]).tolist():
                segment = self._shared.table.by_number.get(number)
                gone = entries[entries["segment"] == number]
                if segment is not None:
                    segment.coded.fill(gone, np.arange(len(gone)))
                    segment.live_bytes -= int(stored_bytes(gone).sum())
                    segment.live_records -= len(gone)

    # --- namespaces ------------------------------------------------------------------------------------------------

    def register(self, fingerprint: bytes, spec: bytes) -> int:
        """Keep a namespace's spec for the next start; answer the u64 that its entries carry.

        Raises NamespaceRefused or OSError: then its blocks must not be written.
        """
        with self._book_lock:
            return self._book.register(fingerprint, spec)

    def namespaces(self) -> dict[int, tuple[bytes, bytes]]:
        """u64 -> (fingerprint, spec) of all that are known, those of earlier runs included."""
        with self._book_lock:
            return dict(self._book.specs)

    def forget_namespaces(self, kept: Sequence[int]) -> int:
        """Make room in the book: keep only these. Raises OSError."""
        with self._book_lock:
            return self._book.forget_others(kept)

    # --- state -----------------------------------------------------------------------------------------------------

    def segments(self) -> list[SegmentRow]:
        """All segments, oldest first."""
        with self._shared.lock:
            rows = sorted(self._shared.table.by_number.items())
            return [SegmentRow(n, s.size_bytes, s.live_bytes, s.live_records, s.stage.name.lower()) for n, s in rows]

    @property
    def counters(self) -> Counters:
        """Live counters; read them, do not write."""
        return self._shared.counters

    @property
    def free_bytes(self) -> int:
        """What new segments may still take."""
        with self._shared.lock:
            return self._shared.table.free_bytes()

    def status(self) -> DiskStatus:
        """What `status`, health and metrics show."""
        shared = self._shared
        with shared.lock:
            counters, table = shared.counters, shared.table
            return DiskStatus(
                shared.health.report(),
                shared.directory.direct,
                shared.options.cap_bytes,
                table.used_bytes,
                table.free_bytes(),
                sum(s.live_bytes for s in table.by_number.values()),
                len(table.by_number),
                self._writer.queued_bytes,
                self._reader.queued_bytes,
                counters.read_bytes / counters.read_seconds if counters.read_seconds else 0.0,
                counters.device_bytes / counters.write_seconds if counters.write_seconds else 0.0,
                all(thread.is_alive() for thread in self._threads),
                self._writer.packer.report(),
            )

    def probe_read(self) -> float:
        """Bytes per second that the disk reads, by a short look; 0.0 where that cannot be seen. Waits for the disk."""
        try:
            return probe_read(self._shared)
        except OSError:
            return 0.0  # health is told by those who read in earnest

    @property
    def replaced(self) -> bool:
        """Whether another directory was found where this one was: it stays off until its own is back, or somebody
        closes it and opens that one."""
        return self._shared.replaced

    def watch(self, on_change: Callable[[HealthReport], None]) -> None:
        """Be told of every change of health from now on, from a thread of the tier."""
        self._watchdog.on_change = on_change

    def hanging(self) -> set[int]:
        """Jobs that wait for a call that hangs. They end when it comes back, and their memory is theirs until then."""
        return self._watchdog.hanging()

    # --- time ------------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Without threads: do all that waits, on this thread."""
        while self._reader.step() or self._writer.packer.step() or self._writer.step():
            pass
        self._prober.tick()
        self._watchdog.tick()

    def flush(self, timeout_s: float) -> bool:
        """Wait until what was submitted has ended, then until it would survive a power cut. False: it took too long
        or the disk refused."""
        shared = self._shared
        if not self._threads:
            self.pump()
        with shared.lock:
            mark = shared.draw_sequences(1)
            if not shared.writes_done.wait_for(lambda: self._writer.has_ended(mark), timeout=timeout_s):
                return False
            if shared.health.writes_off is not None:
                return False
        try:
            self._writer.tail.sync()
        except OSError as error:
            self._writer.fail(error)
            return False
        return True

    def close(self, timeout_s: float = 10.0, *, drain: bool = True) -> bool:
        """End everything: with `drain` what waits to be written is written first. Reads that wait end as SHUT_DOWN.

        False: a call still hangs in the kernel; memory given to it must not be unmapped or used again.
        """
        shared = self._shared
        if drain:
            self.flush(timeout_s)
        with shared.lock:
            shared.closing = True
            shared.wake_all()
            self._writer.packer.wake()
        self._reader.drop_all(Outcome.SHUT_DOWN)
        self._writer.drop_all(Outcome.SHUT_DOWN)
        self._prober.stop()
        self._watchdog.stop()
        deadline = shared.clock() + timeout_s
        for thread in self._threads:
            thread.join(max(deadline - shared.clock(), 0.01))
        if any(thread.is_alive() for thread in self._threads):
            return False
        self._writer.tail.close()
        with shared.lock:
            shared.health.fail(Trouble.CLOSED)
            fds = [s.fd for s in shared.table.by_number.values() if s.fd is not None]
            for segment in shared.table.by_number.values():
                segment.fd = None
        shared.close_fds(fds)
        shared.directory.close()
        return True


def _inside(memory: Bytes, at: npt.ArrayLike, entries: Entries) -> Indexes:
    """The places as i64[n]. Raises ValueError unless every payload lies inside the memory."""
    places = np.array(at, np.int64).reshape(-1)
    if memory.dtype != np.uint8 or memory.ndim != 1 or not memory.flags.c_contiguous:
        raise ValueError("memory is contiguous u8[n]")
    if len(places) != len(entries):
        raise ValueError(f"{len(places)} places for {len(entries)} records")
    if len(places) and (places.min() < 0 or (places + entries["length"]).max() > memory.size):
        raise ValueError(f"a payload reaches out of {memory.size} bytes")
    return places
