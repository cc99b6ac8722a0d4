"""What status, health and metrics say about the disk tier. Reads the log's own counters; counts nothing twice."""

from collections.abc import Iterable

from prefixcache.core.planner import Planner
from prefixcache.core.reasons import DiskDrop
from prefixcache.v1 import admin_pb2 as pb
from prefixcache.v1 import common_pb2 as common
from prefixcache_offload.disk.packing import CodecReport
from prefixcache_offload.disk.recovery import RecoveryCounters
from prefixcache_offload.disk.shared import Counters
from prefixcache_offload.disk.tier import DiskTier


class DiskReport:
    """Filled by the store; asked by anybody."""

    def __init__(self) -> None:
        self._tier: DiskTier | None = None
        self.why_off = "starting"
        self.counted = Counters()
        """Of all directories that were open, one after the other."""
        self.replaced = 0
        self.probed_bytes_per_s = 0.0
        self.recovery: RecoveryCounters | None = None
        self.recovery_began_s = 0.0  # since the daemon's start
        self.recovery_s = 0.0  # how long it took, once it is over
        self.tombstones_failed = 0

    def on(self, tier: DiskTier) -> None:
        """The directory is open."""
        self._tier, self.why_off = tier, ""

    def off(self, reason: str) -> None:
        """The directory cannot be used."""
        self.why_off = reason

    def gone(self) -> None:
        """Another directory is in place."""
        self._tier, self.why_off = None, "directory_gone"
        self.replaced += 1

    @property
    def trouble(self) -> str:
        """Why the tier does not work as it should; empty where it does."""
        if self._tier is None:
            return f"disk tier off: {self.why_off}"
        status = self._tier.status()
        health = status.health
        if health.reads_off is not None:
            return f"disk tier off: {health.reads_off}"
        if health.writes_off is not None:
            return f"disk tier takes no more blocks: {health.writes_off}"
        return "" if status.threads_alive else "disk tier off: thread_died"

    def tier_stats(self, planner: Planner) -> pb.TierStats:
        """Call it with the owner's lock held."""
        trouble = self.trouble
        answer = pb.TierStats(tier=common.TIER_DISK, state="off", detail=trouble)
        if self._tier is None:
            return answer
        status = self._tier.status()
        answer.detail = trouble or codec_in_words(status.codec)
        answer.capacity_bytes = answer.ready_bytes = status.cap_bytes
        # The planner counts blocks as they are in memory; on disk they may be smaller, never larger than what is there.
        raw_bytes = sum(segment.live_bytes for segment in planner.state.disk.segments.values())
        answer.used_bytes = min(raw_bytes, status.used_bytes)
        if planner.demoter is not None:
            answer.filling_bytes = planner.demoter.writing_bytes
        answer.blocks = sum(space.table.clean_count for space in planner.state.namespaces.values() if space.on_disk)
        answer.evicted_blocks = planner.state.stats.disk_drops[DiskDrop.NOT_WANTED]
        if status.health.reads_off is None:
            answer.state = "on" if status.health.writes_off is None else "failing"
        return answer

    def counters(self, planner: Planner) -> Iterable[pb.Counter]:
        """Counters that only a daemon with a disk has. Call it with the owner's lock held."""
        stats = planner.state.stats
        if planner.loader is not None:  # what loads are decided by
            meter = planner.loader.meter
            yield pb.Counter(name="disk_load_bytes_per_s", value=int(meter.bytes_per_s))
            yield pb.Counter(name="disk_loading_bytes", value=meter.pending_bytes)
        for name in ("blocks_demoted", "blocks_loaded", "blocks_recovered"):
            yield pb.Counter(name=name, value=getattr(stats, name))
        for drop, count in stats.disk_drops.items():
            yield pb.Counter(name="disk_drops", label=str(drop), value=count)
        yield pb.Counter(name="disk_tombstones_failed", value=self.tombstones_failed)
        yield pb.Counter(name="disk_probed_bytes_per_s", value=int(self.probed_bytes_per_s))
        yield pb.Counter(name="disk_directories_replaced", value=self.replaced)
        counted = self.counted
        amplification = int(counted.write_amplification * 1000)
        yield pb.Counter(name="disk_written_bytes", value=counted.written_bytes)
        yield pb.Counter(name="disk_rewritten_bytes", value=counted.again_bytes)
        yield pb.Counter(name="disk_device_bytes", value=counted.device_bytes)
        yield pb.Counter(name="disk_read_bytes", value=counted.read_bytes)
        yield pb.Counter(name="disk_write_amplification_permille", value=amplification)
        yield pb.Counter(name="disk_packed", value=counted.packed)
        yield pb.Counter(name="disk_packed_bytes", label="before", value=counted.packed_bytes)
        yield pb.Counter(name="disk_packed_bytes", label="after", value=counted.packed_to_bytes)
        for reason, count in counted.kept_raw.items():
            yield pb.Counter(name="disk_kept_raw", label=reason, value=count)
        yield pb.Counter(name="disk_segments_freed", value=counted.freed_segments)
        yield pb.Counter(name="disk_recovery_us", label="began", value=int(self.recovery_began_s * 1e6))
        yield pb.Counter(name="disk_recovery_us", label="took", value=int(self.recovery_s * 1e6))
        yield pb.Counter(name="disk_stalls", value=counted.stalls)
        for outcome, count in counted.writes.items():
            yield pb.Counter(name="disk_writes", label=outcome.name.lower(), value=count)
        for outcome, count in counted.reads.items():
            yield pb.Counter(name="disk_reads", label=outcome.name.lower(), value=count)
        if self.recovery is not None:
            for name in ("torn", "revoked", "superseded", "unreadable", "unknown_codec"):
                yield pb.Counter(name="disk_recovery", label=name, value=getattr(self.recovery, name))


def codec_in_words(codec: CodecReport) -> str:
    """How blocks go to disk now, and why."""
    now = "lossless" if codec.on else "raw"
    ratio = f", {codec.ratio:.2f}x smaller" if codec.on and codec.ratio > 1 else ""
    return f"codec {codec.mode}: {now}{ratio}; {codec.why}" if codec.mode == "auto" else f"codec {now}{ratio}"
