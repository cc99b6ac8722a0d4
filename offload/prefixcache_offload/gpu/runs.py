"""Which bytes of a host pool are which bytes of a device pool, as few copies as possible. Only arithmetic.

Slots that follow each other on both sides are copied as one run. A run never crosses a slab of the host pool: memory is
page-locked in chunks that end on slab boundaries, and a copy across two of them is an error to some drivers.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from prefixcache_offload.units import SLOT_GRANULE

Offsets = npt.NDArray[np.int64]


class Side(NamedTuple):
    """One pool's slots u32[n], and its size in bytes."""

    slots: npt.ArrayLike
    size_bytes: int


class Runs(NamedTuple):
    """Byte offsets in both pools and the length of each run, i64[n] each."""

    host: Offsets
    device: Offsets
    sizes: Offsets


def merged(host: Side, device: Side, slot_bytes: int, host_slab_bytes: int) -> Runs:
    """The copies between `host.slots[i]` and `device.slots[i]`, `slot_bytes` each.

    Whole granules are copied: strides are multiples of 4 KiB, so what lies behind a part belongs to its slot. Raises
    ValueError when the two do not fit each other, IndexError when a slot reaches out of its pool.
    """
    ours, theirs = (np.asarray(side.slots, np.uint32).astype(np.int64) * SLOT_GRANULE for side in (host, device))
    if ours.ndim != 1 or ours.shape != theirs.shape or slot_bytes <= 0:
        raise ValueError(f"{ours.size} and {theirs.size} slots of {slot_bytes} bytes cannot be copied")
    size = -(-slot_bytes // SLOT_GRANULE) * SLOT_GRANULE
    for offsets, side in ((ours, host), (theirs, device)):
        if offsets.size and int(offsets.max()) + size > side.size_bytes:
            raise IndexError(f"a slot of {slot_bytes} bytes reaches out of a pool of {side.size_bytes} bytes")
    order = np.argsort(ours, kind="stable")
    ours, theirs = ours[order], theirs[order]
    joined = (np.diff(ours) == size) & (np.diff(theirs) == size) & (ours[1:] % host_slab_bytes != 0)
    first = np.flatnonzero(np.concatenate(([True], ~joined))) if ours.size else np.zeros(0, np.int64)
    counts = np.diff(np.append(first, ours.size))
    return Runs(ours[first], theirs[first], counts * size)
