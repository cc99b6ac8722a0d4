"""Acquire and Lookup in a foreign namespace: every key for itself, a bitmap, one pin per key; and how a lease begins.

Rules: as for chained keys (acquiring), without a prefix. Blocks in memory are told at once, those that come from disk
as they come, in any order; `ready_blocks` counts them. Must not know: how leases end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prefixcache.core.checks import Checks
from prefixcache.core.commands import Acquired, Command, LookedUp
from prefixcache.core.events import AcquireRequested, LookupRequested
from prefixcache.core.foreign_loading import ForeignLoader, ForeignWish
from prefixcache.core.ids import KEY_BYTES, Rows
from prefixcache.core.leases import Lease
from prefixcache.core.namespaces import ForeignIndex, Namespace
from prefixcache.core.radix import ROW_DTYPE, Node, Pin
from prefixcache.core.reasons import Miss
from prefixcache.core.removal import Remover
from prefixcache.core.runs import scattered_runs
from prefixcache.core.state import Session, State


def begin_lease(state: State, session: Session, lease: Lease, out: list[Command]) -> None:
    """From here on the lease's tokens are pending."""
    lease.serial = state.next_serial()
    state.leases[lease.lease] = lease
    session.leases[lease.lease] = lease
    state.deadlines.add(lease)
    lease.space.tokens.pending += lease.planned_tokens
    out.append(lease.reply)


def look_up_foreign(index: ForeignIndex, event: LookupRequested, block_tokens: int, *, reads_on: bool) -> LookedUp:
    """reads_on: whether what is on disk only could be had."""
    nodes = index.present(event.keys)[event.from_block :]
    there = [node is not None and (reads_on or not node.cold) for node in nodes]
    count = sum(there)
    on_disk = sum(node is not None and node.cold for node in nodes) if reads_on else 0
    missing = any(node is None for node in nodes)
    stop = None if count == len(nodes) else Miss.NOT_STORED if missing else Miss.TIER_OFF
    tokens = (0, (count - on_disk) * block_tokens, on_disk * block_tokens, 0)
    return LookedUp(count, tokens, stop, np.array(there, np.bool_))


class _Found:
    """What there is of the keys of an Acquire: nodes by place, those in memory and those on disk only; `stored` counts
    also what is beyond the limit."""

    def __init__(self, event: AcquireRequested, nodes: list[Node | None]) -> None:
        places = [place for place, node in enumerate(nodes) if node is not None]
        self.asked = len(nodes)
        self.stored = len(places)
        self.nodes = {place: node for place in places[: event.max_blocks] if (node := nodes[place]) is not None}
        self.hot = {place: node for place, node in self.nodes.items() if not node.cold}
        self.cold = {place: node for place, node in self.nodes.items() if node.cold}


class ForeignAcquiring:
    """Handler of AcquireRequested for foreign namespaces; the event was checked."""

    def __init__(self, state: State, checks: Checks, remover: Remover) -> None:
        self.state = state
        self.checks = checks
        self.remover = remover
        self.loader: ForeignLoader | None = None  # where there is a disk

    def acquire(
        self, event: AcquireRequested, session: Session, space: Namespace, now: float, out: list[Command]
    ) -> None:
        assert space.foreign is not None
        found = _Found(event, space.foreign.present(event.keys)[event.from_block :])
        if space.table.unverified and self.checks.hold(event, space, rows_of(list(found.hot.values())), out):
            return
        self._touch(space, found)
        pins = self._pin(found)
        wish = ForeignWish()
        if found.cold and self.loader is not None:
            wish = self.loader.plan(event, space, found.cold, now, out)
        for place in found.cold.keys() - set(wish.coming):
            self.remover.unpin_all([pins.pop(place)])
        stop = self._count(event, space, found, (len(pins), wish.stop))
        present = np.zeros(found.asked, np.bool_)
        present[list(pins)] = True
        if not pins:
            out.append(Acquired(event.lease, event.from_block, 0, 0, (), stop, (0, 0, 0, 0), now, present))
            return
        places = [event.from_block + place for place in found.hot]
        rows = rows_of(list(found.hot.values()))
        by_tier = (0, len(found.hot) * space.block_tokens, len(wish.coming) * space.block_tokens, 0)
        reply = Acquired(
            event.lease, event.from_block, len(pins), len(places),
            scattered_runs(space, places, rows, self.state.host_pool), stop, by_tier,
            now + self.state.clipped_ttl(event.ttl_s), present, wish.eta_s,
        )  # fmt: skip
        lease = Lease(event.lease, event.session, space, reply)
        lease.pins = self._held(pins)
        if wish.coming:
            lease.awaited = [(event.from_block + place, pins[place]) for place in wish.coming]
            # In the order in which they can be read: what is in memory comes first.
            lease.cold = np.arange(len(pins)) >= len(places)
        begin_lease(self.state, session, lease, out)
        wish.give(lease)

    def _touch(self, space: Namespace, found: _Found) -> None:
        """They are used now, while nothing of them is pinned by this lease."""
        if not found.nodes:
            return
        tick = self.state.tick
        if found.hot and space.policy.remembers:
            space.policy.used(space, rows_of(list(found.hot.values())))
        space.table.touched[rows_of(list(found.nodes.values()))] = tick
        for node in found.hot.values():
            if not node.held:
                space.policy.touch_leaf(node, tick)

    def _pin(self, found: _Found) -> dict[int, Pin]:
        pins: dict[int, Pin] = {}
        for place, node in found.nodes.items():
            holder: list[Pin] = []
            self.remover.pin(node, node.end, holder)
            pins[place] = holder[0]
        return pins

    @staticmethod
    def _held(pins: dict[int, Pin]) -> list[Pin]:
        """All of them in one list, which is a lease's own."""
        held = list(pins.values())
        for pin in held:
            pin.holder = held
        return held

    def _count(
        self, event: AcquireRequested, space: Namespace, found: _Found, planned: tuple[int, Miss | None]
    ) -> Miss | None:
        """Counts what was looked up and what is missed; answers the first reason. planned: (blocks, why what is on disk
        is not among them)."""
        tokens = space.block_tokens
        self.state.stats.acquires += 1
        ledger = space.tokens
        total = event.prompt_tokens
        ledger.look_up(total - event.from_block * tokens, total - len(event.keys) // KEY_BYTES * tokens)
        blocks, why = planned
        left = len(found.nodes) - blocks
        misses = (
            (why or Miss.TIER_OFF, left),
            (Miss.BEYOND_LIMIT, found.stored - len(found.nodes)),
            (Miss.NOT_STORED, found.asked - found.stored),
        )
        for reason, count in misses:
            ledger.miss[reason] += count * tokens
        return next((reason for reason, count in misses if count), None)


def rows_of(nodes: Sequence[Node]) -> Rows:
    """Rows of nodes of one block each."""
    return np.frombuffer(b"".join([node.rows for node in nodes]), ROW_DTYPE)
