"""Every policy at every capacity: the rows of `prefixcache simulate`.

Rules: a row is plain data with fixed names. The policies are the core's, and `optimum`. Must not know: how rows are
shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

from prefixcache.core.policy.registry import POLICIES
from prefixcache.sim.optimum import optimum
from prefixcache.sim.replay import Cache, Progress, replay
from prefixcache.sim.trace import Trace

OPTIMUM: Final = "optimum"
KNOWN_POLICIES: Final = (*POLICIES, OPTIMUM)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to simulate. `prefill_tokens_per_s`: what a hit saves; `block_bytes`: None where bytes do not matter."""

    policies: tuple[str, ...]
    capacities: tuple[int, ...]
    block_tokens: int
    seed: int = 0
    prefill_tokens_per_s: float = 10_000.0
    block_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """Ratios are shares of all tokens or blocks of the trace, 0 to 1; `seconds` is how long the replay took."""

    policy: str
    capacity_blocks: int
    token_hit_ratio: float
    block_hit_ratio: float
    blocks_written: int
    seconds: float
    blocks_read: int
    saved_prefill_s: float
    bytes_written: int | None
    bytes_read: int | None

    def as_json(self) -> dict[str, Any]:
        """Without what was not asked for."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def sweep(trace: Trace, plan: Plan, progress: Callable[[str], Progress] | None = None) -> Iterator[Row]:
    """One row per policy and capacity, policies outermost. progress: makes the progress of a row from its label."""
    for policy in plan.policies:
        for blocks in plan.capacities:
            told = progress(f"{policy} at {blocks:,} blocks") if progress is not None else None
            yield _row(trace, plan, policy, blocks, told)


def _row(trace: Trace, plan: Plan, policy: str, blocks: int, progress: Progress | None) -> Row:
    if policy == OPTIMUM:
        outcome = optimum(trace, blocks, plan.block_tokens, progress)
    else:
        # More than all blocks of the trace is the same, and a planner has bounds of its own.
        room = min(blocks, max(trace.blocks, 1))
        outcome = replay(trace, Cache(room, plan.block_tokens, policy, plan.seed), progress)
    size = plan.block_bytes
    return Row(
        policy=policy,
        capacity_blocks=blocks,
        token_hit_ratio=outcome.hit_tokens / max(trace.tokens, 1),
        block_hit_ratio=outcome.hit_blocks / max(trace.blocks, 1),
        blocks_written=outcome.blocks_written,
        seconds=outcome.seconds,
        blocks_read=outcome.hit_blocks,
        saved_prefill_s=outcome.hit_tokens / plan.prefill_tokens_per_s,
        bytes_written=None if size is None else outcome.blocks_written * size,
        bytes_read=None if size is None else outcome.hit_blocks * size,
    )
