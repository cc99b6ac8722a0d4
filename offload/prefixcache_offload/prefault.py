"""Touches a pool's pages in the background, before a worker would have to (first touch is 8 times slower than a copy).

Chunks end on slab boundaries and become ready in order, so "ready" is one number. The first stretch is touched at
normal priority, because until then nothing can be stored, the rest at a low one (the lowest would take minutes beside a
busy engine). Threads stop within one step. A machine or control group without room is reported, never run into: past a
group's limit the kernel kills a process, so room is asked for before every chunk. What a ready chunk is used for is
decided elsewhere.
"""

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np

from prefixcache_offload.limits import available_bytes
from prefixcache_offload.mapping import Mapping
from prefixcache_offload.units import chunk_ranges

_MADV_POPULATE_READ = 22  # Linux 5.14; not in the standard library
_MADV_POPULATE_WRITE = 23
_STEP_BYTES = 4 << 20
"""Faulted in one system call: some 5 to 10 ms, the longest that stopping or another thread's mmap waits."""
_LOW_PRIORITY = 10  # some 10% of a core beside a thread that wants all of it
_PAGE = mmap.PAGESIZE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class PrefaultState(Enum):
    """Where it stands; the last three are final."""

    RUNNING = "running"
    DONE = "done"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class PrefaultOptions:
    """`reserve_bytes` of the machine's or group's memory are left alone. `available` answers how much there is.

    Chunks that begin below `eager_bytes` are touched at normal priority.

    `prepare(start, end)` is called on a thread for each faulted chunk before it is ready (pinning); may raise OSError.
    """

    threads: int = 2
    eager_bytes: int = 256 << 20
    chunk_bytes: int = 64 << 20
    reserve_bytes: int = 128 << 20
    available: Callable[[], int] = available_bytes
    prepare: Callable[[int, int], None] | None = None


class Prefault:
    """Runs from construction on.

    `on_ready(ready_bytes)` is called with growing numbers: the pool is ready up to there. `on_failed(error)` is called
    once if memory runs out or a chunk cannot be prepared; what was ready stays ready. Both come from its threads, one
    at a time, must be quick, and must not call `stop`.
    """

    def __init__(
        self,
        mapping: Mapping,
        slab_bytes: int,
        on_ready: Callable[[int], None],
        on_failed: Callable[[OSError], None],
        options: PrefaultOptions | None = None,
    ) -> None:
        """Start faulting a writable `mapping`. Raises ValueError for a read-only one."""
        if not mapping.writable:
            raise ValueError("only a writable mapping can be faulted in")
        self._mapping = mapping
        self._on_ready = on_ready
        self._on_failed = on_failed
        self._options = options or PrefaultOptions()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._over = threading.Event()
        self._todo = deque(chunk_ranges(mapping.size_bytes, slab_bytes, self._options.chunk_bytes))
        self._done: dict[int, int] = {}
        self._ready_bytes = 0
        self._state = PrefaultState.RUNNING
        count = max(min(self._options.threads, len(self._todo)), 1)
        self._alive = count
        self._threads = [threading.Thread(target=self._run, name=f"prefault-{i}", daemon=True) for i in range(count)]
        for thread in self._threads:
            thread.start()

    @property
    def ready_bytes(self) -> int:
        """The pool is ready from 0 up to here."""
        return self._ready_bytes

    @property
    def state(self) -> PrefaultState:
        """Where it stands."""
        return self._state

    def wait(self, timeout_s: float | None = None) -> PrefaultState:
        """Wait until it is over, at most `timeout_s`; answer the state then."""
        self._over.wait(timeout_s)
        return self._state

    def stop(self) -> None:
        """Stop within one step and wait for the threads. Safe to call twice; call it before the pool is closed."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        try:
            lowered = False
            while (chunk := self._next_chunk()) is not None:
                if not lowered and chunk[0] >= self._options.eager_bytes:
                    lowered = _lower_priority()
                if self._fault(*chunk):
                    self._finish(*chunk)
        except OSError as error:
            self._fail(error)
        finally:
            self._leave()

    def _next_chunk(self) -> tuple[int, int] | None:
        with self._lock:
            return self._todo.popleft() if self._todo and not self._stopping.is_set() else None

    def _fault(self, start: int, end: int) -> bool:
        """True when the whole chunk is in memory and prepared; False when told to stop."""
        needed = end - start + self._options.reserve_bytes
        room = self._options.available()
        if room < needed:
            raise OSError(errno.ENOMEM, f"{room} bytes of memory are left, the next chunk needs {needed}")
        for first in range(start, end, _STEP_BYTES):
            if self._stopping.is_set():
                return False
            populate(self._mapping, first, min(first + _STEP_BYTES, end))
        if self._options.prepare is not None:
            self._options.prepare(start, end)
        return True

    def _finish(self, start: int, end: int) -> None:
        with self._lock:
            self._done[start] = end
            before = self._ready_bytes
            while self._ready_bytes in self._done:
                self._ready_bytes = self._done.pop(self._ready_bytes)
            if self._ready_bytes > before:
                self._on_ready(self._ready_bytes)

    def _fail(self, error: OSError) -> None:
        self._stopping.set()
        with self._lock:
            if self._state is PrefaultState.RUNNING:
                self._state = PrefaultState.FAILED
                self._on_failed(error)

    def _leave(self) -> None:
        with self._lock:
            self._alive -= 1
            if self._alive:
                return
            if self._state is PrefaultState.RUNNING:
                whole = self._ready_bytes == self._mapping.size_bytes
                self._state = PrefaultState.DONE if whole else PrefaultState.STOPPED
        self._over.set()


def populate(mapping: Mapping, start: int, end: int) -> None:
    """Bring the pages of [start, end) of a writable mapping into memory, unchanged, without the interpreter lock.

    Raises OSError (ENOMEM or EFAULT) when there is no memory, ValueError for a range outside the mapping.
    """
    if not 0 <= start <= end <= mapping.size_bytes:
        raise ValueError(f"[{start}, {end}) is outside a mapping of {mapping.size_bytes} bytes")
    if _libc.madvise(mapping.address + start, end - start, _MADV_POPULATE_WRITE) == 0:
        return
    code = ctypes.get_errno()
    if code != errno.EINVAL:  # EINVAL: a kernel before 5.14 does not know the advice
        raise OSError(code, f"cannot fault in {end - start} bytes: {os.strerror(code)}")
    touch(mapping, start, end)


def enter_pages(mapping: Mapping, start: int, end: int) -> None:
    """Put the pages of [start, end), which somebody else has touched, into this process's page table.

    For a worker, whose first copy would else take a fault for each page, five times the cost. It changes no byte, and
    where it cannot be done the faults come as ever.
    """
    if not mapping.closed:
        _libc.madvise(mapping.address + start, min(end, mapping.size_bytes) - start, _MADV_POPULATE_READ)


def touch(mapping: Mapping, start: int, end: int) -> None:
    """As `populate`, by writing one byte of each page back; no other process may write there meanwhile."""
    pages = mapping.data[start:end:_PAGE]
    np.bitwise_or(pages, np.uint8(0), out=pages)


def _lower_priority() -> bool:
    # On Linux a priority belongs to a thread. Refused in some sandboxes, where it does not matter enough to fail.
    with contextlib.suppress(PermissionError):
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, max(os.getpriority(os.PRIO_PROCESS, thread), _LOW_PRIORITY))
    return True
