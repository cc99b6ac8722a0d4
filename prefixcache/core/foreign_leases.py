"""Acquire and Lookup in a foreign namespace: every key for itself, a bitmap, one pin per key; and how a lease begins.

Rules: as for chained keys (acquiring), without a prefix. Must not know: how leases end.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from prefixcache.core.checks import Checks
from prefixcache.core.commands import Acquired, Command, LookedUp, Run
from prefixcache.core.events import AcquireRequested, LookupRequested
from prefixcache.core.ids import KEY_BYTES, PoolId, Rows
from prefixcache.core.leases import Lease
from prefixcache.core.namespaces import ForeignIndex, Namespace
from prefixcache.core.radix import ROW_DTYPE, Node, Pin, pin_path
from prefixcache.core.reasons import Miss
from prefixcache.core.state import Session, State


def begin_lease(state: State, session: Session, lease: Lease, out: list[Command]) -> None:
    """From here on the lease's tokens are pending."""
    lease.serial = state.next_serial()
    state.leases[lease.lease] = lease
    session.leases[lease.lease] = lease
    state.deadlines.add(lease)
    lease.space.tokens.pending += lease.planned_tokens
    out.append(lease.reply)


def read_run(space: Namespace, part: int, rows: list[slice | Rows], first_block: int, pool: PoolId) -> Run:
    """Where one part of consecutive blocks is. rows: pieces to index a column with (`Path.stretches`)."""
    column = space.table.parts[part]
    if len(rows) == 1:
        return Run(part, first_block, pool, *column.packed(rows[0]))
    pieces = [column.packed(piece) for piece in rows]
    packed_slots = b"".join([slots for slots, _ in pieces])
    return Run(part, first_block, pool, packed_slots, b"".join([generations for _, generations in pieces]))


def look_up_foreign(index: ForeignIndex, event: LookupRequested, block_tokens: int) -> LookedUp:
    nodes = index.present(event.keys)[event.from_block :]
    present = np.array([node is not None for node in nodes], np.bool_)
    count = int(np.count_nonzero(present))
    stop = None if count == len(nodes) else Miss.NOT_STORED
    return LookedUp(count, (0, count * block_tokens, 0, 0), stop, present)


class ForeignAcquiring:
    """Handler of AcquireRequested for foreign namespaces; the event was checked."""

    def __init__(self, state: State, checks: Checks) -> None:
        self.state = state
        self.checks = checks

    def acquire(
        self, event: AcquireRequested, session: Session, space: Namespace, now: float, out: list[Command]
    ) -> None:
        state = self.state
        assert space.foreign is not None
        nodes = space.foreign.present(event.keys)[event.from_block :]
        stored = sum(node is not None for node in nodes)
        if event.max_blocks is not None and stored > event.max_blocks:
            for place in [place for place, node in enumerate(nodes) if node is not None][event.max_blocks :]:
                nodes[place] = None
        if space.table.unverified and self.checks.hold(event, space, _rows(nodes), out):
            return
        present = np.array([node is not None for node in nodes], np.bool_)
        planned = int(np.count_nonzero(present))
        self._count(event, space, (len(nodes), stored, planned))
        stop = None if planned == len(nodes) else Miss.BEYOND_LIMIT if planned < stored else Miss.NOT_STORED
        if not planned:
            out.append(Acquired(event.lease, event.from_block, 0, 0, (), stop, (0, 0, 0, 0), now, present))
            return
        pins: list[Pin] = []
        runs = self._hold(event, space, nodes, present, pins)
        expires_at = now + state.clipped_ttl(event.ttl_s)
        by_tier = (0, planned * space.block_tokens, 0, 0)
        reply = Acquired(event.lease, event.from_block, planned, planned, runs, stop, by_tier, expires_at, present)
        lease = Lease(event.lease, event.session, space, reply)
        lease.pins = pins
        begin_lease(state, session, lease, out)

    def _count(self, event: AcquireRequested, space: Namespace, blocks: tuple[int, int, int]) -> None:
        """blocks: (looked up, stored, planned)."""
        looked_up, stored, planned = blocks
        tokens = space.block_tokens
        self.state.stats.acquires += 1
        ledger = space.tokens
        total = event.prompt_tokens
        ledger.look_up(total - event.from_block * tokens, total - len(event.keys) // KEY_BYTES * tokens)
        ledger.miss[Miss.NOT_STORED] += (looked_up - stored) * tokens
        ledger.miss[Miss.BEYOND_LIMIT] += (stored - planned) * tokens

    def _hold(
        self, event: AcquireRequested, space: Namespace, nodes: list[Node | None], present: NDArray[np.bool_],
        pins: list[Pin],
    ) -> tuple[Run, ...]:  # fmt: skip
        """Pins and touches every node that is present; answers one run per part and stretch."""
        tick = self.state.tick
        runs: list[Run] = []
        for start, end in _spans(present):
            rows = _rows(nodes[start:end])
            if space.policy.remembers:
                space.policy.used(space, rows)
            space.table.touched[rows] = tick
            for node in nodes[start:end]:
                if node is not None:
                    if not node.held:
                        space.policy.touch_leaf(node, tick)
                    pin_path(node, 1, pins)
            first, pool = event.from_block + start, self.state.host_pool
            runs += [read_run(space, part, [rows], first, pool) for part in range(len(space.strides))]
        return tuple(runs)


def _rows(nodes: list[Node | None]) -> Rows:
    return np.frombuffer(b"".join(node.rows for node in nodes if node is not None), ROW_DTYPE)


def _spans(present: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """[start, end) of every run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], present, [False])).astype(np.int8)))
    return [(int(start), int(end)) for start, end in zip(edges[::2], edges[1::2], strict=True)]
