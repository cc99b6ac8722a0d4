"""Frees a segment: what the caller wants to keep is appended again first, then the file goes.

What is appended again keeps the form it has on disk. The old copy stays until every new one is written, so a crash at
any moment leaves one or both, and a restart takes the newer. Tombstones in the segment are appended again while an
older segment is left that could hold what they revoke.
Works in chunks of bounded memory, driven by the ends of its own reads and writes; it has no thread.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from prefixcache_offload.disk.outcomes import Outcome
from prefixcache_offload.disk.queued import WriteJob
from prefixcache_offload.disk.reader import Reader, ReadJob
from prefixcache_offload.disk.records import (
    ENTRY,
    KEY_BYTES,
    PAGE,
    Bytes,
    Entries,
    Kind,
    pages_of,
    stored_bytes,
)
from prefixcache_offload.disk.seam import scratch
from prefixcache_offload.disk.segments import Segment, Stage
from prefixcache_offload.disk.shared import Ended, Indexes, Outcomes, Shared
from prefixcache_offload.disk.tombstones import Tombstone
from prefixcache_offload.disk.writer import Writer

_CHUNK_BYTES = 8 << 20


class Freed(NamedTuple):
    """A segment's freeing has ended. freed: its room is back (else it stays as it was, and nothing of it is lost).

    outcomes: u8[k] for each record to keep; entries: ENTRY[k], their new places where OK. A record that is not OK is
    lost if `freed`. Records that were appended again although `freed` is False have two copies; the new one is told.
    """

    segment: int
    freed: bool
    outcomes: Outcomes
    entries: Entries


FreedCall = Callable[[Freed], None]


class Cleaner:
    """Frees segments."""

    def __init__(self, shared: Shared, reader: Reader, writer: Writer) -> None:
        self._shared, self._reader, self._writer = shared, reader, writer

    def free(self, number: int, keep: Entries, done: FreedCall) -> None:
        """Begin to free a segment; `done` is called once, maybe before this returns.

        keep: ENTRY[k] as for a read. A segment that does not exist is freed already; one that a recovery has not
        told of yet stays, because nobody knows yet what it clears.
        """
        tail = self._writer.tail
        with self._shared.lock:
            segment = self._shared.table.by_number.get(number)
            if segment is not None:
                tail.leave(segment)  # else what is kept would be appended to the very segment that goes
        if segment is not None:
            tail.settle(segment)
        _Freeing(self._shared, self._reader, self._writer, number, keep, done).go_on()


class _Freeing:
    """One segment on its way out."""

    def __init__(
        self, shared: Shared, reader: Reader, writer: Writer, number: int, keep: Entries, done: FreedCall
    ) -> None:
        self._shared, self._reader, self._writer = shared, reader, writer
        self._number = number
        with shared.lock:
            self._keep = shared.table.as_stored(keep)
        self._done = done
        self._order = np.argsort(keep["page"], kind="stable")
        self._next = 0
        self._outcomes: Outcomes = np.full(len(keep), Outcome.GONE, np.uint8)
        self._result: Entries = keep.copy()
        self._stay = False
        self._buffer: Bytes = np.zeros(0, np.uint8)

    def go_on(self) -> None:
        """Take the next chunk, or finish."""
        with self._shared.lock:
            segment = self._shared.table.by_number.get(self._number)
            self._stay |= segment is not None and segment.stage is Stage.FOUND
        if self._next >= len(self._order) or self._stay:
            self._tombstones()
            return
        chunk = self._chunk()
        lengths = [pages_of(n) * PAGE for n in stored_bytes(self._keep[chunk]).tolist()]
        at = np.concatenate([[0], np.cumsum(lengths[:-1], dtype=np.int64)]).astype(np.int64)
        self._buffer = np.frombuffer(scratch(max(sum(lengths), PAGE)), np.uint8)
        waits = _Collected(len(chunk), lambda ended: self._was_read(chunk, at, ended))
        self._reader.submit(ReadJob(-1, self._buffer, at, self._keep[chunk], waits.took, as_stored=True))

    def _chunk(self) -> Indexes:
        first, size = self._next, 0
        lengths = stored_bytes(self._keep)
        while self._next < len(self._order):
            length = int(lengths[self._order[self._next]])
            if size and size + length > _CHUNK_BYTES:
                break
            size += length
            self._next += 1
        return self._order[first : self._next]

    def _was_read(self, chunk: Indexes, at: Indexes, ended: "_Collected") -> None:
        self._outcomes[chunk] = ended.outcomes
        # A read that failed for a reason of the tier leaves good bytes behind: then the segment must stay.
        self._stay |= bool(np.isin(ended.outcomes, _TIER_REASONS).any())
        good = np.flatnonzero(ended.outcomes == Outcome.OK)
        if not good.size or self._stay:
            self.go_on()
            return
        entries = ended.entries[good].copy()
        waits = _Collected(good.size, lambda written: self._was_written(chunk[good], written))
        self._writer.submit(WriteJob(-1, self._buffer, at[good], entries, waits.took, digested=True, again=True))

    def _was_written(self, index: Indexes, ended: "_Collected") -> None:
        self._outcomes[index] = ended.outcomes
        self._result[index] = ended.entries
        self._stay |= not np.isin(ended.outcomes, [Outcome.OK, Outcome.REVOKED]).all()
        self.go_on()

    def _tombstones(self) -> None:
        """Append again what is still needed, then remove."""
        with self._shared.lock:
            needed = [t for t in self._shared.tombstones.within(self._number) if self._needed(t)]
        if self._stay or not needed:
            self._finish()
            return
        left = [len(needed)]

        def written(ended: Ended) -> None:
            with self._shared.lock:
                left[0] -= 1
                self._stay |= bool((ended.outcomes != Outcome.OK).any())
                last = not left[0]
            if last:
                self._finish()

        for tombstone in needed:
            submit_tombstone(self._shared, self._writer, tombstone, written)

    def _needed(self, tombstone: Tombstone) -> bool:
        """Whether a segment is left that can hold something it revokes; the lock is held."""
        others = [s for n, s in self._shared.table.by_number.items() if n != self._number]
        return any(s.stage is Stage.FOUND or s.writes or 0 < s.first_sequence < tombstone.revokes for s in others)

    def _finish(self) -> None:
        self._buffer = np.zeros(0, np.uint8)
        shared = self._shared
        segment: Segment | None = None
        fds: list[int] = []
        with shared.lock:
            if not self._stay:
                segment = shared.table.by_number.get(self._number)
            if segment is not None:
                self._writer.tail.leave(segment)
                shared.table.remove(segment)
                shared.tombstones.discard(self._number)
                shared.counters.freed_segments += 1
                fds = shared.table.idle_fd(segment)
        if segment is not None:
            try:
                shared.table.unlink(segment)
            except OSError as error:
                with shared.lock:
                    shared.counters.files_left += 1
                self._writer.fail(error)
        shared.close_fds(fds)
        self._done(Freed(self._number, not self._stay, self._outcomes, self._result))


_TIER_REASONS = [Outcome.TIER_OFF, Outcome.IO_ERROR, Outcome.CANCELLED, Outcome.SHUT_DOWN]


class _Collected:
    """Gathers the ends of one job, and calls on when there are all."""

    def __init__(self, count: int, then: Callable[["_Collected"], None]) -> None:
        self.outcomes: Outcomes = np.zeros(count, np.uint8)
        self.entries: Entries = np.zeros(count, ENTRY)
        self._left = count
        self._then = then

    def took(self, ended: Ended) -> None:
        """One end of the job; they come from several threads, but each tells how many are left."""
        self.outcomes[ended.which] = ended.outcomes
        self.entries[ended.which] = ended.entries
        if ended.left == 0:
            self._then(self)


def submit_tombstone(shared: Shared, writer: Writer, tombstone: Tombstone, done: Callable[[Ended], None]) -> None:
    """Append a tombstone; it is put in force again, under its new place, when it is written. revokes 0: from now on."""
    entries = np.zeros(1, ENTRY)
    entries["kind"], entries["namespace"], entries["revokes"] = Kind.TOMBSTONE, tombstone.namespace, tombstone.revokes
    size = tombstone.keys.size
    entries["length"] = size
    payload = np.frombuffer(scratch(max(pages_of(size) * PAGE, PAGE)), np.uint8)
    np.copyto(payload[:size], tombstone.keys.reshape(-1))

    def ended(told: Ended) -> None:
        if told.outcomes[0] == Outcome.OK:
            entry = told.entries[0]
            keys = payload[:size].reshape(-1, KEY_BYTES)
            with shared.lock:
                shared.tombstones.add(
                    Tombstone(int(entry["revokes"]), int(entry["namespace"]), keys, int(entry["segment"]))
                )
        done(told)

    def admitted(drawn: Entries) -> None:
        # In force at once: a recovery may be under way, or a segment being freed.
        shared.tombstones.add(tombstone._replace(revokes=int(drawn["revokes"][0])))

    again = tombstone.revokes > 0
    writer.submit(WriteJob(-1, payload, np.zeros(1, np.int64), entries, ended, again=again, admitted=admitted))
