"""Fetches the footers of sealed segments, a few ahead of whoever wants them: a restart waits for the disk, not in turn.

The kernel reads ahead, through its page cache, so that one thread can ask for many: threads with direct calls of their
own take three times as long and six times the processor, most of it for handing the interpreter to each other.
What the entries mean is not known here.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np

from prefixcache_offload.disk.records import PAGE, Bytes, Entries, read_footer, read_trailer
from prefixcache_offload.disk.seam import Buffer, read_fully, scratch
from prefixcache_offload.disk.segments import Segment
from prefixcache_offload.disk.shared import Shared

_TAIL_BYTES = 32 << 10
"""Trailer and footer of a segment of 2 MiB blocks in one read."""
_MOST_TAIL_BYTES = 1 << 20
_AHEAD = 16


class _NotYetError(Exception):
    """It would have to be waited for."""


class _Asked(NamedTuple):
    """A held segment and the descriptor its footer is read by, or why there is none."""

    segment: Segment
    fd: int
    failed: OSError | None = None


class Footer(NamedTuple):
    """What came of a held segment: the entries, None if its footer is not good; or why it cannot be read now."""

    segment: Segment
    entries: Entries | None
    failed: OSError | None = None


class Footers:
    """A context: segments asked for are held until they are taken or the context ends."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._queue: deque[_Asked] = deque()
        self._tail = scratch(_TAIL_BYTES)
        """To read into, as long as what is asked for: the longest footer there was."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._let_go(self._queue)

    @property
    def waiting(self) -> int:
        """Segments asked for and not taken."""
        return len(self._queue)

    @property
    def enough(self) -> bool:
        """Whether as many are waiting as are worth it."""
        return len(self._queue) >= _AHEAD

    def ask(self, number: int) -> None:
        """Begin to fetch a segment's footer; nothing happens if the segment is gone."""
        with self._shared.lock:
            segment = self._shared.table.hold(number)
        if segment is None:
            return
        try:
            with self._shared.calling():
                fd = self._shared.directory.open_cached(number)
        except OSError as error:
            self._queue.append(_Asked(segment, -1, error))
            return
        with self._shared.calling():
            self._shared.disk.read_ahead(fd, max(segment.size_bytes - len(self._tail), 0), len(self._tail))
        self._queue.append(_Asked(segment, fd))

    @contextmanager
    def next(self, most: int) -> Iterator[list[Footer]]:
        """The segment asked for first, and of those behind it what has come by now, `most` of them: held for as long as
        the block runs."""
        taken: list[_Asked] = []
        footers: list[Footer] = []
        try:
            while self._queue and len(taken) < most:
                footer = self._fetched(self._queue[0], wait=not taken)
                if footer is None:
                    break
                taken.append(self._queue.popleft())
                footers.append(footer)
            yield footers
        finally:
            self._let_go(taken)

    def _fetched(self, asked: _Asked, *, wait: bool) -> Footer | None:
        """None where it would have to be waited for: what came before it can be told meanwhile."""
        segment = asked.segment
        if asked.failed is not None:
            return Footer(segment, None, asked.failed)
        try:
            return Footer(segment, self._entries(segment, asked.fd, self._read if wait else self._come))
        except _NotYetError:
            return None
        except OSError as error:
            return Footer(segment, None, error)

    def _entries(self, segment: Segment, fd: int, read: Callable[[int, Buffer, int], Bytes]) -> Entries | None:
        """The entries of a held segment, or None if it has no good footer. Raises what `read` does."""
        size = segment.size_bytes
        if size < PAGE or size % PAGE:
            return None
        first = max(size - len(self._tail), 0)
        tail = read(fd, self._tail[: size - first], first)
        if tail.size < size - first:
            return None
        trailer = read_trailer(tail[-PAGE:], segment.number, size, self._shared.directory.nonce)
        if trailer is None:
            return None
        start = int(trailer["footer_page"]) * PAGE
        if start >= first:
            return read_footer(tail[start - first : -PAGE], trailer)
        raw = read(fd, scratch(size - PAGE - start), start)
        if len(self._tail) < size - start <= _MOST_TAIL_BYTES:
            self._tail = scratch(size - start)  # others will be as long
        return read_footer(raw, trailer)

    def _read(self, fd: int, buffer: Buffer, offset: int) -> Bytes:
        return _read(self._shared, fd, buffer, offset)

    def _come(self, fd: int, buffer: Buffer, offset: int) -> Bytes:
        """As `_read` of what is there. Raises _NotYetError, and has the rest fetched."""
        disk = self._shared.disk
        if disk.pread_now(fd, [buffer], offset) < len(buffer):
            disk.read_ahead(fd, offset, len(buffer))
            raise _NotYetError
        return np.frombuffer(buffer, np.uint8)

    def _let_go(self, asked: Collection[_Asked]) -> None:
        with self._shared.lock:
            fds = [fd for each in asked for fd in self._shared.table.let_go(each.segment)]
        self._shared.close_fds([*fds, *(each.fd for each in asked if each.failed is None)])


def read_piece(shared: Shared, segment: Segment, offset: int, size_bytes: int) -> Bytes:
    """So many bytes of a held segment, u8, fewer at the end of the file. Raises OSError."""
    return _read(shared, shared.table.fd(segment), scratch(size_bytes), offset)


def _read(shared: Shared, fd: int, buffer: Buffer, offset: int) -> Bytes:
    with shared.calling():
        got = read_fully(shared.disk, fd, [buffer], offset)
    return np.frombuffer(buffer, np.uint8)[:got]
