"""Prefetch: blocks come from disk to memory without a lease and without a pin, because somebody will ask for them.

Rules: nobody waits for such a load, so it takes half of what may be loading at once and a quarter of memory at most;
what was asked for counts as used now, or the next store would push it out again. What does not come has a reason that
is counted. Must not know: how a load goes on (loading does), who asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from prefixcache.core.commands import Command
from prefixcache.core.foreign_leases import rows_of
from prefixcache.core.foreign_loading import ForeignLoader
from prefixcache.core.loading import Loader
from prefixcache.core.loads import Load
from prefixcache.core.namespaces import Namespace
from prefixcache.core.pin_messages import Prefetched, PrefetchRequested
from prefixcache.core.radix import Path
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
        self.foreign_loader: ForeignLoader | None = None

    def request(self, event: PrefetchRequested, now: float, out: list[Command]) -> None:
        state = self.state
        space = state.known_namespace(event.namespace, out)
        if space is None or not state.good_keys(event.keys, 0, out):
            return
        state.stats.prefetches += 1
        brought = (self.bring if space.foreign is None else self._bring_keys)(space, event.keys, now, out)
        if brought.stop is not None:
            state.stats.prefetch_stops[brought.stop] += 1
        out.append(Prefetched(*brought))

    def bring(self, space: Namespace, keys: bytes, now: float, out: list[Command]) -> Brought:
        """Begins to load what is on disk only of the longest stored prefix of `keys`."""
        path = space.tree.walk(keys)
        if not space.on_disk or not path.blocks or self.loader is None:
            self.touch(space, path)
            return Brought(path.blocks, 0, None)
        known = set(self.loader.loads)
        wish = self.loader.fetch(space, path, self._most_bytes(self.loader), now, out)
        self._count(known, wish.loads)
        path = space.tree.walk(keys)  # room may have been made from the rest of it
        self.touch(space, path)
        if wish.cold is None:
            return Brought(wish.end, 0, wish.stop)
        return Brought(int(np.argmax(wish.cold)), int(np.count_nonzero(wish.cold)), wish.stop)

    def _bring_keys(self, space: Namespace, keys: bytes, now: float, out: list[Command]) -> Brought:
        """In a foreign namespace: begins to load those of `keys` that are on disk only."""
        assert space.foreign is not None
        nodes = [node for node in space.foreign.present(keys) if node is not None]
        space.table.touched[rows_of(nodes)] = self.state.tick
        hot = [node for node in nodes if not node.cold]
        for node in hot:
            if not node.held:
                space.policy.touch_leaf(node, self.state.tick)
        cold = {place: node for place, node in enumerate(nodes) if node.cold}
        if not cold or self.loader is None or self.foreign_loader is None:
            return Brought(len(hot), 0, None)
        known = set(self.loader.loads)
        wish = self.foreign_loader.fetch(space, cold, self._most_bytes(self.loader), now, out)
        self._count(known, wish.loads)
        return Brought(len(hot), len(wish.coming), wish.stop)

    def _most_bytes(self, loader: Loader) -> int:
        return min(loader.spec.loading_bytes // _SHARE_OF_LOADS, self.state.host.ready_bytes // _SHARE_OF_MEMORY)

    def _count(self, known: set[int], loads: list[Load]) -> None:
        """known: numbers of loads that were under way before."""
        begun = [load for load in loads if load.number not in known]
        self.state.stats.blocks_prefetched += sum(len(load.rows) for load in begun)
