"""Appends records to the open segment: a bounded queue, batches of one large call each, footers when a segment is full.

Any number of threads call `step`. Places and sequence numbers are given out under the lock in the queue's order, so the
order in the log is the order of the sequence. What has returned OK has left this process: it survives kill -9. It
survives a power cut once its segment is sealed or `sync_open` came back. A segment in which a call failed is closed.
"""

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from prefixcache_offload.disk.outcomes import Outcome, outcome_of, trouble_of
from prefixcache_offload.disk.records import (
    DIGEST_BYTES,
    PAGE,
    Bytes,
    Entries,
    Kind,
    digest,
    footer_bytes,
    make_footer,
    pages_of,
    write_headers,
)
from prefixcache_offload.disk.seam import scratch, write_fully
from prefixcache_offload.disk.segments import Segment, Stage
from prefixcache_offload.disk.shared import Done, Ended, Indexes, Outcomes, Shared

_MOST_IN_BATCH = 128


@dataclass(eq=False, slots=True)
class WriteJob:
    """Records to append. entries: ENTRY[n], the writer's own copy; digested: whether their digests are filled in.
    again: they are kept from a segment being freed, so they go first and may use the reserve."""

    job: int
    memory: Bytes
    at: Indexes
    entries: Entries
    done: Done
    digested: bool = False
    again: bool = False
    left: int = 0


class _Item(NamedTuple):
    job: WriteJob
    which: int
    length: int
    pages: int


class _Batch(NamedTuple):
    segment: Segment
    items: list[_Item]
    entries: Entries


class Writer:
    """The write side of the tier."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._queue: deque[_Item] = deque()
        self._again: deque[_Item] = deque()
        self._queued_bytes = 0
        self._open: Segment | None = None
        self._opening = False
        self._active = 0

    @property
    def queued_bytes(self) -> int:
        """Payload that waits."""
        return self._queued_bytes

    def submit(self, job: WriteJob) -> None:
        """Take a job. What does not fit in the queue, or in a segment at all, ends here and now."""
        shared, entries = self._shared, job.entries
        job.left = len(entries)
        refused: list[int] = []
        with shared.lock:
            first = shared.draw_sequences(len(entries))
            entries["sequence"] = np.arange(first, first + len(entries), dtype=np.uint64)
            fresh = (entries["kind"] == Kind.TOMBSTONE) & (entries["revokes"] == 0)
            entries["revokes"][fresh] = entries["sequence"][fresh]
            refusal = self._admit(job, refused)
            shared.lock.notify_all()
        if refused:
            self._end(job, np.array(refused), np.full(len(refused), refusal, np.uint8))

    def _admit(self, job: WriteJob, refused: list[int]) -> Outcome:
        """Queue what may be queued, note the others; answer why they are refused."""
        options, must = self._shared.options, job.again or bool((job.entries["kind"] == Kind.TOMBSTONE).any())
        if self._shared.closing or self._shared.health.writes_off is not None:
            refused.extend(range(len(job.entries)))
            return Outcome.SHUT_DOWN if self._shared.closing else Outcome.TIER_OFF
        why = Outcome.QUEUE_FULL
        most = options.new_segment_bytes - footer_bytes(1) - PAGE
        for i, length in enumerate(job.entries["length"].tolist()):
            if length > most:
                why = Outcome.NO_ROOM
                refused.append(i)
            elif not must and self._queued_bytes + length > max(options.queue_bytes, length):
                refused.append(i)
            else:
                self._queued_bytes += length
                (self._again if job.again else self._queue).append(_Item(job, i, length, 1 + pages_of(length)))
        return why

    def wait_for_work(self) -> bool:
        """Block until `step` may have something to do; False once the tier closes. Lets reads go first for a while."""
        shared = self._shared
        with shared.lock:
            shared.lock.wait_for(lambda: shared.closing or self._waiting())
            if shared.reads_pending and not shared.closing:
                shared.lock.wait_for(
                    lambda: not shared.reads_pending or shared.closing, timeout=shared.options.write_patience_s
                )
            return not shared.closing or bool(self._queue or self._again)

    def _waiting(self) -> bool:
        return bool(self._queue or self._again) and not self._opening

    def step(self) -> bool:
        """Do one thing: write one batch, or make room for it. False if there was nothing to do."""
        with self._shared.lock:
            queue = self._again or self._queue
            if not queue or self._opening:
                return False
            segment = self._open
            if segment is None or not segment.fits(queue[0].pages, 1):
                batch = None
                self._opening = True
            else:
                batch = self._take(segment, queue)
        if batch is None:
            self._roll()
        else:
            self._execute(batch)
        return True

    def _take(self, segment: Segment, queue: deque[_Item]) -> _Batch:
        """Batch up what comes next, and give it its places."""
        items: list[_Item] = []
        size = 0
        while queue and len(items) < _MOST_IN_BATCH:
            item = queue[0]
            if items and (size + item.length > self._shared.options.batch_bytes or not segment.fits(item.pages, 1)):
                break
            size += item.length
            items.append(queue.popleft())
            job = item.job
            job.entries["segment"][item.which] = segment.number
            job.entries["page"][item.which] = segment.promise(item.pages, 1)
        self._queued_bytes -= size
        self._active += 1
        segment.writes += 1
        return _Batch(segment, items, np.concatenate([i.job.entries[i.which : i.which + 1] for i in items]))

    # --- one batch -------------------------------------------------------------------------------------------------

    def _execute(self, batch: _Batch) -> None:
        shared = self._shared
        for i, item in enumerate(batch.items):
            if not item.job.digested:
                start = int(item.job.at[item.which])
                made = digest(item.job.memory[start : start + item.length])
                batch.entries["digest"][i] = np.frombuffer(made, np.uint8)
        buffers = self._buffers(batch)
        size = sum(b.nbytes for b in buffers)
        with shared.lock:
            call = shared.begin_call(tuple({item.job.job for item in batch.items}))
        outcome: Outcome = Outcome.OK
        error: OSError | None = None
        try:
            write_fully(shared.disk, shared.table.fd(batch.segment), buffers, int(batch.entries["page"][0]) * PAGE)
        except OSError as failed:
            error = failed
            outcome = outcome_of(trouble_of(failed))
        with shared.lock:
            shared.counters.write_seconds += shared.end_call(call)
            shared.counters.write_calls += 1
            shared.counters.device_bytes += size if error is None else 0
            self._written(batch, ok=error is None)
        if error is not None:
            self.fail(error)
        self._end_batch(batch, outcome)
        self._settle(batch.segment)

    def _buffers(self, batch: _Batch) -> list[memoryview]:
        """Header, payload, header, payload: the payload where it lies if direct calls accept it there."""
        headers = scratch(PAGE * len(batch.items))
        write_headers(np.frombuffer(headers, np.uint8), batch.entries, self._shared.directory.nonce)
        buffers: list[memoryview] = []
        for i, item in enumerate(batch.items):
            start, rounded = int(item.job.at[item.which]), pages_of(item.length) * PAGE
            buffers.append(headers[i * PAGE : (i + 1) * PAGE])
            memory = item.job.memory
            if rounded and not (memory.ctypes.data + start) % PAGE and start + rounded <= memory.size:
                buffers.append(memory[start : start + rounded].data)
            elif rounded:
                copy = scratch(rounded)
                np.copyto(np.frombuffer(copy, np.uint8)[: item.length], memory[start : start + item.length])
                buffers.append(copy)
        return buffers

    def _written(self, batch: _Batch, *, ok: bool) -> None:
        """Count a batch that came back; the lock is held."""
        shared = self._shared
        self._active -= 1
        batch.segment.writes -= 1
        if not ok:
            if self._open is batch.segment:
                self._open = None
            if batch.segment.stage is Stage.OPEN:
                batch.segment.stage = Stage.CLOSING
        elif batch.segment.stage is not Stage.FREED:
            batch.segment.add(batch.entries)
        if ok:
            for item in batch.items:
                if item.job.again:
                    shared.counters.again_bytes += item.length
                else:
                    shared.counters.written_bytes += item.length
        shared.lock.notify_all()

    def _end_batch(self, batch: _Batch, outcome: Outcome) -> None:
        for i, item in enumerate(batch.items):
            item.job.entries["digest"][item.which] = batch.entries["digest"][i]
        self._end_all(batch.items, outcome)

    def _end(self, job: WriteJob, index: Indexes, outcomes: Outcomes) -> None:
        with self._shared.lock:
            job.left -= len(index)
            left = job.left
            for outcome in outcomes.tolist():
                self._shared.counters.writes[Outcome(outcome)] += 1
        job.done(Ended(job.job, index, outcomes, job.entries[index], left))

    # --- segments --------------------------------------------------------------------------------------------------

    def _roll(self) -> None:
        """Open the next segment for the record that does not fit, or end that record if the cap forbids it."""
        shared = self._shared
        with shared.lock:
            queue = self._again or self._queue
            urgent = bool(queue) and (queue is self._again or self._is_tombstone(queue[0]))
            segment = shared.table.begin() if queue and shared.table.may_add(reserve=urgent) else None
            if segment is None:
                self._opening = False
                dropped = [queue.popleft()] if queue else []
                self._queued_bytes -= sum(item.length for item in dropped)
                shared.lock.notify_all()
        if segment is None:
            self._end_all(dropped, Outcome.NO_ROOM)
            return
        try:
            self._create(segment)
        except OSError as error:
            with shared.lock:
                shared.table.remove(segment)
                self._opening = False
            self.fail(error)
            return
        with shared.lock:
            old, self._open, self._opening = self._open, segment, False
            if old is not None:
                old.stage = Stage.CLOSING
            shared.lock.notify_all()
        if old is not None:
            self._settle(old)

    @staticmethod
    def _is_tombstone(item: _Item) -> bool:
        return bool(item.job.entries["kind"][item.which] == Kind.TOMBSTONE)

    def _create(self, segment: Segment) -> None:
        """Make the file with room behind it; nothing is left of it if that fails. Raises OSError."""
        shared = self._shared
        fd = shared.directory.open_segment(segment.number, create=True)
        try:
            shared.disk.allocate(fd, segment.size_bytes)
        except OSError:
            shared.close_fds([fd])
            try:
                shared.table.unlink(segment)
            except OSError:
                shared.counters.files_left += 1
            raise
        segment.fd = fd

    def close_open(self) -> None:
        """Let the open segment take no more records, and seal it when the last write in flight is back."""
        with self._shared.lock:
            segment, self._open = self._open, None
            if segment is not None:
                segment.stage = Stage.CLOSING
        if segment is not None:
            self._settle(segment)

    def leave(self, segment: Segment) -> None:
        """A segment is being removed: nothing more goes into it. The lock is held."""
        if self._open is segment:
            self._open = None

    def _settle(self, segment: Segment) -> None:
        """Seal a closing segment once nobody writes in it; close a freed one."""
        shared = self._shared
        with shared.lock:
            if segment.writes:
                return
            seal = segment.stage is Stage.CLOSING
            if seal:
                segment.stage = Stage.UNSEALED
                segment.writes += 1
        if seal:
            self._seal(segment)
        with shared.lock:
            if seal:
                segment.writes -= 1
            fds = shared.table.idle_fd(segment) if segment.stage is Stage.FREED else []
            shared.lock.notify_all()
        shared.close_fds(fds)

    def _seal(self, segment: Segment) -> None:
        """Footer, exact size, sync. A failure costs the next start a scan, nothing else."""
        shared = self._shared
        try:
            size = seal_file(shared, segment, segment.entries, segment.end_page)
        except OSError as error:
            with shared.lock:
                shared.counters.seals_failed += 1
            self.fail(error)
            return
        with shared.lock:
            shared.counters.sealed += 1
            shared.table.resized(segment, size)
            segment.forget_entries()
            if segment.stage is not Stage.FREED:
                segment.stage = Stage.SEALED

    # --- trouble, flush, end ---------------------------------------------------------------------------------------

    def fail(self, error: OSError) -> None:
        """Turn off what this error says, and end what waits."""
        with self._shared.lock:
            self._shared.health.fail(trouble_of(error))
        self.drop_all(Outcome.TIER_OFF)

    def drop_all(self, outcome: Outcome) -> None:
        """End everything that waits."""
        with self._shared.lock:
            dropped = [*self._again, *self._queue]
            self._again.clear()
            self._queue.clear()
            self._queued_bytes = 0
            self._shared.lock.notify_all()
        self._end_all(dropped, outcome)

    def _end_all(self, items: list[_Item], outcome: Outcome) -> None:
        """End these records alike, with one call per job."""
        by_job: dict[WriteJob, list[int]] = {}
        for item in items:
            by_job.setdefault(item.job, []).append(item.which)
        for job, index in by_job.items():
            self._end(job, np.array(index), np.full(len(index), outcome, np.uint8))

    def idle(self) -> bool:
        """Nothing waits and nothing is in the kernel; the lock is held."""
        return not (self._queue or self._again or self._active or self._opening)

    def sync_open(self) -> None:
        """Make what is written survive a power cut. Raises OSError."""
        shared = self._shared
        with shared.lock:
            segment = self._open
            held = shared.table.hold(segment.number) if segment is not None else None
        if held is None:
            return
        try:
            shared.disk.sync(shared.table.fd(held))
            shared.disk.sync_directory(shared.directory.path)
        finally:
            with shared.lock:
                fds = shared.table.let_go(held)
            shared.close_fds(fds)


def seal_file(shared: Shared, segment: Segment, entries: Entries, end_page: int) -> int:
    """Write the footer behind the records, cut the file there and sync it; answer its size. Raises OSError."""
    by_place = entries[np.argsort(entries["page"], kind="stable")]
    body = make_footer(by_place, segment.number, end_page, shared.directory.nonce)
    buffer = scratch(len(body))
    buffer[:] = body
    fd = shared.table.fd(segment)
    write_fully(shared.disk, fd, [buffer], end_page * PAGE)
    size = end_page * PAGE + len(body)
    shared.disk.truncate(fd, size)
    shared.disk.sync(fd)
    with shared.lock:
        shared.counters.device_bytes += len(body)
    return size


def digests_of(rows: npt.ArrayLike) -> Bytes:
    """u8[n, 16] from what a caller gave."""
    return np.asarray(rows, np.uint8).reshape(-1, DIGEST_BYTES)
