"""Slots for a grant: allocate, and make room first where there is too little.

Rules: all parts of a block or none of it. A class that is out of victims of its own may take a slab of another class,
once that one is empty (transfers). Must not know: keys, reservations.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from prefixcache.core.commands import Command
from prefixcache.core.eviction import Evictor
from prefixcache.core.ids import Slots
from prefixcache.core.namespaces import Namespace
from prefixcache.core.policy.base import Bids
from prefixcache.core.removal import Remover
from prefixcache.core.state import State
from prefixcache.core.transfers import Transfers


class RoomMaker:
    """See the module's rules."""

    def __init__(self, state: State, remover: Remover, evictor: Evictor, transfers: Transfers) -> None:
        self.state = state
        self.remover = remover
        self.evictor = evictor
        self.transfers = transfers

    def allocate(
        self, space: Namespace, parts: list[int], count: int, out: list[Command], bids: Bids | None = None
    ) -> dict[int, Slots]:
        """Slots for `parts` of up to `count` blocks (one bid each, if any): arrays of one length, maybe 0."""
        host = self.state.host
        per_class = Counter(space.strides[part] for part in parts)
        got: dict[int, Slots] = {}
        # Class by class: an unused slab counts as free for each of them until one has taken it.
        for stride, each in per_class.items():
            # More than the pool could ever hold would only evict everything for nothing.
            wanted = min(count * each, host.class_capacity(stride))
            if bids is not None:
                del bids.worths[wanted // each :]
            if host.free_slots(stride) < wanted:
                self.transfers.consider(stride, wanted, out)
                if not self.evictor.free_up(stride, wanted, bids):
                    self.transfers.take_over(stride, wanted, out)
            count = count if bids is None else len(bids.worths)
            got.update({part: host.allocate(stride, count) for part in parts if space.strides[part] == stride})
        least = min(len(slots) for slots in got.values())
        surplus = [slots[least:] for slots in got.values() if len(slots) > least]
        if surplus:
            self.remover.release_slots(np.concatenate(surplus))
        return {part: slots[:least] for part, slots in got.items()}
