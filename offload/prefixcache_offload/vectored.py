"""Thousands of scattered copies in one system call each thousand: `process_vm_readv` from this process to itself.

The obvious tools take the interpreter lock once a copy (numpy) or once a view (torch), which beside a busy thread costs
up to 5 ms each time. Here the addresses are computed as arrays and the kernel walks them, at half to two thirds of the
speed of the fastest copy, whatever other threads do. Page protection holds: a read-only target is an error, never a
signal.
"""

import ctypes
import errno
import os

import numpy as np
import numpy.typing as npt

from prefixcache_offload.engine import Move, Pieces

MIN_PIECE_BYTES = 2048
"""Below this the kernel's work per piece outweighs everything else."""

_MAX_PIECES = 1024  # IOV_MAX, fixed by the kernel's ABI

_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.process_vm_readv.argtypes = (
    *(ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong),
    *(ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong),
)

Offsets = npt.NDArray[np.int64]


def contiguous_bytes(moves: Move | Pieces, itemsize: int) -> int:
    """Bytes at the end of each piece that lie together on both sides."""
    return _inner(moves.spread()[0], itemsize)[1]


def _inner(piece: Move, itemsize: int) -> tuple[int, int]:
    """(number of outer axes left, bytes of the contiguous rest)."""
    run, axis = itemsize, len(piece.pool.shape)
    while axis and (
        piece.pool.shape[axis - 1] == 1 or piece.pool.strides[axis - 1] == piece.engine.strides[axis - 1] == run
    ):
        run *= piece.pool.shape[axis - 1]
        axis -= 1
    return axis, run


def offsets(moves: Move | Pieces, itemsize: int) -> tuple[Offsets, Offsets, int]:
    """(pool offsets, engine offsets, bytes of each): i64[m] pairs of contiguous stretches that make up the moves."""
    piece, pool_at, engine_at = moves.spread()
    outer, size = _inner(piece, itemsize)
    sides = []
    for view, at in ((piece.pool, pool_at), (piece.engine, engine_at)):
        all_offsets = at + view.offset
        for length, stride in zip(view.shape[:outer], view.strides[:outer], strict=True):
            all_offsets = all_offsets[..., None] + np.arange(length) * stride
        sides.append(all_offsets.reshape(-1))
    return sides[0], sides[1], size


def copy(targets: Offsets, sources: Offsets, sizes: Offsets) -> None:
    """Copy `sizes[i]` bytes from address `sources[i]` to address `targets[i]`, all i64[n]. The caller keeps both alive.

    Raises OSError: EPERM or ENOSYS where a sandbox forbids the call, EFAULT for memory that may not be touched.
    """
    iov_to = np.stack([targets, sizes], axis=1)
    iov_from = np.stack([sources, sizes], axis=1)
    for first in range(0, len(sizes), _MAX_PIECES):
        left, right = iov_to[first : first + _MAX_PIECES], iov_from[first : first + _MAX_PIECES]
        done = _libc.process_vm_readv(os.getpid(), left.ctypes.data, len(left), right.ctypes.data, len(right), 0)
        wanted = int(left[:, 1].sum())
        if done != wanted:
            code = ctypes.get_errno() if done < 0 else errno.EFAULT
            raise OSError(code, f"copied {max(done, 0)} of {wanted} bytes: {os.strerror(code)}")
