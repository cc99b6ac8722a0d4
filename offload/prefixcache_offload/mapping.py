"""One shared mapping of a file, and the rule that it outlives every array somebody still holds.

The rule: memory is unmapped when the last view of it is gone, never before. `Mapping.close` only gives up the mapping's
own hold; the buffer protocol does the rest. What the bytes mean is not known here.

Mappings are not inherited by a forked child (MADV_DONTFORK): a child must never write into a slot its parent filled.
The child keeps the Python objects, so the hole that the kernel leaves at each address gets private zero pages:
an array kept across the fork is then readable (zeros) instead of a crash, and its destructor unmaps what is its own.
"""

import ctypes
import mmap
import os
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixcache_offload import memfd

Bytes = npt.NDArray[np.uint8]

_live: "weakref.WeakSet[mmap.mmap]" = weakref.WeakSet()
"""Every mapping not unmapped yet, also those that are closed but held by an array."""

# Absent from the standard library; the values are the kernel's ABI.
_MAP_NORESERVE = 0x4000
_MAP_FIXED_NOREPLACE = 0x100000


class Mapping:
    """A whole file mapped MAP_SHARED, read-only or writable.

    `data` is the mapping as u8[size_bytes]; it is writable only if the mapping is.
    """

    def __init__(self, fd: int, size_bytes: int, *, writable: bool) -> None:
        """Map `fd`, which the caller has verified and may close afterwards. Raises OSError or ValueError."""
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._mmap: mmap.mmap | None = mmap.mmap(fd, size_bytes, access=access)
        self._mmap.madvise(mmap.MADV_DONTFORK)
        self._data: Bytes | None = np.frombuffer(self._mmap, dtype=np.uint8)
        self.size_bytes = size_bytes
        self.writable = writable
        self.address: int = self._data.ctypes.data
        _live.add(self._mmap)

    @property
    def data(self) -> Bytes:
        """u8[size_bytes]. Raises ValueError once closed."""
        if self._data is None:
            raise ValueError("the mapping is closed")
        return self._data

    def read_only(self) -> Bytes:
        """u8[size_bytes] that cannot be made writable again, for arrays that are given to users."""
        return np.frombuffer(memoryview(self._open()).toreadonly(), dtype=np.uint8)

    def advise(self, advice: int) -> None:
        """madvise over the whole mapping. Raises OSError where the kernel does not know `advice`."""
        self._open().madvise(advice)

    @property
    def closed(self) -> bool:
        """True once `close` was called, also when views still hold the memory."""
        return self._mmap is None

    def close(self) -> bool:
        """Give up the memory; True if it is unmapped now, False if arrays still hold it (it goes with the last one)."""
        held, self._mmap, self._data = self._mmap, None, None
        if held is None:
            return True
        try:
            held.close()
        except BufferError:
            return False
        return True

    def _open(self) -> mmap.mmap:
        if self._mmap is None:
            raise ValueError("the mapping is closed")
        return self._mmap


def _keep_for_ever(thing: Any) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _fill_hole(mapping: mmap.mmap) -> bool:
    """Put private zero pages where the parent's mapping was. False when the child has something else there by now."""
    start = np.frombuffer(mapping, dtype=np.uint8).ctypes.data
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED_NOREPLACE
    made = _libc_mmap(start, len(mapping), protection, flags, -1, 0)
    return bool(made == start)


def _after_fork_in_child() -> None:
    for mapping in list(_live):
        if not mapping.closed and not _fill_hole(mapping):
            _keep_for_ever(mapping)  # its destructor would unmap what is not its own


_libc_mmap = ctypes.CDLL(None, use_errno=True).mmap
_libc_mmap.restype = ctypes.c_void_p
_libc_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
os.register_at_fork(after_in_child=_after_fork_in_child)


def map_file(fd: int, size_bytes: int, *, writable: bool, sealed: bool = True) -> Mapping:
    """Verify a received descriptor and map it. The caller keeps the descriptor and may close it.

    Raises memfd.BadDescriptor when its size or seals are not as announced, OSError when the kernel refuses (EPERM: a
    writable mapping of a pool that may only be read).
    """
    memfd.verify(fd, size_bytes, sealed=sealed)
    return Mapping(fd, size_bytes, writable=writable)
