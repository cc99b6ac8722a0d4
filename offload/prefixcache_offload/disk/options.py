"""Sizes, limits and patience of the disk tier, checked once. Only values: nothing here touches a disk."""

import os
from dataclasses import dataclass
from enum import StrEnum

from prefixcache_offload.disk.outcomes import DiskRefused, Refusal
from prefixcache_offload.disk.records import PAGE

MIN_SEGMENT_BYTES = 64 << 10
MAX_SEGMENT_BYTES = 4 << 30
"""Pages and lengths are u32, and a footer is read in one piece."""
_META_SHARE = 16
_MOST_PACKERS = 4


class DiskCodec(StrEnum):
    """In what form blocks go to disk. AUTO: lossless where loads get faster by it (see `packing`), else raw."""

    AUTO = "auto"
    RAW = "raw"
    LOSSLESS = "lossless"


@dataclass(frozen=True)
class DiskOptions:
    """What the tier may use.

    cap_bytes: hard cap of the whole directory, everything counted. segment_bytes: of a new segment; older ones keep
    theirs. queue_bytes: payload waiting to be written before further writes are dropped. batch_bytes: aim of one write
    call while much waits, else a quarter of it. read_bytes: most payload of one read call; the first of a job takes a
    quarter. write_patience_s: longest a waiting write lets reads go first. stall_s: a call that takes longer marks the
    tier stalled. retry_s: first pause before a tier that is off tries again, doubled up to retry_max_s.
    writers/readers: threads, the writers at most (see `crew`); 0 of both: the owner calls `pump` itself. codec: see
    DiskCodec. pack_patience_s: longest a record waits to be made smaller before it is written as it is. packers:
    threads of the lowest priority that do it, 0 for as many as `writers` calls for. The defaults for sizes and threads
    are those that measured best beside fio.
    """

    cap_bytes: int
    segment_bytes: int = 256 << 20
    meta_bytes: int = 1 << 20
    queue_bytes: int = 256 << 20
    batch_bytes: int = 4 << 20
    read_bytes: int = 8 << 20
    write_patience_s: float = 0.02
    stall_s: float = 5.0
    retry_s: float = 5.0
    retry_max_s: float = 60.0
    read_errors_until_off: int = 3
    writers: int = 4
    readers: int = 3
    codec: DiskCodec = DiskCodec.RAW
    pack_patience_s: float = 0.25
    packers: int = 0

    def __post_init__(self) -> None:
        """Raise DiskRefused when these sizes cannot work."""
        if not MIN_SEGMENT_BYTES <= self.segment_bytes <= MAX_SEGMENT_BYTES or self.segment_bytes % PAGE:
            raise DiskRefused(
                Refusal.BAD_OPTIONS,
                f"segments of {self.segment_bytes} bytes: must be a multiple of {PAGE} "
                f"in {MIN_SEGMENT_BYTES}..{MAX_SEGMENT_BYTES}",
            )
        if self.cap_bytes < self.segment_bytes:
            raise DiskRefused(
                Refusal.CAP_TOO_SMALL,
                f"the disk cap of {self.cap_bytes} bytes is smaller than one segment of {self.segment_bytes} bytes",
            )
        if (self.writers > 0) != (self.readers > 0) or min(self.writers, self.readers) < 0:
            raise DiskRefused(Refusal.BAD_OPTIONS, "readers and writers are both 0 or both positive")

    @property
    def packer_threads(self) -> int:
        """Threads that make records smaller: half of the cores, a few at most; none where the owner pumps."""
        wanted = self.packers or min(max((os.cpu_count() or 1) // 2, 1), _MOST_PACKERS)
        return wanted if self.writers and self.codec is not DiskCodec.RAW else 0

    @property
    def meta_cap_bytes(self) -> int:
        """Of the cap, what is kept for the small files (format, namespaces, probe)."""
        share = max(self.cap_bytes // _META_SHARE, 4 * PAGE)
        return min(self.meta_bytes, share) // PAGE * PAGE

    @property
    def new_segment_bytes(self) -> int:
        """Size of a new segment: a little under `segment_bytes` so that a whole number of them fills the cap."""
        count = self.cap_bytes // self.segment_bytes
        fitting = (self.cap_bytes - self.meta_cap_bytes) // count
        return min(self.segment_bytes, fitting // PAGE * PAGE)
