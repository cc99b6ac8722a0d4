"""The end of the log: the segment that takes records now, how the next one begins and how a full one is sealed.

A segment is sealed by the thread that brings back its last write, so sealing never waits. Not thread-safe by itself:
what changes here changes under the tier's lock, and files are touched without it.
"""

from collections.abc import Callable

import numpy as np

from prefixcache_offload.disk.records import PAGE, Entries, make_footer
from prefixcache_offload.disk.seam import scratch, write_fully
from prefixcache_offload.disk.segments import Segment, Stage
from prefixcache_offload.disk.shared import Shared

_SLOW_CALL = 4.0
"""Allocating, sealing and syncing may take so many times as long as a read before they count as hanging."""


class Tail:
    """Which segment is open."""

    def __init__(self, shared: Shared, fail: Callable[[OSError], None]) -> None:
        """`fail` is told what the disk refused, without the lock."""
        self._shared = shared
        self._fail = fail
        self.open: Segment | None = None

    def replace(self, fresh: Segment) -> Segment | None:
        """Make the file of a segment begun in the table, and let it take what comes next.

        Answer the one that was open: `settle` it once nobody waits for this.
        Raises OSError; the segment is out of the table then and its file gone.
        """
        try:
            with self._shared.calling(patience=_SLOW_CALL):
                self._create(fresh)
        except OSError:
            with self._shared.lock:
                self._shared.table.remove(fresh)
            raise
        with self._shared.lock:
            old, self.open = self.open, fresh
            if old is not None:
                old.stage = Stage.CLOSING
        return old

    def _create(self, segment: Segment) -> None:
        shared = self._shared
        fd = shared.directory.open_segment(segment.number, create=True)
        try:
            shared.disk.allocate(fd, segment.size_bytes)
        except OSError:
            shared.close_fds([fd])
            self._remove_file(segment)
            raise
        segment.fd = fd

    def close(self) -> None:
        """Let the open segment take no more records; it is sealed once its last write is back."""
        with self._shared.lock:
            segment, self.open = self.open, None
            if segment is not None:
                segment.stage = Stage.CLOSING
        if segment is not None:
            self.settle(segment)

    def leave(self, segment: Segment) -> None:
        """This segment failed or is being removed: nothing more goes into it. The lock is held."""
        if self.open is segment:
            self.open = None
        if segment.stage is Stage.OPEN:
            segment.stage = Stage.CLOSING

    def settle(self, segment: Segment) -> None:
        """Once nobody writes in it: seal a closing segment, let go of a freed one."""
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
            segment.writes -= seal
            fds = shared.table.idle_fd(segment) if segment.stage is Stage.FREED else []
        shared.close_fds(fds)

    def _seal(self, segment: Segment) -> None:
        """Footer, exact size, sync. A failure costs the next start a scan, nothing else."""
        shared = self._shared
        if not len(segment.entries):
            self._discard(segment)
            return
        try:
            with shared.calling(patience=_SLOW_CALL):
                size = seal_file(shared, segment, segment.entries, segment.end_page)
        except OSError as error:
            with shared.lock:
                shared.counters.seals_failed += 1
            self._fail(error)
            return
        with shared.lock:
            shared.counters.sealed += 1
            shared.table.resized(segment, size)
            segment.forget_entries()
            segment.dirty = False
            if segment.stage is not Stage.FREED:
                segment.stage = Stage.SEALED

    def _discard(self, segment: Segment) -> None:
        """Nothing was written in it after all."""
        with self._shared.lock:
            listed = segment.stage is not Stage.FREED
            self._shared.table.remove(segment)
        if listed:
            self._remove_file(segment)

    def _remove_file(self, segment: Segment) -> None:
        try:
            self._shared.table.unlink(segment)
        except OSError:
            self._shared.counters.files_left += 1

    def sync(self) -> None:
        """Make everything that is written survive a power cut. Raises OSError."""
        shared = self._shared
        with shared.lock:
            dirty = [s for s in shared.table.by_number.values() if s.dirty]
            for segment in dirty:
                segment.dirty = False
                segment.holders += 1
        failed: OSError | None = None
        for segment in dirty:
            try:
                with shared.calling(patience=_SLOW_CALL):
                    shared.disk.sync(shared.table.fd(segment))
            except OSError as error:
                failed, segment.dirty = error, True
            with shared.lock:
                fds = shared.table.let_go(segment)
            shared.close_fds(fds)
        if failed is not None:
            raise failed
        shared.disk.sync_directory(shared.directory.path)


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
