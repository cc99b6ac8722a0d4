"""Fetches the footers of sealed segments, a few ahead of whoever wants them: a restart waits for the disk, not in turn.

What the entries mean is not known here. Without reader threads everything happens when it is asked for.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import numpy as np

from prefixcache_offload.disk.records import PAGE, Bytes, Entries, read_footer, read_trailer
from prefixcache_offload.disk.seam import read_fully, scratch
from prefixcache_offload.disk.segments import Segment
from prefixcache_offload.disk.shared import Shared

_TAIL_BYTES = 32 << 10
"""Trailer and footer of a segment of 2 MiB blocks in one read."""
_THREADS = 4
_MOST_AHEAD = 16

Ask = Callable[[], Entries | None]
"""The footer's entries, or None if it is not good. Raises OSError."""


class Footers:
    """A context: segments asked for are held until they are taken or the context ends."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self.ahead = _MOST_AHEAD if shared.options.readers else 0
        self._pool = ThreadPoolExecutor(_THREADS, "disk-footers") if self.ahead else None
        self._queue: deque[tuple[Segment, Ask, Callable[[], bool]]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        while self._queue:
            self._let_go(self._queue.popleft()[0])

    @property
    def waiting(self) -> int:
        """Segments asked for and not taken."""
        return len(self._queue)

    def ask(self, number: int) -> None:
        """Begin to fetch a segment's footer; nothing happens if the segment is gone."""
        with self._shared.lock:
            segment = self._shared.table.hold(number)
        if segment is None:
            return
        if self._pool is not None:
            future = self._pool.submit(footer_of, self._shared, segment)
            self._queue.append((segment, future.result, future.done))
        else:
            self._queue.append((segment, lambda: footer_of(self._shared, segment), lambda: False))

    @contextmanager
    def next(self, most: int) -> Iterator[list[tuple[Segment, Ask]]]:
        """The segment asked for first, and of those behind it what has come by now, `most` of them: held for as long
        as the block runs, with their footers."""
        taken = [self._queue.popleft()[:2]]
        while self._queue and len(taken) < most and self._queue[0][2]():
            taken.append(self._queue.popleft()[:2])
        try:
            yield taken
        finally:
            self._let_go(*(segment for segment, _ in taken))

    def _let_go(self, *segments: Segment) -> None:
        with self._shared.lock:
            fds = [fd for segment in segments for fd in self._shared.table.let_go(segment)]
        self._shared.close_fds(fds)


def footer_of(shared: Shared, segment: Segment) -> Entries | None:
    """The entries of a held segment out of its footer, or None if there is no good one. Raises OSError."""
    size = segment.size_bytes
    if size < PAGE or size % PAGE:
        return None
    tail_bytes = min(size, _TAIL_BYTES)
    tail = read_piece(shared, segment, size - tail_bytes, tail_bytes)
    if tail.size < tail_bytes:
        return None
    trailer = read_trailer(tail[-PAGE:], segment.number, size, shared.directory.nonce)
    if trailer is None:
        return None
    start = int(trailer["footer_page"]) * PAGE
    if start >= size - tail_bytes:
        raw = tail[start - (size - tail_bytes) : -PAGE]
    else:
        raw = read_piece(shared, segment, start, size - PAGE - start)
    return read_footer(raw, trailer)


def read_piece(shared: Shared, segment: Segment, offset: int, size_bytes: int) -> Bytes:
    """So many bytes of a held segment, u8, fewer at the end of the file. Raises OSError."""
    buffer = scratch(size_bytes)
    with shared.calling():
        got = read_fully(shared.disk, shared.table.fd(segment), [buffer], offset)
    return np.frombuffer(buffer, np.uint8)[:got]
