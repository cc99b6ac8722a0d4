"""Prefetch: blocks come from disk to memory without a lease and without a pin, because somebody will ask for them.

Rules: nobody waits for such a load, so it takes half of what may be loading at once and a quarter of memory at most;
what was asked for counts as used now, or the next store would push it out again. What does not come has a reason that
is counted. Must not know: how a load goes on (loading does), who asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prefixcache.core.commands import Command
from prefixcache.core.ids import NO_SLOT, Rows
from prefixcache.core.loading import Loader, Wish
from prefixcache.core.namespaces import Namespace
from prefixcache.core.pin_messages import Prefetched, PrefetchRequested
from prefixcache.core.radix import ROW_DTYPE, Path
from prefixcache.core.reasons import Miss
from prefixcache.core.state import State

_SHARE_OF_LOADS = 2
_SHARE_OF_MEMORY = 4


class Brought(NamedTuple):
    """Blocks of the prefix that are in memory from block 0 on, that are coming, and why it is not more."""

    ready: int
    coming: int
    stop: Miss | None


class Prefetcher:
    """See the module's rules. Without a disk there is no loader, and nothing ever comes."""

    def __init__(self, state: State, touch: Callable[[Namespace, Path], None]) -> None:
        self.state = state
        self.touch = touch
        self.loader: Loader | None = None

    def request(self, event: PrefetchRequested, now: float, out: list[Command]) -> None:
        state = self.state
        space = state.known_namespace(event.namespace, out)
        if space is None or not state.good_keys(event.keys, 0, out):
            return
        state.stats.prefetches += 1
        if space.foreign is not None:
            present = sum(node is not None for node in space.foreign.present(event.keys))
            out.append(Prefetched(present, 0, None))
            return
        brought = self.bring(space, event.keys, now, out)
        if brought.stop is not None:
            state.stats.prefetch_stops[brought.stop] += 1
        out.append(Prefetched(*brought))

    def bring(self, space: Namespace, keys: bytes, now: float, out: list[Command]) -> Brought:
        """Begins to load what is on disk only of the longest stored prefix of `keys`."""
        path = space.tree.walk(keys)
        rows = np.frombuffer(path.packed_rows(), ROW_DTYPE)
        cold: NDArray[np.bool_] = space.table.parts[0].slots[rows] == NO_SLOT
        if not space.cold_blocks or not cold.any() or self.loader is None:
            self.touch(space, path)
            return Brought(path.blocks, 0, None)
        if not self.state.disk.reads_on:
            return Brought(int(np.argmax(cold)), 0, Miss.TIER_OFF)
        wish = self._wish(self.loader, space, (rows, cold), path.blocks)
        asked = int(np.count_nonzero(cold[: wish.end]))
        if asked:
            before = len(space.loading)
            self.loader.begin(space, path, (rows[: wish.end], cold[: wish.end]), wish, now, out)
            for load in wish.loads:
                load.kept = True
            asked = int(np.count_nonzero(cold[: wish.end]))
            self.state.stats.blocks_prefetched += len(space.loading) - before
        path = space.tree.walk(keys)  # room may have been made from the rest of it
        self.touch(space, path)
        return Brought(int(np.argmax(cold)), asked, wish.stop)

    def _wish(self, loader: Loader, space: Namespace, found: tuple[Rows, NDArray[np.bool_]], end: int) -> Wish:
        """How far it may go: up to what is being called off, and within the bounds."""
        rows, cold = found
        wish = Wish(end)
        fresh = cold & loader.not_coming(space, rows, cold, wish) if space.loading else cold
        most = min(loader.spec.loading_bytes // _SHARE_OF_LOADS, self.state.host.ready_bytes // _SHARE_OF_MEMORY)
        room = max(most - loader.meter.pending_bytes, 0) // sum(space.strides)
        places = np.flatnonzero(fresh[: wish.end])
        if len(places) > room:
            wish.end, wish.stop = int(places[room]), Miss.BEYOND_LIMIT
        return wish
