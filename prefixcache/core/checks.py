"""Bytes that must be verified before anybody may rely on them (a re-attached pool; later disk and peers).

Rules: an Acquire whose blocks are unverified waits, unanswered and uncounted, for exactly one VerifyDone, then it is
decided afresh: what failed has left by then. Must not know: how digests are computed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from prefixcache.core.clearing import Clearing
from prefixcache.core.commands import Command, PartCheck, VerifyParts
from prefixcache.core.events import AcquireRequested, VerifyDone
from prefixcache.core.ids import NO_SLOT, Generations, Rows
from prefixcache.core.namespaces import Namespace
from prefixcache.core.nodes import find_row
from prefixcache.core.reasons import Kind, Refusal
from prefixcache.core.state import State
from prefixcache.core.table import UNVERIFIED


class Waiting:
    """An Acquire that waits, and what is being verified for it (generations tell what has moved on meanwhile)."""

    __slots__ = ("event", "generations", "order", "space")

    def __init__(
        self, event: AcquireRequested, space: Namespace, order: VerifyParts, generations: dict[int, Generations]
    ) -> None:
        self.event = event
        self.space = space
        self.order = order
        self.generations = generations


class Checks:
    """Handler of VerifyDone; `hold` is asked by Acquire."""

    def __init__(self, state: State, clearing: Clearing) -> None:
        self.state = state
        self.clearing = clearing
        self.waiting: dict[int, Waiting] = {}
        self._next_check = 1

    def hold(self, event: AcquireRequested, space: Namespace, rows: Rows, out: list[Command]) -> bool:
        """Whether this Acquire has to wait (or was refused) because some part of `rows` is unverified."""
        state = self.state
        parts = []
        generations = {}
        for part, column in enumerate(space.table.parts):
            unsure = rows[((column.flags[rows] & UNVERIFIED) != 0) & (column.slots[rows] != NO_SLOT)]
            if len(unsure):
                unsure = np.unique(unsure)
                size = space.spec.parts[part].size_bytes
                slots, digests = column.slots[unsure], column.digests[unsure]
                parts.append(PartCheck(part, state.host_pool, size, unsure, slots, digests))
                generations[part] = column.generations[unsure]
        if not parts:
            return False
        if len(self.waiting) >= state.limits.max_parked:
            text = f"at most {state.limits.max_parked} acquires wait for a verification"
            state.refuse(out, Kind.RESOURCE_EXHAUSTED, Refusal.TOO_MANY, text, event.lease)
            return True
        order = VerifyParts(self._next_check, space.number, tuple(parts))
        self._next_check += 1
        self.waiting[order.check] = Waiting(event, space, order, generations)
        out.append(order)
        return True

    def done(
        self, event: VerifyDone, now: float, out: list[Command],
        decide: Callable[[AcquireRequested, float, list[Command]], None],
    ) -> None:  # fmt: skip
        """A verification ended: what failed leaves, and the Acquire is decided."""
        waiting = self.waiting.pop(event.check, None)
        if waiting is None:
            text = f"no check {event.check} is under way"
            self.state.refuse(out, Kind.NOT_FOUND, Refusal.CHECK_UNKNOWN, text)
            return
        space = self.state.namespaces.get(waiting.order.namespace)
        if space is not None and space is waiting.space:
            self._judge(space, waiting, set(event.failed), out)
        decide(waiting.event, now, out)

    def _judge(self, space: Namespace, waiting: Waiting, failed: set[tuple[int, int]], out: list[Command]) -> None:
        """Trusts what verified, if it is still what it was, and removes what did not."""
        for check in waiting.order.parts:
            column = space.table.parts[check.part]
            same = (column.generations[check.rows] == waiting.generations[check.part]) & (
                column.slots[check.rows] == check.slots
            )
            bad = np.array([(check.part, int(row)) in failed for row in check.rows], np.bool_)
            space.table.mark_verified(check.part, check.rows[same & ~bad])
            for row in check.rows[same & bad].tolist():
                self._remove(space, row, out)

    def _remove(self, space: Namespace, row: int, out: list[Command]) -> None:
        node = find_row(space, row)
        self.state.stats.parts_failed_verification += 1
        if node is None:
            return  # it left with a block in front of it, or a lease keeps it out of sight
        gone, _ = self.clearing.remove_from(space, node, row, out)
        self.state.stats.blocks_cleared += gone
