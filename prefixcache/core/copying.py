"""Orders that copy from pool to pool.

Belongs here: plain values. Must not know: who carries them out.
"""

from __future__ import annotations

from dataclasses import dataclass

from prefixcache.core.ids import PoolId, Slots


@dataclass(slots=True)
class PartCopy:
    """`size_bytes` from each source slot to the target slot at the same place."""

    sources: Slots
    targets: Slots
    size_bytes: int


@dataclass(slots=True)
class PromoteSlots:
    """Copy committed blocks from the host pool up into a GPU pool. Ends in PromotionDone(copy), once. Until then the
    sources keep their bytes and the targets are nobody else's."""

    copy: int
    source_pool: PoolId
    target_pool: PoolId
    parts: tuple[PartCopy, ...]
