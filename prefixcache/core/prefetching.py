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
from prefixcache.core.loading import Loader
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
        if not space.on_disk or not path.blocks or self.loader is None:
            self.touch(space, path)
            return Brought(path.blocks, 0, None)
        known = set(self.loader.loads)
        most = min(self.loader.spec.loading_bytes // _SHARE_OF_LOADS, self.state.host.ready_bytes // _SHARE_OF_MEMORY)
        wish = self.loader.fetch(space, path, most, now, out)
        begun = [load for load in wish.loads if load.number not in known]
        self.state.stats.blocks_prefetched += sum(len(load.rows) for load in begun)
        path = space.tree.walk(keys)  # room may have been made from the rest of it
        self.touch(space, path)
        if wish.cold is None:
            return Brought(wish.end, 0, wish.stop)
        return Brought(int(np.argmax(wish.cold)), int(np.count_nonzero(wish.cold)), wish.stop)
