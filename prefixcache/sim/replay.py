"""One policy and one capacity, with a GPU above and a disk below or without: a trace through the daemon's own planner.

Rules: each request is what a worker does, an Acquire that is released when all that was promised is there, then a
Reserve and a Commit of what was granted; computing takes no time. Nothing is decided here. What counts as hit:
`min(block_tokens x leading blocks, prompt tokens)`. Copies to the GPU take no time. In memory alone a block is one slot
of the smallest size; with other tiers it has its real size, because what they do at once has bounds in bytes.
Must not know: which policy it is, how a disk works.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np

from prefixcache.core.commands import Acquired, Arrived, Command, Committed, MoreToDo, PromoteSlots, Released, Reserved
from prefixcache.core.events import (
    AcquireRequested,
    CommitRequested,
    DiskChanged,
    Event,
    LeaseReleased,
    NamespaceOpened,
    PromotionDone,
    RecoveryDone,
    ReserveRequested,
    SessionOpened,
    TimePassed,
    WorkResumed,
)
from prefixcache.core.ids import HOST_POOL, KEY_BYTES, SLOT_GRANULE, GroupKind, PoolId, Tier
from prefixcache.core.planner import Planner
from prefixcache.core.spec import GroupSpec, Limits, NamespaceSpec, PartSpec, PlannerConfig, PoolSpec
from prefixcache.sim.disk import DiskModel, IdealDisk
from prefixcache.sim.trace import Request, Trace

Progress = Callable[[int], None]
"""Is told how many more requests were replayed."""

_SESSION: Final = b"simulated worker"
_RESERVATION: Final = b"simulated fill  "
_NAMESPACE: Final = 1
_GPU_POOL: Final = 1
_TTL_S: Final = 3_600.0
_DEADLINE_S: Final = 600.0
_BLOCKS_PER_SLAB: Final = 4096
_TELL_EVERY: Final = 256
_TICK_S: Final = 0.25  # the planner is told that time passes, as in the daemon,
_IDLE_TICKS: Final = 40  # but in a long pause not more often than this
MOST_MEMORY_BYTES: Final = SLOT_GRANULE << 32  # slots are numbered by 32 bits

Answer = TypeVar("Answer", bound=Command)


class ReplayError(RuntimeError):
    """The planner answered what it cannot have answered."""


@dataclass(slots=True)
class TierCount:
    """Blocks of one tier. What workers hit on disk is read from there once, and by them from `host`."""

    hit_tokens: int = 0
    blocks_written: int = 0
    blocks_read: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one replay came to. `waited_s`: how long requests waited for the disk, in all, in the trace's time;
    `seconds`: how long the replay took."""

    hit_tokens: int
    hit_blocks: int
    blocks_written: int
    seconds: float
    waited_s: float = 0.0
    gpu: TierCount | None = None
    host: TierCount | None = None
    disk: TierCount | None = None


@dataclass(frozen=True, slots=True)
class Cache:
    """What is simulated: capacity in blocks, tokens of a block, policy, seed of its lots, the disk below, how many
    tokens a second prefill computes (what takes longer to load is computed), blocks of a GPU pool and the bytes of one
    (of which the disk has its own word)."""

    blocks: int
    block_tokens: int
    policy: str
    seed: int = 0
    disk: DiskModel | None = None
    prefill_tokens_per_s: float = 10_000.0
    gpu_blocks: int = 0
    gpu_block_bytes: int = SLOT_GRANULE

    @property
    def block_bytes(self) -> int:
        return self.gpu_block_bytes if self.disk is None else self.disk.block_bytes

    @property
    def slot_bytes(self) -> int:
        return -(-self.block_bytes // SLOT_GRANULE) * SLOT_GRANULE

    def pool(self, blocks: int, pool: PoolId, tier: Tier) -> PoolSpec:
        """A pool of so many blocks. Raises ValueError for more than slots have numbers for."""
        if blocks * self.slot_bytes > MOST_MEMORY_BYTES:
            raise ValueError(f"{blocks:,} blocks of {self.block_bytes:,} bytes are more than 16 TiB of memory")
        return PoolSpec(blocks * self.slot_bytes, min(blocks, _BLOCKS_PER_SLAB) * self.slot_bytes, pool, tier)


def replay(trace: Trace, cache: Cache, progress: Progress | None = None) -> Outcome:
    """Replays a whole trace into an empty cache. Raises ValueError for more memory than a pool can have."""
    began = time.perf_counter()
    longest = max((len(request.ids) for request in trace.requests), default=1)
    worker = SimulatedWorker(cache, longest, trace.requests[0].time_s if trace.requests else 0.0)
    for number, request in enumerate(trace.requests, 1):
        worker.serve(request)
        if progress is not None and number % _TELL_EVERY == 0:
            progress(_TELL_EVERY)
    worker.finish()
    return worker.outcome(time.perf_counter() - began)


class SimulatedWorker:
    """A planner with one namespace and one session. `planner` and `disk` are open for checks."""

    def __init__(self, cache: Cache, longest_prompt: int, start_s: float = 0.0) -> None:
        """longest_prompt: in blocks; start_s: no request is earlier."""
        pools = [cache.pool(cache.blocks, HOST_POOL, Tier.HOST)]
        if cache.gpu_blocks:
            pools.append(cache.pool(cache.gpu_blocks, _GPU_POOL, Tier.GPU))
        limits = Limits(max_keys=max(longest_prompt, 1), max_leases_per_session=1 << 30)
        disk = cache.disk.spec() if cache.disk is not None else None
        config = PlannerConfig(tuple(pools), policy=cache.policy, policy_seed=cache.seed, disk=disk, limits=limits)
        self.planner = Planner(config)
        self.disk = IdealDisk(cache.disk) if cache.disk is not None else None
        self._cache = cache
        self._now = start_s
        self._waiting: dict[bytes, Request] = {}  # by lease
        self._leases = 0
        self._hit_tokens = self._hit_blocks = self._promoted = 0
        self._waited_s = 0.0
        self._has_more = False
        spec = NamespaceSpec(cache.block_tokens, (GroupSpec(GroupKind.FULL),), (PartSpec(0, 1, cache.block_bytes),))
        gpus = (_GPU_POOL,) if cache.gpu_blocks else ()
        self._tell(SessionOpened(_SESSION, can_map=False, gpu_pools=gpus), start_s)
        self._tell(NamespaceOpened(_NAMESPACE, bytes(KEY_BYTES), spec), start_s)
        if self.disk is not None:
            self._tell(DiskChanged(reads_on=True, writes_on=True), start_s)
            self._tell(RecoveryDone(), start_s)

    @property
    def blocks_written(self) -> int:
        return self.planner.state.stats.blocks_stored

    def outcome(self, seconds: float) -> Outcome:
        """What it came to so far."""
        stats, disk = self.planner.state.stats, self.disk
        on_gpu, in_memory, on_disk = self._hits_by_tier()
        gpu_reads = stats.tokens.hit[Tier.GPU] // self._cache.block_tokens
        gpu = TierCount(on_gpu, self._promoted, gpu_reads) if self._cache.gpu_blocks else None
        stored = stats.blocks_stored
        host = TierCount(in_memory, stored + stats.blocks_loaded, self._hit_blocks - gpu_reads)
        below = TierCount(on_disk, disk.blocks_written, disk.blocks_read) if disk is not None else None
        return Outcome(
            self._hit_tokens, self._hit_blocks, stored, seconds, self._waited_s, gpu, host, below
        )  # fmt: skip

    def _hits_by_tier(self) -> tuple[int, int, int]:
        """Hit tokens of GPU, memory and disk. The planner counts whole blocks; what partial last ones have less is
        taken off where most hits are."""
        hits = self.planner.state.stats.tokens.hit
        counts = [hits[Tier.GPU], hits[Tier.HOST], hits[Tier.DISK]]
        counts[counts.index(max(counts))] -= sum(counts) - self._hit_tokens
        return counts[0], counts[1], counts[2]

    def serve(self, request: Request) -> int:
        """One request; answers how many of its leading blocks were promised."""
        if self.disk is not None:
            self._pass_time(request.time_s)
        self._now = now = request.time_s
        if not request.ids:
            return 0
        cache = self._cache
        lease = self._next_lease()
        acquire = AcquireRequested(
            _SESSION, lease, _NAMESPACE, pack_ids(request.ids), 0, len(request.ids) * cache.block_tokens, _TTL_S,
            deadline_s=_DEADLINE_S, recompute_s_per_token=1 / cache.prefill_tokens_per_s,
        )  # fmt: skip
        acquired = self._ask(acquire, now, Acquired)
        if acquired.ready_blocks < acquired.planned_blocks:
            self._waiting[lease] = request
        else:
            self._go_on(request, lease if acquired.planned_blocks else None, acquired.planned_blocks, now)
        return acquired.planned_blocks

    def finish(self) -> None:
        """Lets the disk end what requests still wait for."""
        while self._waiting:
            self._end_next()

    def _go_on(self, request: Request, lease: bytes | None, blocks: int, now: float) -> None:
        """All that comes is there: it is used, and the rest stored."""
        self._hit_blocks += blocks
        self._hit_tokens += min(self._cache.block_tokens * blocks, request.tokens)
        self._waited_s += now - request.time_s
        if lease is not None:
            self._ask(LeaseReleased(_SESSION, lease), now, Released)
        if blocks < len(request.ids):
            reserve = ReserveRequested(_SESSION, _RESERVATION, _NAMESPACE, pack_ids(request.ids), 0, _TTL_S)
            if len(self._ask(reserve, now, Reserved).blocks):
                self._ask(CommitRequested(_SESSION, _RESERVATION), now, Committed)

    def _pass_time(self, until: float) -> None:
        """What happens before `until`: jobs of the disk end, and the planner is told the time in pauses."""
        last = self._now
        for step in range(1, min(int((until - last) / _TICK_S), _IDLE_TICKS) + 1):
            tick = last + step * _TICK_S
            self._end_until(tick)
            self._tell(TimePassed(), tick)
        self._end_until(until)

    def _end_until(self, until: float) -> None:
        while self.disk is not None and self.disk.next_end <= until:
            self._end_next()

    def _end_next(self) -> None:
        assert self.disk is not None
        self._now = max(self._now, self.disk.next_end)
        self._tell(self.disk.end_next(), self._now)

    def _ask(self, event: Event, now: float, answer: type[Answer]) -> Answer:
        for command in self._tell(event, now):
            if isinstance(command, answer):
                return command
        raise ReplayError(f"no {answer.__name__} for {type(event).__name__}")

    def _tell(self, event: Event, now: float) -> list[Command]:
        commands = self.planner.handle(event, now)
        if self.disk is not None or self._cache.gpu_blocks:
            self._carry_out(commands, now)
        while self._has_more:  # an ideal daemon: nothing ever waits
            self._has_more = False
            self._carry_out(self.planner.handle(WorkResumed(), now), now)
        return commands

    def _carry_out(self, commands: list[Command], now: float) -> None:
        for command in commands:
            if isinstance(command, Arrived) and command.done and command.lease in self._waiting:
                request = self._waiting.pop(command.lease)
                self._go_on(request, command.lease, command.ready_blocks, now)
            elif isinstance(command, PromoteSlots):
                self._promoted += sum(len(part.sources) for part in command.parts)
                self._tell(PromotionDone(command.copy, ok=True), now)
            elif isinstance(command, MoreToDo):
                self._has_more = True
            elif self.disk is not None:
                self.disk.order(command, now)

    def _next_lease(self) -> bytes:
        self._leases += 1
        return self._leases.to_bytes(16, "big")


def pack_ids(ids: tuple[int, ...]) -> bytes:
    """Keys that stand for block numbers; what differs is in front, as in real keys."""
    keys = np.zeros((len(ids), KEY_BYTES // 8), "<u8")
    keys[:, 0] = ids
    return keys.tobytes()
