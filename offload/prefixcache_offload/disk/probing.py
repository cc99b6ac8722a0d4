"""How fast the disk reads, by a short look before anything is asked of it.

Bounded in bytes and time: a disk at 1 GB/s costs a few milliseconds, a slow one a quarter of a second and the piece
that was begun by then. On file systems without direct calls memory may answer instead of the disk; what is read in
earnest corrects that.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from prefixcache_offload.disk.seam import read_fully, scratch, write_fully
from prefixcache_offload.disk.shared import Shared

FIRST_BYTES = 256 << 10
"""Small, so that a slow disk is known soon."""
_PIECE_BYTES = 1 << 20
_MOST_BYTES = 8 << 20
_LONGEST_S = 0.25
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
    """The first piece pays for the way there, so it counts only where there is no other."""
    buffer = scratch(_PIECE_BYTES)
    began = shared.clock()
    done, seconds = _read(shared, fd, buffer[:FIRST_BYTES], 0)
    rate = done / max(seconds, 1e-9)
    at, total, spent = done, 0, 0.0
    while at + _PIECE_BYTES <= min(size_bytes, _MOST_BYTES) and shared.clock() - began < _LONGEST_S:
        done, seconds = _read(shared, fd, buffer, at)
        if not done:
            break
        at, total, spent = at + done, total + done, spent + seconds
    return total / max(spent, 1e-9) if total else rate


def _read(shared: Shared, fd: int, buffer: memoryview, offset: int) -> tuple[int, float]:
    with shared.calling(patience=_PATIENCE):
        began = shared.clock()
        got = read_fully(shared.disk, fd, [buffer], offset)
        return got, shared.clock() - began
