"""Whether blocks of a foreign namespace that are on disk only are worth bringing back, and the order to do it.

Rules: as for chained keys (loading), but every key stands for itself: of those asked for that are on disk as many of
the first are promised as come in time, and faster than they would be computed. What is to be read is pinned before
slots are looked for. Must not know: what becomes of what came, who asks.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from prefixcache.core.commands import Command
from prefixcache.core.events import AcquireRequested
from prefixcache.core.ids import KEY_BYTES, Slots
from prefixcache.core.leases import Lease
from prefixcache.core.loading import MARGIN, Loader
from prefixcache.core.loads import Load
from prefixcache.core.namespaces import Namespace
from prefixcache.core.radix import Node, Pin
from prefixcache.core.reasons import Miss
from prefixcache.core.removal import Remover
from prefixcache.core.state import State


class ForeignWish:
    """Which places are promised although their blocks are on disk only (`coming`, ascending), by which loads, and why
    it is not all of them (`stop`)."""

    __slots__ = ("coming", "eta_s", "loads", "stop")

    def __init__(self) -> None:
        self.coming: list[int] = []
        self.loads: list[Load] = []
        self.stop: Miss | None = None
        self.eta_s = 0.0

    def give(self, lease: Lease) -> None:
        """The lease waits for these loads."""
        lease.loads = self.loads
        for load in self.loads:
            load.waiters.append(lease)


class _Choice:
    """Places on disk in the order in which they are asked for, with whoever loads them already; the first `count` are
    wanted. sizes: i64[n], bytes to be read for so many."""

    def __init__(self, space: Namespace, cold: Mapping[int, Node], wish: ForeignWish) -> None:
        self.places: list[int] = []
        self.loads: list[Load | None] = []
        self.wish = wish
        for place, node in cold.items():
            load = space.loading.get((node.first_row, 0)) if space.loading else None
            if load is not None and load.cancelled:  # it ends at any moment, and until then nobody else can load it
                wish.stop = Miss.DEADLINE
                continue
            self.places.append(place)
            self.loads.append(load)
        fresh = np.array([load is None for load in self.loads], np.bool_)
        self.sizes: NDArray[np.int64] = np.cumsum(fresh) * space.block_bytes
        self.count = len(self.places)

    def cut(self, allowed: NDArray[np.bool_], why: Miss) -> None:
        """No more than the leading ones that are allowed."""
        self.cut_to(len(allowed) if allowed.all() else int(np.argmin(allowed)), why)

    def cut_to(self, count: int, why: Miss) -> None:
        if count < self.count:
            self.count, self.wish.stop = count, why

    def fresh(self) -> list[int]:
        """Places that nobody loads yet, of those wanted."""
        wanted = zip(self.places[: self.count], self.loads, strict=False)
        return [place for place, load in wanted if load is None]


class ForeignLoader:
    """See the module's rules; how the disk does is the loader's to know."""

    def __init__(self, state: State, remover: Remover, loader: Loader) -> None:
        self.state = state
        self.remover = remover
        self.loader = loader

    def plan(
        self, event: AcquireRequested, space: Namespace, cold: Mapping[int, Node], now: float, out: list[Command]
    ) -> ForeignWish:
        """Decides which blocks on disk are promised, and begins to load them. cold: by place, ascending."""
        wish = ForeignWish()
        computes_s = event.recompute_s_per_token * space.block_tokens
        self.loader.weigh(space, computes_s)
        if not self.state.disk.reads_on:
            wish.stop = Miss.TIER_OFF
            return wish
        meter = self.loader.meter
        choice = _Choice(space, cold, wish)
        arrives = meter.wait_s() + choice.sizes / meter.bytes_per_s
        choice.cut(choice.sizes <= self.loader.spec.loading_bytes - meter.pending_bytes, Miss.POOL_FULL)
        choice.cut(arrives <= event.deadline_s, Miss.DEADLINE)
        if computes_s and choice.count:
            gains = (computes_s * np.arange(1, len(arrives) + 1) - MARGIN * arrives)[: choice.count]
            best = int(np.argmax(gains))
            choice.cut_to(best + 1 if gains[best] >= 0 else 0, Miss.SLOWER_THAN_RECOMPUTE)
        if choice.count:
            self._begin(space, cold, choice, now, out)
        elif wish.stop is Miss.SLOWER_THAN_RECOMPUTE and meter.in_doubt(now):
            self._try_one(space, cold, choice, now, out)
        if choice.count:
            wish.eta_s = float(arrives[choice.count - 1])
        return wish

    def fetch(
        self, space: Namespace, cold: Mapping[int, Node], most_bytes: int, now: float, out: list[Command]
    ) -> ForeignWish:
        """Begins to load blocks for nobody in particular, as far as `most_bytes` under way allow. Such loads go on
        although no lease waits for them."""
        wish = ForeignWish()
        if not self.state.disk.reads_on:
            wish.stop = Miss.TIER_OFF
            return wish
        choice = _Choice(space, cold, wish)
        choice.cut(choice.sizes <= most_bytes - self.loader.meter.pending_bytes, Miss.BEYOND_LIMIT)
        if choice.count:
            self._begin(space, cold, choice, now, out)
        for load in wish.loads:
            load.kept = True
        return wish

    def _try_one(
        self, space: Namespace, cold: Mapping[int, Node], choice: _Choice, now: float, out: list[Command]
    ) -> None:
        """Loads one block that nobody waits for: nothing else would tell that the disk has become faster."""
        choice.count = 1
        self._begin(space, cold, choice, now, out)
        choice.count, choice.wish.coming, choice.wish.loads = 0, [], []
        choice.wish.stop = Miss.SLOWER_THAN_RECOMPUTE

    def _begin(
        self, space: Namespace, cold: Mapping[int, Node], choice: _Choice, now: float, out: list[Command]
    ) -> None:
        """Loads what nobody loads yet of what is wanted, as far as there are slots."""
        fresh = choice.fresh()
        pins: list[Pin] = []
        for place in fresh:
            self.remover.pin(cold[place], cold[place].end, pins)
        parts = list(range(len(space.strides)))
        slots = self.loader.room.allocate(space, parts, len(fresh), out) if fresh else {}
        granted = len(slots[0]) if fresh else 0
        if granted < len(fresh):
            choice.cut_to(choice.places.index(fresh[granted]), Miss.POOL_FULL)
            surplus, pins = pins[granted:], pins[:granted]
            self.remover.unpin_all(surplus)
        wanted = choice.loads[: choice.count]
        choice.wish.coming = choice.places[: choice.count]
        choice.wish.loads = list({load.number: load for load in wanted if load is not None}.values())
        if granted:
            nodes = [cold[place] for place in fresh[:granted]]
            choice.wish.loads.append(self._start(space, nodes, slots, pins, now, out))

    def _start(
        self, space: Namespace, nodes: list[Node], slots: dict[int, Slots], pins: list[Pin], now: float,
        out: list[Command],
    ) -> Load:  # fmt: skip
        rows = np.array([node.first_row for node in nodes], np.uint32)
        depths = np.array([node.start for node in nodes], np.int64)
        keys = b"".join([node.edge for node in nodes])
        parents = b"".join([space.parent_key(node) or bytes(KEY_BYTES) for node in nodes])
        packed = [np.frombuffer(each, np.uint8).reshape(-1, KEY_BYTES) for each in (keys, parents)]
        return self.loader.start(space, (rows, depths, packed[0], packed[1]), slots, pins, now, out)
