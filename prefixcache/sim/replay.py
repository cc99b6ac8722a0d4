"""One tier, one policy, one capacity: a trace through the daemon's own planner.

Rules: each request is what a worker does, an Acquire that is released at once, a Reserve and a Commit of what was
granted, at the request's time; nothing is decided here. A block is one slot of the smallest size. What counts as hit:
`min(block_tokens x leading blocks, prompt tokens)`. Must not know: which policy it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np

from prefixcache.core.commands import Acquired, Command, Committed, Released, Reserved
from prefixcache.core.events import (
    AcquireRequested,
    CommitRequested,
    Event,
    LeaseReleased,
    NamespaceOpened,
    ReserveRequested,
    SessionOpened,
)
from prefixcache.core.ids import KEY_BYTES, SLOT_GRANULE, GroupKind
from prefixcache.core.planner import Planner
from prefixcache.core.spec import GroupSpec, Limits, NamespaceSpec, PartSpec, PlannerConfig, PoolSpec
from prefixcache.sim.trace import Request, Trace

Progress = Callable[[int], None]
"""Is told how many more requests were replayed."""

_SESSION: Final = b"simulated worker"
_LEASE: Final = b"simulated lease "
_RESERVATION: Final = b"simulated fill  "
_NAMESPACE: Final = 1
_TTL_S: Final = 60.0
_BLOCKS_PER_SLAB: Final = 4096
_TELL_EVERY: Final = 256

Answer = TypeVar("Answer", bound=Command)


class ReplayError(RuntimeError):
    """The planner answered what it cannot have answered."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one replay came to. `seconds`: how long it took."""

    hit_tokens: int
    hit_blocks: int
    blocks_written: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Cache:
    """What is simulated: capacity in blocks, tokens of a block, policy, seed of its lots."""

    blocks: int
    block_tokens: int
    policy: str
    seed: int = 0


def replay(trace: Trace, cache: Cache, progress: Progress | None = None) -> Outcome:
    """Replays a whole trace into an empty cache."""
    began = time.perf_counter()
    longest = max((len(request.ids) for request in trace.requests), default=1)
    worker = SimulatedWorker(cache, longest, trace.requests[0].time_s if trace.requests else 0.0)
    hit_tokens = hit_blocks = 0
    for number, request in enumerate(trace.requests, 1):
        hits = worker.serve(request)
        hit_blocks += hits
        hit_tokens += min(cache.block_tokens * hits, request.tokens)
        if progress is not None and number % _TELL_EVERY == 0:
            progress(_TELL_EVERY)
    return Outcome(hit_tokens, hit_blocks, worker.blocks_written, time.perf_counter() - began)


class SimulatedWorker:
    """A planner with one namespace and one session. `planner` is open for checks."""

    def __init__(self, cache: Cache, longest_prompt: int, start_s: float = 0.0) -> None:
        """longest_prompt: in blocks; start_s: no request is earlier."""
        pool = PoolSpec(cache.blocks * SLOT_GRANULE, min(cache.blocks, _BLOCKS_PER_SLAB) * SLOT_GRANULE)
        limits = Limits(max_keys=max(longest_prompt, 1))
        self.planner = Planner(PlannerConfig((pool,), policy=cache.policy, policy_seed=cache.seed, limits=limits))
        self._block_tokens = cache.block_tokens
        spec = NamespaceSpec(cache.block_tokens, (GroupSpec(GroupKind.FULL),), (PartSpec(0, 1, SLOT_GRANULE),))
        self.planner.handle(SessionOpened(_SESSION, can_map=False), start_s)
        self.planner.handle(NamespaceOpened(_NAMESPACE, bytes(KEY_BYTES), spec), start_s)

    @property
    def blocks_written(self) -> int:
        return self.planner.state.stats.blocks_stored

    def serve(self, request: Request) -> int:
        """One request; answers how many of its leading blocks were there."""
        if not request.ids:
            return 0
        now = request.time_s
        keys = pack_ids(request.ids)
        tokens = len(request.ids) * self._block_tokens
        acquire = AcquireRequested(_SESSION, _LEASE, _NAMESPACE, keys, 0, tokens, _TTL_S)
        acquired = self._ask(acquire, now, Acquired)
        if acquired.planned_blocks:
            self._ask(LeaseReleased(_SESSION, _LEASE), now, Released)
        if acquired.planned_blocks < len(request.ids):
            reserve = ReserveRequested(_SESSION, _RESERVATION, _NAMESPACE, keys, 0, _TTL_S)
            if len(self._ask(reserve, now, Reserved).blocks):
                self._ask(CommitRequested(_SESSION, _RESERVATION), now, Committed)
        return acquired.planned_blocks

    def _ask(self, event: Event, now: float, answer: type[Answer]) -> Answer:
        for command in self.planner.handle(event, now):
            if isinstance(command, answer):
                return command
        raise ReplayError(f"no {answer.__name__} for {type(event).__name__}")


def pack_ids(ids: tuple[int, ...]) -> bytes:
    """Keys that stand for block numbers; what differs is in front, as in real keys."""
    keys = np.zeros((len(ids), KEY_BYTES // 8), "<u8")
    keys[:, 0] = ids
    return keys.tobytes()
