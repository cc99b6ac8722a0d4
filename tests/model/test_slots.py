"""The slab allocator beside a plain dict of who owns which slot."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from prefixcache.core.ids import SLOT_GRANULE
from prefixcache.core.slots import SlabPool
from prefixcache.core.spec import PoolSpec

STRIDES = tuple(granules * SLOT_GRANULE for granules in (1, 2, 3))


class PoolBesideDict(RuleBasedStateMachine):
    @initialize(slabs=st.integers(1, 4), per_slab=st.integers(3, 7), short=st.integers(0, 2), ready=st.integers(0, 30))
    def make(self, slabs: int, per_slab: int, short: int, ready: int) -> None:
        self.per_slab = per_slab
        size = (slabs * per_slab - short) * SLOT_GRANULE
        self.pool = SlabPool(PoolSpec(size, per_slab * SLOT_GRANULE), ready * SLOT_GRANULE)
        self.ready = min(ready * SLOT_GRANULE, size)
        self.owned: dict[int, int] = {}  # slot -> stride in granules

    @rule(stride=st.sampled_from(STRIDES), count=st.integers(0, 9))
    def allocate(self, stride: int, count: int) -> None:
        could = self.pool.free_slots(stride)
        slots = self.pool.allocate(stride, count)
        assert slots.dtype == np.uint32
        assert len(slots) == min(count, could), "free_slots promises what allocate does not keep"
        granules = stride // SLOT_GRANULE
        for slot in slots.tolist():
            assert slot not in self.owned
            assert slot % self.per_slab + granules <= self.per_slab, "a slot across two slabs"
            self.owned[slot] = granules

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.owned:
            chosen = data.draw(st.lists(st.sampled_from(sorted(self.owned)), unique=True))
            self.pool.release(np.array(chosen, np.uint32))
            for slot in chosen:
                del self.owned[slot]

    @rule(ready=st.integers(0, 40))
    def fault_in(self, ready: int) -> None:
        self.pool.grow_ready(ready * SLOT_GRANULE)
        self.ready = max(self.ready, min(ready * SLOT_GRANULE, self.pool.spec.size_bytes))

    @rule(which=st.integers(0, 9), close=st.booleans())
    def close_or_reopen(self, which: int, close: bool) -> None:
        slabs = list(self.pool.slabs.values())
        if slabs:
            slab = slabs[which % len(slabs)]
            (self.pool.close_slab if close else self.pool.reopen_slab)(slab)

    @invariant()
    def nothing_overlaps(self) -> None:
        if not hasattr(self, "pool"):
            return
        taken = [granule for slot, granules in self.owned.items() for granule in range(slot, slot + granules)]
        assert len(taken) == len(set(taken))
        assert all(granule * SLOT_GRANULE < self.ready for granule in taken)
        assert self.pool.used_bytes == len(taken) * SLOT_GRANULE
        assert self.pool.ready_bytes == self.ready
        for slot in range(self.pool.spec.size_bytes // SLOT_GRANULE):
            assert self.pool.is_used(slot) == (slot in self.owned)

    def teardown(self) -> None:
        """With everything back, every slab is free for any class again."""
        if hasattr(self, "pool"):
            self.pool.release(np.array(sorted(self.owned), np.uint32))
            assert self.pool.slabs == {}
            assert self.pool.free_slots(SLOT_GRANULE) == self.pool.class_capacity(SLOT_GRANULE)


TestPool = PoolBesideDict.TestCase
TestPool.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
