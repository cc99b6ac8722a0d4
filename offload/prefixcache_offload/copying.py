"""Whole slots to and from one flat array, any number of them in one call that holds no lock of the interpreter.

A Python loop of copies takes the interpreter lock once a block, and beside a busy thread each taking waits up to 5 ms.
Here a batch is one numpy call: the slots become rows of an opaque dtype, loading is `take`, storing is an indexed
assignment; both run at the speed of `copyto` over the same blocks and give the lock up once for the whole batch. Two
sides that need permuting are the business of `transfer`.

Nothing here looks at generations: the caller checks them after the copy, before it uses a byte.
"""

import math

import numpy as np
import numpy.typing as npt

from prefixcache_offload.mapping import Bytes
from prefixcache_offload.units import SLOT_GRANULE

MIN_ROW_BYTES = 4096
"""Shorter rows cost more than a lock a slot; only slots whose size is no multiple of 4 KiB need them."""


def copy_from_slots(pool: Bytes, slots: npt.ArrayLike, target: Bytes) -> None:
    """Fill `target` (contiguous u8[n * slot bytes]) with the bytes of `slots` (u32[n]), in their order.

    Slots of one call are equally long: `target.size / n` bytes each. Raises IndexError when one reaches out of the
    pool, ValueError when the sizes do not fit. Do not change `target` meanwhile.
    """
    gather(pool, _starts(slots), target)


def copy_to_slots(pool: Bytes, slots: npt.ArrayLike, source: Bytes) -> None:
    """Write `source` (contiguous u8[n * slot bytes]) into `slots` (u32[n]) of a writable pool, in their order.

    Raises as `copy_from_slots`, and ValueError when the pool is read-only.
    """
    scatter(pool, _starts(slots), source)


def gather(pool: Bytes, starts: npt.NDArray[np.int64], target: Bytes) -> None:
    """As `copy_from_slots`, for pieces at byte offsets `starts` (i64[n]) of the pool."""
    slot_bytes = _check(pool, starts, target)
    rows, base, row_bytes = _rows(starts, slot_bytes)
    if row_bytes >= MIN_ROW_BYTES:
        # mode "clip" (the rows are checked above) spares a buffered copy of `target`
        np.take(_as_rows(pool[base:], row_bytes), rows, out=_as_rows(target, row_bytes), mode="clip")
        return
    for i, start in enumerate(starts.tolist()):
        np.copyto(target[i * slot_bytes : (i + 1) * slot_bytes], pool[start : start + slot_bytes])


def scatter(pool: Bytes, starts: npt.NDArray[np.int64], source: Bytes) -> None:
    """As `copy_to_slots`, for pieces at byte offsets `starts` (i64[n]) of the pool."""
    slot_bytes = _check(pool, starts, source)
    rows, base, row_bytes = _rows(starts, slot_bytes)
    if row_bytes >= MIN_ROW_BYTES:
        _as_rows(pool[base:], row_bytes)[rows] = _as_rows(source, row_bytes)
        return
    for i, start in enumerate(starts.tolist()):
        np.copyto(pool[start : start + slot_bytes], source[i * slot_bytes : (i + 1) * slot_bytes])


def _starts(slots: npt.ArrayLike) -> npt.NDArray[np.int64]:
    starts: npt.NDArray[np.int64] = np.asarray(slots, dtype=np.uint32).astype(np.int64) * SLOT_GRANULE
    return starts


def _as_rows(memory: Bytes, row_bytes: int) -> npt.NDArray[np.void]:
    whole = memory.size - memory.size % row_bytes
    return memory[:whole].view(np.dtype((np.void, row_bytes)))


def _check(pool: Bytes, starts: npt.NDArray[np.int64], flat: Bytes) -> int:
    """Bytes of each piece; raises for what does not fit."""
    if starts.ndim != 1 or flat.ndim != 1 or not flat.flags.c_contiguous:
        raise ValueError("slots and flat bytes must be one-dimensional and contiguous")
    if not starts.size:
        if flat.size:
            raise ValueError(f"{flat.size} bytes and no slot to copy")
        return 0
    slot_bytes, rest = divmod(flat.size, starts.size)
    if rest or not slot_bytes:
        raise ValueError(f"{flat.size} bytes are not {starts.size} slots of equal length")
    if int(starts.min()) < 0 or int(starts.max()) + slot_bytes > pool.size:
        raise IndexError(f"a slot of {slot_bytes} bytes reaches out of a pool of {pool.size} bytes")
    return slot_bytes


def _rows(starts: npt.NDArray[np.int64], slot_bytes: int) -> tuple[npt.NDArray[np.intp], int, int]:
    """(rows, base, bytes of a row): rows from `base` on that make up the slots in order, as long as fits all."""
    if not starts.size:
        return starts, 0, 0
    base = int(starts.min())
    row_bytes = math.gcd(slot_bytes, int(np.gcd.reduce(starts - base)))
    per_slot = slot_bytes // row_bytes
    rows = ((starts - base) // row_bytes)[:, None] + np.arange(per_slot)
    return rows.reshape(-1), base, row_bytes
