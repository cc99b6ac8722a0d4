"""How fast the disk reads, by a short look before anything is asked of it.

Bounded in bytes and time: a disk at 1 GB/s costs a few milliseconds, a slow one a second and the piece that was begun
by then. On file systems without direct calls memory may answer instead of the disk; what is read in
earnest corrects that.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from prefixcache_offload.disk.seam import read_fully, scratch, write_fully
from prefixcache_offload.disk.shared import Shared

FIRST_BYTES = 256 << 10
FEWEST = 3
"""Pieces of the first size, which are small so that a slow disk is known soon."""
_PIECE_BYTES = 1 << 20
_MOST_BYTES = 8 << 20
_LONGEST_S = 0.25
_LONGEST_SLOW_S = 1.0
_PATIENCE = 4.0
_FILE_BYTES = 2 << 20


def probe_read(shared: Shared) -> float:
    """Bytes per second of reading a segment that is there, or a file made for it; 0.0 where neither can be.

    Raises OSError."""
    with _something(shared) as (fd, size_bytes):
        return _rate(shared, fd, size_bytes) if size_bytes else 0.0


@contextmanager
def _something(shared: Shared) -> Iterator[tuple[int, int]]:
    """(descriptor, bytes) of what can be read: the newest long segment, else a file of its own. Raises OSError."""
    with shared.lock:
        long = [each.number for each in shared.table.by_number.values() if each.size_bytes >= _FILE_BYTES]
        segment = shared.table.hold(max(long)) if long else None
        room = shared.table.free_bytes() >= _FILE_BYTES  # the cap is hard
    if segment is not None:
        try:
            with shared.calling():
                fd = shared.table.fd(segment)
            yield fd, segment.size_bytes
        finally:
            with shared.lock:
                fds = shared.table.let_go(segment)
            shared.close_fds(fds)
    elif room:
        with shared.directory.nameless_file() as fd, shared.calling(patience=_PATIENCE):
            content = scratch(_FILE_BYTES)
            np.frombuffer(content, np.uint8)[:] = np.arange(_FILE_BYTES, dtype=np.uint32)  # no holes, no zeros
            write_fully(shared.disk, fd, [content], 0)
            shared.disk.sync(fd)
            yield fd, _FILE_BYTES
    else:
        yield -1, 0


def _rate(shared: Shared, fd: int, size_bytes: int) -> float:
    """Of the best piece: others pay for the way there, or for a machine that is busy with something else, and a disk
    that is thought too slow is not asked at all. A few small pieces, so that a slow disk is known soon; then long ones
    while they come fast."""
    buffer = scratch(_PIECE_BYTES)
    began, at, best = shared.clock(), 0, 0.0
    size_bytes = min(size_bytes, _MOST_BYTES)
    while at + FIRST_BYTES <= size_bytes:
        few = at < FEWEST * FIRST_BYTES
        if shared.clock() - began > (_LONGEST_SLOW_S if few else _LONGEST_S):
            break
        wanted = FIRST_BYTES if few else min(_PIECE_BYTES, size_bytes - at)
        done, seconds = _read(shared, fd, buffer[:wanted], at)
        if not done:
            break
        at, best = at + done, max(best, done / max(seconds, 1e-9))
    return best


def _read(shared: Shared, fd: int, buffer: memoryview, offset: int) -> tuple[int, float]:
    with shared.calling(patience=_PATIENCE):
        began = shared.clock()
        got = read_fully(shared.disk, fd, [buffer], offset)
        return got, shared.clock() - began
