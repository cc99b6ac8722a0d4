"""One policy and one capacity, with a disk below or without: a trace through the daemon's own planner.

Rules: each request is what a worker does, an Acquire that is released when all that was promised is there, then a
Reserve and a Commit of what was granted; computing takes no time. Nothing is decided here. What counts as hit:
`min(block_tokens x leading blocks, prompt tokens)`. Without a disk a block is one slot of the smallest size; with one
it has its real size, because loading takes time. Must not know: which policy it is, how a disk works.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np

from prefixcache.core.commands import Acquired, Arrived, Command, Committed, Released, Reserved
from prefixcache.core.events import (
    AcquireRequested,
    CommitRequested,
    DiskChanged,
    Event,
    LeaseReleased,
    NamespaceOpened,
    RecoveryDone,
    ReserveRequested,
    SessionOpened,
    TimePassed,
)
from prefixcache.core.ids import KEY_BYTES, SLOT_GRANULE, GroupKind, Tier
from prefixcache.core.planner import Planner
from prefixcache.core.spec import GroupSpec, Limits, NamespaceSpec, PartSpec, PlannerConfig, PoolSpec
from prefixcache.sim.disk import DiskModel, IdealDisk
from prefixcache.sim.trace import Request, Trace

Progress = Callable[[int], None]
"""Is told how many more requests were replayed."""

_SESSION: Final = b"simulated worker"
_RESERVATION: Final = b"simulated fill  "
_NAMESPACE: Final = 1
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
    """Blocks of one tier. What workers read is read from `host`, also what came there from disk for them."""

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
    host: TierCount | None = None
    disk: TierCount | None = None


@dataclass(frozen=True, slots=True)
class Cache:
    """What is simulated: capacity in blocks, tokens of a block, policy, seed of its lots, the disk below, and how many
    tokens a second prefill computes (what takes longer to load is computed)."""

    blocks: int
    block_tokens: int
    policy: str
    seed: int = 0
    disk: DiskModel | None = None
    prefill_tokens_per_s: float = 10_000.0

    @property
    def block_bytes(self) -> int:
        return SLOT_GRANULE if self.disk is None else self.disk.block_bytes

    @property
    def slot_bytes(self) -> int:
        return -(-self.block_bytes // SLOT_GRANULE) * SLOT_GRANULE


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
        size_bytes = cache.blocks * cache.slot_bytes
        if size_bytes > MOST_MEMORY_BYTES:
            raise ValueError(f"{cache.blocks:,} blocks of {cache.block_bytes:,} bytes are more than 16 TiB of memory")
        pool = PoolSpec(size_bytes, min(cache.blocks, _BLOCKS_PER_SLAB) * cache.slot_bytes)
        limits = Limits(max_keys=max(longest_prompt, 1), max_leases_per_session=1 << 30)
        disk = cache.disk.spec() if cache.disk is not None else None
        config = PlannerConfig((pool,), policy=cache.policy, policy_seed=cache.seed, disk=disk, limits=limits)
        self.planner = Planner(config)
        self.disk = IdealDisk(cache.disk) if cache.disk is not None else None
        self._cache = cache
        self._now = start_s
        self._waiting: dict[bytes, Request] = {}  # by lease
        self._leases = 0
        self._hit_tokens = self._hit_blocks = self._disk_tokens = 0
        self._waited_s = 0.0
        spec = NamespaceSpec(cache.block_tokens, (GroupSpec(GroupKind.FULL),), (PartSpec(0, 1, cache.block_bytes),))
        self._tell(SessionOpened(_SESSION, can_map=False), start_s)
        self._tell(NamespaceOpened(_NAMESPACE, bytes(KEY_BYTES), spec), start_s)
        if self.disk is not None:
            self._tell(DiskChanged(reads_on=True, writes_on=True), start_s)
            self._tell(RecoveryDone(), start_s)

    @property
    def blocks_written(self) -> int:
        return self.planner.state.stats.blocks_stored

    def outcome(self, seconds: float) -> Outcome:
        """What it came to so far."""
        stats = self.planner.state.stats
        disk = self.disk
        in_memory = self._hit_tokens - self._disk_tokens
        host = TierCount(in_memory, stats.blocks_stored + stats.blocks_loaded, self._hit_blocks)
        below = TierCount(self._disk_tokens, disk.blocks_written, disk.blocks_read) if disk is not None else None
        return Outcome(
            self._hit_tokens, self._hit_blocks, stats.blocks_stored, seconds, self._waited_s, host, below
        )  # fmt: skip

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
            self._release(lease, now)
        if blocks < len(request.ids):
            reserve = ReserveRequested(_SESSION, _RESERVATION, _NAMESPACE, pack_ids(request.ids), 0, _TTL_S)
            if len(self._ask(reserve, now, Reserved).blocks):
                self._ask(CommitRequested(_SESSION, _RESERVATION), now, Committed)

    def _release(self, lease: bytes, now: float) -> None:
        hits = self.planner.state.namespaces[_NAMESPACE].tokens.hit
        before = hits[Tier.DISK]
        self._ask(LeaseReleased(_SESSION, lease), now, Released)
        self._disk_tokens += hits[Tier.DISK] - before

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
        if self.disk is not None:
            for command in commands:
                if isinstance(command, Arrived) and command.done and command.lease in self._waiting:
                    request = self._waiting.pop(command.lease)
                    self._go_on(request, command.lease, command.ready_blocks, now)
                else:
                    self.disk.order(command, now)
        return commands

    def _next_lease(self) -> bytes:
        self._leases += 1
        return self._leases.to_bytes(16, "big")


def pack_ids(ids: tuple[int, ...]) -> bytes:
    """Keys that stand for block numbers; what differs is in front, as in real keys."""
    keys = np.zeros((len(ids), KEY_BYTES // 8), "<u8")
    keys[:, 0] = ids
    return keys.tobytes()
