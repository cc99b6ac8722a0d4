"""Slabs changing class.

Rules: a slab changes class only when it is empty. It is emptied by leaf evictions, at once, where a class has nothing
of its own to evict, and slab by slab where those left some block in each; where another class holds older blocks, by
evicting those, and by moving what is left in one to other slabs, in the background, one slab at a time. Must not know:
keys, reservations, why room is needed.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from prefixcache.core import emptying
from prefixcache.core.commands import Command, CopySlots, SetGenerations
from prefixcache.core.eviction import Evictor
from prefixcache.core.ids import SLOT_GRANULE, Rows
from prefixcache.core.namespaces import Namespace
from prefixcache.core.policy.base import EvictionPolicy
from prefixcache.core.slabs import Move, SlabMover
from prefixcache.core.slots import Slab
from prefixcache.core.state import State

EVICTIONS_PER_SLAB = 2  # a take-over evicts at most this many slabs' worth of blocks in one call


class Transfers:
    """See the module's rules."""

    def __init__(self, state: State, evictor: Evictor, mover: SlabMover) -> None:
        self.state = state
        self.evictor = evictor
        self.mover = mover
        self._next_copy = 1

    def take_over(self, stride: int, wanted: int, out: list[Command]) -> None:
        """Evicts the oldest leaves of other classes until slabs fall empty and `wanted` slots are free, within bounds;
        if that did not do, begins to move a slab empty for later."""
        host = self.state.host
        budget_bytes = EVICTIONS_PER_SLAB * max(host.spec.slab_bytes, wanted * stride)
        while host.free_slots(stride) < wanted and budget_bytes > 0:
            policy = self.evictor.oldest_policy(stride, using=False)
            if policy is None:
                break
            node = policy.victim()
            assert node is not None
            assert node.space is not None
            evicted = self.evictor.evict_from(policy, max(1, host.spec.slab_bytes // sum(node.space.strides)))
            budget_bytes -= evicted * sum(node.space.strides)
        for _ in range(len(host.slabs)):
            if host.free_slots(stride) >= wanted or self.mover.moves:
                break
            if not emptying.empty(self.evictor.remover, [owners for _, owners in self._emptiest(stride)]):
                break
        if host.free_slots(stride) < wanted:
            self.begin_move(stride, out)

    def consider(self, stride: int, wanted: int, out: list[Command]) -> None:
        """A class is about to evict for `wanted` slots. While another class holds older blocks than the oldest of this
        one, those leave instead, twice as many bytes as are missing at most; where that empties no slab, the one
        with the least in it is moved empty for later. So a class whose blocks are wanted grows as fast as it stores,
        whatever the size of its blocks, and a pool full of a model that nobody runs any more is not kept for it."""
        host = self.state.host
        if len(self.state.policies) < 2:  # itself
            return
        budget_bytes = EVICTIONS_PER_SLAB * (wanted - host.free_slots(stride)) * stride
        while host.free_slots(stride) < wanted and (policy := self._older(stride)) is not None:
            node = policy.victim()
            if budget_bytes <= 0 or node is None or node.space is None:
                self.begin_move(stride, out)
                return
            block_bytes = sum(node.space.strides)
            budget_bytes -= self.evictor.evict_from(policy, -(-budget_bytes // block_bytes)) * block_bytes

    def _older(self, stride: int) -> EvictionPolicy | None:
        """The policy of another class whose oldest leaf is older than the oldest of this one. None as well where this
        one has none: it takes over then, at once, which a slab that is being moved would keep it from."""
        mine = self.evictor.oldest_policy(stride, using=True)
        other = self.evictor.oldest_policy(stride, using=False)
        victim = other.victim() if other is not None else None
        own_victim = mine.victim() if mine is not None else None
        return other if victim is not None and own_victim is not None and victim.tick < own_victim.tick else None

    def begin_move(self, stride: int, out: list[Command]) -> None:
        """Starts emptying the slab of another class that has the least in it, unless one is being emptied."""
        if self.mover.moves:
            return
        found = self._donor(stride)
        if found is None:
            return
        slab, owners = found
        host = self.state.host
        slab_stride = slab.stride * SLOT_GRANULE
        live = slab.count - slab.free_count
        host.close_slab(slab)
        if host.free_slots(slab_stride) < live:
            self.evictor.free_up(slab_stride, live)
        if host.slabs.get(slab.number) is not slab:
            return  # the evictions emptied it
        if host.free_slots(slab_stride) < slab.count - slab.free_count:
            host.reopen_slab(slab)  # what cannot be moved as a whole is better left alone
            return
        for space, part, _ in owners:
            rows = _rows_in(space, part, slab, host.slab_granules)
            if len(rows):
                self._copy(space, part, rows, slab, out)

    def _copy(self, space: Namespace, part: int, rows: Rows, slab: Slab, out: list[Command]) -> None:
        state = self.state
        targets = state.host.allocate(space.strides[part], len(rows))
        assert len(targets) == len(rows)
        move = Move(slab, space, part, rows, targets, state.next_generation())
        copy = self._next_copy
        self._next_copy += 1
        self.mover.moves[copy] = move
        out.append(SetGenerations(state.host_pool, targets, move.generation))
        out.append(CopySlots(copy, state.host_pool, move.sources, targets, space.strides[part]))

    def _donor(self, stride: int) -> tuple[Slab, list[tuple[Namespace, int, Rows]]] | None:
        """The slab of another class with the fewest live slots, if all of these are committed blocks'."""
        return next(iter(self._emptiest(stride)), None)

    def _emptiest(self, stride: int) -> Iterator[tuple[Slab, list[tuple[Namespace, int, Rows]]]]:
        """Of the slabs of other classes with the fewest live slots those whose live slots are all committed blocks'."""
        host = self.state.host
        others = [slab for slab in host.slabs.values() if slab.stride * SLOT_GRANULE != stride and not slab.closed]
        for slab in sorted(others, key=lambda slab: slab.count - slab.free_count)[:4]:
            owners = self._owners(slab)
            if sum(len(rows) for _, _, rows in owners) == slab.count - slab.free_count:
                yield slab, owners

    def _owners(self, slab: Slab) -> list[tuple[Namespace, int, Rows]]:
        """Which rows' parts live in a slab. A scan of the columns: rare, and cheaper than a reverse map always kept."""
        found = []
        for space in self.state.namespaces.values():
            for part, stride in enumerate(space.strides):
                if stride == slab.stride * SLOT_GRANULE:
                    rows = _rows_in(space, part, slab, self.state.host.slab_granules)
                    if len(rows):
                        found.append((space, part, rows))
        return found


def _rows_in(space: Namespace, part: int, slab: Slab, slab_granules: int) -> Rows:
    slots: NDArray[np.uint32] = space.table.parts[part].slots[: space.table.high_water]
    inside = (slots >= slab.first) & (slots < slab.first + slab_granules)
    return np.flatnonzero(inside).astype(np.uint32)
