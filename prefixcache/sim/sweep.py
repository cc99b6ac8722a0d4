"""Every policy at every capacity, over every disk: the rows of `prefixcache simulate`.

Rules: a row is plain data with fixed names. The policies are the core's, and `optimum`. Must not know: how rows are
shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

from prefixcache.core.policy.registry import POLICIES
from prefixcache.sim.disk import DiskModel
from prefixcache.sim.optimum import optimum
from prefixcache.sim.replay import Cache, Progress, TierCount, replay
from prefixcache.sim.trace import Trace

OPTIMUM: Final = "optimum"
KNOWN_POLICIES: Final = (*POLICIES, OPTIMUM)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to simulate: every policy at every capacity of memory over every disk (0 blocks: none), below a GPU pool.

    prefill_tokens_per_s: what a hit saves; block_bytes: None where bytes do not matter (other tiers need them);
    disk_bytes_per_s, host_bytes_per_s: what loading from disk and copying out of memory costs."""

    policies: tuple[str, ...]
    capacities: tuple[int, ...]
    block_tokens: int
    seed: int = 0
    prefill_tokens_per_s: float = 10_000.0
    block_bytes: int | None = None
    disks: tuple[int, ...] = (0,)
    disk_bytes_per_s: float = 3e9
    host_bytes_per_s: float = 20e9
    gpu_blocks: int = 0


@dataclass(frozen=True, slots=True)
class TierRow:
    """One tier of a row. token_hit_ratio: of all tokens of the trace, those that were hit here. What workers hit on
    disk goes through `host`; what `gpu` holds are copies."""

    tier: str
    capacity_blocks: int
    token_hit_ratio: float
    blocks_written: int
    blocks_read: int
    bytes_written: int | None
    bytes_read: int | None


@dataclass(frozen=True, slots=True)
class Row:
    """Ratios are shares of all tokens or blocks of the trace, 0 to 1; `seconds` is how long the replay took.

    blocks_written: blocks that workers stored. load_s: waiting for the disk and copying out of host memory;
    saved_prefill_s: what the hit tokens would have taken to compute, less load_s. The optimum has one tier that holds
    what memory and disk hold together and costs nothing to load, so no `tiers`."""

    policy: str
    capacity_blocks: int
    token_hit_ratio: float
    block_hit_ratio: float
    blocks_written: int
    seconds: float
    disk_blocks: int
    blocks_read: int
    saved_prefill_s: float
    load_s: float
    bytes_written: int | None
    bytes_read: int | None
    tiers: tuple[TierRow, ...]

    def as_json(self) -> dict[str, Any]:
        """Without what was not asked for."""
        told = _told(asdict(self))
        told["tiers"] = [_told(asdict(tier)) for tier in self.tiers]
        return told


def sweep(trace: Trace, plan: Plan, progress: Callable[[str], Progress] | None = None) -> Iterator[Row]:
    """One row per policy, disk and capacity, policies outermost. progress: makes the progress of a row from its label.
    Raises ValueError for more memory than a pool can have."""
    for policy in plan.policies:
        for disk in plan.disks:
            for blocks in plan.capacities:
                label = f"{policy} at {blocks:,} blocks" + (f" over {disk:,} on disk" if disk else "")
                yield _row(trace, plan, policy, (blocks, disk), progress(label) if progress is not None else None)


def _row(trace: Trace, plan: Plan, policy: str, capacity: tuple[int, int], progress: Progress | None) -> Row:
    blocks, disk = capacity
    if policy == OPTIMUM:
        outcome = optimum(trace, blocks + disk, plan.block_tokens, progress)
    else:
        outcome = replay(trace, _cache(trace, plan, policy, blocks, disk), progress)
    size = plan.block_bytes
    read = outcome.hit_blocks
    copied_s = outcome.host.blocks_read * size / plan.host_bytes_per_s if size is not None and outcome.host else 0.0
    load_s = outcome.waited_s + copied_s
    tiers = (("gpu", plan.gpu_blocks, outcome.gpu), ("host", blocks, outcome.host), ("disk", disk, outcome.disk))
    return Row(
        policy=policy,
        capacity_blocks=blocks,
        token_hit_ratio=outcome.hit_tokens / max(trace.tokens, 1),
        block_hit_ratio=outcome.hit_blocks / max(trace.blocks, 1),
        blocks_written=outcome.blocks_written,
        seconds=outcome.seconds,
        disk_blocks=disk,
        blocks_read=read,
        saved_prefill_s=outcome.hit_tokens / plan.prefill_tokens_per_s - load_s,
        load_s=load_s,
        bytes_written=_times(outcome.blocks_written, size),
        bytes_read=_times(read, size),
        tiers=tuple(_tier(trace, name, held, count, size) for name, held, count in tiers if count is not None),
    )


def _cache(trace: Trace, plan: Plan, policy: str, blocks: int, disk: int) -> Cache:
    # More than all blocks of the trace is the same, and a planner has bounds of its own.
    room = min(blocks, max(trace.blocks, 1))
    if not disk and not plan.gpu_blocks:
        return Cache(room, plan.block_tokens, policy, plan.seed)
    if plan.block_bytes is None:
        raise ValueError("other tiers than memory need the size of a block")
    below = DiskModel(disk, plan.block_bytes, plan.disk_bytes_per_s) if disk else None
    rate = plan.prefill_tokens_per_s
    return Cache(room, plan.block_tokens, policy, plan.seed, below, rate, plan.gpu_blocks, plan.block_bytes)


def _tier(trace: Trace, name: str, blocks: int, count: TierCount, size: int | None) -> TierRow:
    ratio = count.hit_tokens / max(trace.tokens, 1)
    written, read = count.blocks_written, count.blocks_read
    return TierRow(name, blocks, ratio, written, read, _times(written, size), _times(read, size))


def _times(blocks: int, size: int | None) -> int | None:
    return None if size is None else blocks * size


def _told(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if value is not None}
