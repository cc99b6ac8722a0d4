"""Appends records to the open segment: a bounded queue, batches of one large call each, footers when a segment is full.

Any number of threads call `step`; how many of them write at once, `crew` says. Places and sequence numbers are given
out under the lock in the queue's order, so the order in the log is the order of the sequence. What has returned OK has
left this process: it survives kill -9. It survives a power cut once its segment is sealed or `Tail.sync` came back. A
segment in which a call failed is closed.
"""

from collections import deque
from typing import NamedTuple

import numpy as np

from prefixcache_offload.disk.crew import Crew
from prefixcache_offload.disk.outcomes import Outcome, outcome_of, trouble_of
from prefixcache_offload.disk.packing import Packer
from prefixcache_offload.disk.queued import Item, WriteJob
from prefixcache_offload.disk.records import (
    ENTRY,
    PAGE,
    Codec,
    Entries,
    Kind,
    Mask,
    digest,
    footer_bytes,
    stored_bytes,
    write_headers,
)
from prefixcache_offload.disk.seam import Scratches, write_fully
from prefixcache_offload.disk.segments import Segment, Stage
from prefixcache_offload.disk.shared import Ended, Indexes, Outcomes, Shared
from prefixcache_offload.disk.tail import Tail

_MOST_IN_BATCH = 128
_BLOCK, _TOMBSTONE, _LOSSLESS = int(Kind.BLOCK), int(Kind.TOMBSTONE), int(Codec.LOSSLESS)


class _Batch(NamedTuple):
    segment: Segment
    items: list[Item]
    entries: Entries
    corrupt: Mask
    headers: memoryview
    """Pages, at least as many as there are records."""


class Writer:
    """The write side of the tier."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self.tail = Tail(shared, self.fail)
        self.packer = Packer(shared)
        self._queue: deque[Item] = deque()
        self._again: deque[Item] = deque()
        self._queued_bytes = 0
        self._tombstones = 0
        """Clears that wait: nothing in front of them may dally."""
        self._opening = False
        self._active: list[int] = []
        """First sequence numbers of the batches in the kernel."""
        self._crew = Crew()
        self._headers = Scratches(_MOST_IN_BATCH * PAGE)

    @property
    def queued_bytes(self) -> int:
        """Payload that waits."""
        return self._queued_bytes

    def submit(self, job: WriteJob) -> None:
        """Take a job. What does not fit in the queue, or in a segment at all, ends here and now."""
        shared, entries = self._shared, job.entries
        job.left = len(entries)
        with shared.lock:
            revoked = shared.tombstones.revoked(entries) if job.again else np.zeros(len(entries), np.bool_)
            first = shared.draw_sequences(len(entries))
            entries["sequence"] = np.arange(first, first + len(entries), dtype=np.uint64)
            fresh = (entries["kind"] == _TOMBSTONE) & (entries["revokes"] == 0)
            entries["revokes"][fresh] = entries["sequence"][fresh]
            if job.admitted is not None:
                job.admitted(entries)
            columns = (entries["length"], stored_bytes(entries), entries["kind"] == _TOMBSTONE, revoked)
            told = enumerate(zip(*(column.tolist() for column in columns), strict=True))
            refusals = [self._admit(Item(job, i, *about), gone=gone) for i, (*about, gone) in told]
            shared.writes_wait.notify(self._lacking())
        outcomes = np.array(refusals, np.uint8)
        refused = np.flatnonzero(outcomes)
        if refused.size:
            self._end(job, refused, outcomes[refused])

    def _admit(self, item: Item, *, gone: bool) -> Outcome:
        """Queue a record and answer OK, or why it may not be queued."""
        shared, options = self._shared, self._shared.options
        length, again = item.length, item.job.again
        if shared.closing:
            return Outcome.SHUT_DOWN
        if shared.health.writes_off is not None:
            return Outcome.TIER_OFF
        if gone and not item.is_tombstone:
            return Outcome.REVOKED
        if length > options.new_segment_bytes - footer_bytes(1) - PAGE:
            return Outcome.NO_ROOM
        must = again or item.is_tombstone
        if not must and self._queued_bytes + length > max(options.queue_bytes, length):
            return Outcome.QUEUE_FULL
        self._queued_bytes += length
        (self._again if again else self._queue).append(item)
        self._tombstones += item.is_tombstone and not again
        self.packer.offer_locked(item)
        return Outcome.OK

    def wait_for_work(self) -> bool:
        """Block until `step` may have something to do; False once the tier closes. Lets reads go first for a while."""
        shared = self._shared
        with shared.lock:
            # What waits for its smaller form, or for a call that hangs, is looked at again when its time is up.
            while not (shared.closing or self._waiting()):
                shared.writes_wait.wait(shared.options.pack_patience_s if self._queue or self._again else None)
            if shared.reads_pending and not shared.closing:
                shared.reads_done.wait_for(
                    lambda: not shared.reads_pending or shared.closing, timeout=shared.options.write_patience_s
                )
            return not shared.closing or bool(self._queue or self._again)

    def _waiting(self) -> bool:
        if self._opening or not self._lacking():
            return False
        return bool(self._again or (self._queue and self._head_ready()))

    def _lacking(self) -> int:
        """Writers that are to begin; the lock is held."""
        return self._crew.lacks(self._queued_bytes, self._shared.clock(), urgent=self._tombstones > 0)

    def _head_ready(self) -> bool:
        shared = self._shared
        full = 2 * self._queued_bytes > shared.options.queue_bytes
        hurry = full or shared.closing or self._tombstones > 0
        return self.packer.ready_locked(self._queue[0], hurry=hurry)

    def step(self) -> bool:
        """Do one thing: write one batch, or make room for it. False if there was nothing to do."""
        with self._shared.lock:
            queue = self._again or self._queue
            if not self._waiting():
                return False
            segment = self.tail.open
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

    def _take(self, segment: Segment, queue: deque[Item]) -> _Batch:
        """Batch up what comes next, and give it its places."""
        items: list[Item] = []
        size = 0
        # A call keeps a core busy in the kernel, and nobody else gets it meanwhile: long ones only where much waits.
        aim = self._shared.options.batch_bytes // (
            1 if self._crew.behind(self._queued_bytes, self._shared.clock()) else 4
        )
        while queue and len(items) < _MOST_IN_BATCH:
            item = queue[0]
            full = size + item.size > aim or not segment.fits(item.pages, 1)
            if items and (full or (queue is self._queue and not self._head_ready())):
                break
            size += item.size
            items.append(queue.popleft())
            self._unqueued(item)
            job, which = item.job, item.which
            job.segments[which] = segment.number
            job.pages[which] = segment.promise(item.pages, 1)
            if item.stored is not None:
                job.entries["codec"][which], job.entries["pages"][which] = _LOSSLESS, item.pages - 1
        self._active.append(int(items[0].job.entries["sequence"][items[0].which]))
        self._crew.begin(self._shared.clock())
        segment.writes += 1
        return _Batch(segment, items, _entries_of(items), np.zeros(len(items), np.bool_), self._headers.take())

    def _unqueued(self, item: Item) -> None:
        """It waits no more; the lock is held."""
        self._queued_bytes -= item.length
        self._tombstones -= item.is_tombstone and not item.job.again

    # --- one batch -------------------------------------------------------------------------------------------------

    def _execute(self, batch: _Batch) -> None:
        shared = self._shared
        _digest(batch)
        buffers = self._buffers(batch)
        size = sum(b.nbytes for b in buffers)
        outcome: Outcome = Outcome.OK
        error: OSError | None = None
        with shared.calling(tuple({item.job.job for item in batch.items})) as call:
            try:
                write_fully(shared.disk, shared.table.fd(batch.segment), buffers, int(batch.entries["page"][0]) * PAGE)
            except OSError as failed:
                error = failed
                outcome = outcome_of(trouble_of(failed))
        with shared.lock:
            shared.counters.write_seconds += shared.clock() - call.started
            shared.counters.write_calls += 1
            written = size if error is None else 0
            shared.counters.device_bytes += written
            self._crew.end(shared.clock(), written)
            self._headers.give_back(batch.headers)
            self._written(batch, ok=error is None)
        if error is not None:
            self.fail(error)
        self._end_batch(batch, outcome)
        self.tail.settle(batch.segment)
        with shared.lock:
            self._active.remove(int(batch.entries["sequence"][0]))
            shared.writes_done.notify_all()
            # This thread goes on by itself, so one that waits is woken for the second place that is free.
            shared.writes_wait.notify(max(self._lacking() - 1, 0) if self._queue or self._again else 0)

    def _buffers(self, batch: _Batch) -> list[memoryview]:
        """Header, payload, header, payload."""
        headers = batch.headers
        size = PAGE * len(batch.items)
        write_headers(np.frombuffer(headers[:size], np.uint8), batch.entries, self._shared.directory.nonce)
        buffers: list[memoryview] = []
        for i, item in enumerate(batch.items):
            buffers.append(headers[i * PAGE : (i + 1) * PAGE])
            payload = item.buffer()
            if payload is not None:
                buffers.append(payload)
        return buffers

    def _written(self, batch: _Batch, *, ok: bool) -> None:
        """Count a batch that came back; the lock is held."""
        shared = self._shared
        batch.segment.writes -= 1
        if not ok:
            self.tail.leave(batch.segment)
        elif batch.segment.stage is not Stage.FREED:
            batch.segment.add(batch.entries[~batch.corrupt] if batch.corrupt.any() else batch.entries)
            batch.segment.dirty = True
        if ok:
            for item in batch.items:
                if item.job.again:
                    shared.counters.again_bytes += item.length
                else:
                    shared.counters.written_bytes += item.length

    def _end_batch(self, batch: _Batch, outcome: Outcome) -> None:
        corrupt = batch.corrupt.tolist()
        self._end_all([item for item, bad in zip(batch.items, corrupt, strict=True) if not bad], outcome)
        self._end_all([item for item, bad in zip(batch.items, corrupt, strict=True) if bad], Outcome.MISMATCH)

    def _end(self, job: WriteJob, index: Indexes, outcomes: Outcomes) -> None:
        with job.turn:
            job.left -= len(index)
            with self._shared.lock:
                for outcome in set(outcomes.tolist()):
                    self._shared.counters.writes[Outcome(outcome)] += int(np.count_nonzero(outcomes == outcome))
            job.done(Ended(job.job, index, outcomes, job.entries[index], job.left))

    # --- segments --------------------------------------------------------------------------------------------------

    def _roll(self) -> None:
        """Open the next segment for the record that does not fit, or end that record if the cap forbids it."""
        shared = self._shared
        with shared.lock:
            fresh, dropped = self._next_segment()
        old: Segment | None = None
        try:
            if fresh is not None:
                old = self.tail.replace(fresh)
        except OSError as error:
            self.fail(error)
        finally:
            with shared.lock:
                self._opening = False
                shared.writes_wait.notify_all()
                shared.writes_done.notify_all()
        if old is not None:
            self.tail.settle(old)
        self._end_all(dropped, Outcome.NO_ROOM)

    def _next_segment(self) -> tuple[Segment | None, list[Item]]:
        """(a segment that the cap allows, or None and the record that has to go); the lock is held."""
        queue = self._again or self._queue
        if not queue:
            return None, []
        urgent = queue is self._again or queue[0].is_tombstone
        if self._shared.table.may_add(reserve=urgent):
            return self._shared.table.begin(), []
        dropped = queue.popleft()
        self._unqueued(dropped)
        return None, [dropped]

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
            self._queued_bytes = self._tombstones = 0
            for item in dropped:
                item.waits_until = 0.0
            self._shared.writes_done.notify_all()
        self._end_all(dropped, outcome)

    def _end_all(self, items: list[Item], outcome: Outcome) -> None:
        """End these records alike, with one call per job."""
        by_job: dict[WriteJob, list[int]] = {}
        for item in items:
            by_job.setdefault(item.job, []).append(item.which)
        for job, index in by_job.items():
            self._end(job, np.array(index), np.full(len(index), outcome, np.uint8))

    def has_ended(self, sequence: int) -> bool:
        """Whether everything submitted up to this sequence number has ended; the lock is held."""
        heads = [int(q[0].job.entries["sequence"][q[0].which]) for q in (self._again, self._queue) if q]
        return all(waiting > sequence for waiting in (*heads, *self._active))


def _entries_of(items: list[Item]) -> Entries:
    """Their entries in one array, which is that of their job itself where they follow each other in one."""
    first, last = items[0], items[-1]
    if first.job is last.job and all(item.job is first.job for item in items):
        stretch = first.job.entries[first.which : last.which + 1]
        if len(stretch) == len(items):
            return stretch
    entries = np.empty(len(items), ENTRY)
    for i, item in enumerate(items):
        entries[i] = item.job.entries[item.which]
    return entries


def _digest(batch: _Batch) -> None:
    """Fill in what the payloads are: what is known of them, else what they are now."""
    digests = batch.entries["digest"]
    for i, item in enumerate(batch.items):
        job, which = item.job, item.which
        if item.stored is None and job.expected is not None and job.checked[which]:
            digests[i] = job.expected[which]  # bytes that are others are found when they are read
        elif item.is_corrupt():  # its smaller form would have a digest of its own, and nobody would see it
            batch.corrupt[i] = True  # its place is given: it stays a record that cannot be read
            digests[i] = 0
        elif item.stored is not None or not job.digested:
            digests[i] = np.frombuffer(digest(item.payload()), np.uint8)
        job.entries["digest"][which] = digests[i]
