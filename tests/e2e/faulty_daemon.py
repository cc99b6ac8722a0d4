"""`python -m tests.e2e.faulty_daemon`: the daemon, with a disk that a test can make slow, hang or fail while it runs.

The faults are files in the folder that the environment variable DISK_FAULTS names; each holds while its file is there:
- `hang_reads`: reads of segments wait; with a number in the file, only those of that segment and older ones;
- `eio_reads`, `eio_writes`: they fail with EIO;
- `record_s`: a read takes that many seconds per 2 MiB, one read after the other, in the order in which they lie on
  disk of those that wait, as of a disk that is slow.
"""

import errno
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from prefixcache.server.__main__ import main
from prefixcache_offload.disk import tier
from prefixcache_offload.disk.directory import SEGMENT_PREFIX
from prefixcache_offload.disk.seam import Buffer, RealDisk

_UNIT_BYTES = 2 << 20
_LOOK_S = 0.005
_GATHER_S = 0.02
_LONGEST_S = 60.0


class FaultyDisk(RealDisk):
    """See the top of the file."""

    def __init__(self) -> None:
        self._faults = Path(os.environ["DISK_FAULTS"])
        self._turn = threading.Condition()
        self._waiting: list[tuple[int, int, int]] = []
        self._is_busy = False

    def pread(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """As the kernel's, with the faults."""
        name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
        if name.startswith(SEGMENT_PREFIX):
            segment = int(name[len(SEGMENT_PREFIX) :], 16)
            self._wait_while_hanging(segment)
            if self._is_on("eio_reads"):
                raise OSError(errno.EIO, "injected")
            self._wait_for_slow_disk(segment, offset, sum(buffer.nbytes for buffer in buffers))
        return super().pread(fd, buffers, offset)

    def pread_now(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Nothing: what the page cache holds must not come from a disk with faults."""
        return 0

    def pwrite(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """As the kernel's, with the faults."""
        if self._is_on("eio_writes"):
            raise OSError(errno.EIO, "injected")
        return super().pwrite(fd, buffers, offset)

    def _is_on(self, fault: str) -> bool:
        return (self._faults / fault).exists()

    def _wait_while_hanging(self, segment: int) -> None:
        until = time.monotonic() + _LONGEST_S
        while time.monotonic() < until:
            try:
                text = (self._faults / "hang_reads").read_text()
            except FileNotFoundError:
                return
            if text and segment > int(text):
                return
            time.sleep(_LOOK_S)

    def _wait_for_slow_disk(self, segment: int, offset: int, size_bytes: int) -> None:
        try:
            text = (self._faults / "record_s").read_text()
        except FileNotFoundError:
            return
        mine = (segment, offset, threading.get_ident())
        with self._turn:
            self._waiting.append(mine)
        time.sleep(_GATHER_S)  # two readers that begin together come in any order
        with self._turn:
            self._turn.wait_for(lambda: not self._is_busy and mine == min(self._waiting))
            self._waiting.remove(mine)
            self._is_busy = True
        time.sleep(float(text or 0) * size_bytes / _UNIT_BYTES)
        with self._turn:
            self._is_busy = False
            self._turn.notify_all()


if __name__ == "__main__":
    tier.RealDisk = FaultyDisk  # type: ignore[misc]  # stands in for the kernel
    sys.exit(main())
