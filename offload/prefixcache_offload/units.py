"""Sizes that every file of this package agrees on, and how a pool is cut into chunks.

Only arithmetic lives here: no memory, no descriptors, no threads.
"""

from collections.abc import Iterator

SLOT_GRANULE = 4096
"""Bytes of one granule: a slot number is a byte offset in its pool divided by this."""

MAX_POOL_BYTES = SLOT_GRANULE << 32
"""A slot is a u32, so a pool ends here (16 TiB)."""

GENERATION_BYTES = 8
"""One u64 per granule in the control page."""


def check_pool_size(size_bytes: int, slab_bytes: int) -> None:
    """Raise ValueError unless a pool of `size_bytes` in slabs of `slab_bytes` can exist.

    Both are multiples of 4 KiB; the last slab may be shorter than the others.
    """
    if size_bytes <= 0 or size_bytes % SLOT_GRANULE or size_bytes > MAX_POOL_BYTES:
        raise ValueError(f"pool size {size_bytes} is not a multiple of {SLOT_GRANULE} in 1..{MAX_POOL_BYTES}")
    if slab_bytes <= 0 or slab_bytes % SLOT_GRANULE:
        raise ValueError(f"slab size {slab_bytes} is not a positive multiple of {SLOT_GRANULE}")


def control_bytes(size_bytes: int) -> int:
    """Bytes of the control page of a pool of `size_bytes`, rounded up to whole 4 KiB pages."""
    raw = size_bytes // SLOT_GRANULE * GENERATION_BYTES
    return -(-raw // SLOT_GRANULE) * SLOT_GRANULE


def chunk_ranges(size_bytes: int, slab_bytes: int, limit_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield (start, end) byte ranges that cover the pool and end on slab boundaries.

    A chunk is the most whole slabs that fit `limit_bytes`; one slab where a slab alone is larger than that.
    """
    step = max(limit_bytes // slab_bytes, 1) * slab_bytes
    for start in range(0, size_bytes, step):
        yield start, min(start + step, size_bytes)
