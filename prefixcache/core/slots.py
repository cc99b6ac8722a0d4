"""Slab allocator of one pool: slabs of equal size, each cut into slots of one stride at a time.

Rules: a slot has one owner or is free, nothing between; `release` of a free slot is a defect and asserts. A slab with
no slot in use belongs to no class, so a class gives back what it does not need without a step of its own. Slots come
in ascending, contiguous runs where there are any, so that copies of one prefix can be merged.
Must not know: what is in a slot, blocks, sessions.
"""

from __future__ import annotations

import heapq
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from prefixcache.core.ids import SLOT_GRANULE, Slots
from prefixcache.core.spec import PoolSpec

_LOOKED_AT = 4  # slabs searched for one contiguous run before taking what comes

_NONE: Slots = np.empty(0, np.uint32)


class Slab:
    """One slab in use: `free[i]` tells whether slot `first + i * stride` (granules) is free."""

    __slots__ = ("closed", "first", "free", "free_count", "number", "stride")

    def __init__(self, number: int, first: int, stride: int, count: int) -> None:
        self.number = number
        self.first = first
        self.stride = stride
        self.free: NDArray[np.bool_] = np.ones(count, np.bool_)
        self.free_count = count
        self.closed = False  # being emptied: gives no slots

    @property
    def count(self) -> int:
        return len(self.free)

    def take(self, count: int, *, contiguous: bool) -> Slots:
        """Up to `count` free slots, ascending; with `contiguous` either one run of all of them or none."""
        if self.free_count == len(self.free):
            picked = np.arange(min(count, len(self.free)), dtype=np.int64)
        else:
            picked = np.flatnonzero(self.free)
            if len(picked) > count:
                span = picked[count - 1 :] - picked[: len(picked) - count + 1]
                start = int(np.argmin(span))
                picked = picked[start : start + count]
        if contiguous and (len(picked) < count or int(picked[-1] - picked[0]) != count - 1):
            return _NONE
        self.free[picked] = False
        self.free_count -= len(picked)
        return (self.first + picked * self.stride).astype(np.uint32)


class SlabPool:
    """All slabs of one pool. Strides are in bytes at this door and multiples of SLOT_GRANULE."""

    def __init__(self, spec: PoolSpec, ready_bytes: int | None = None) -> None:
        if spec.slab_bytes % SLOT_GRANULE or spec.size_bytes % SLOT_GRANULE or spec.slab_bytes <= 0:
            raise ValueError("pool and slab sizes must be multiples of the slot granule")
        self.spec = spec
        self.slab_granules = spec.slab_bytes // SLOT_GRANULE
        self.slabs: dict[int, Slab] = {}
        self._last_is_short = spec.size_bytes % spec.slab_bytes != 0
        self.ready_bytes = 0
        self.used_bytes = 0
        self._ready_slabs = 0
        self._unused: list[int] = []  # heap: low slabs first keeps runs ascending
        self._open: dict[int, dict[int, Slab]] = {}  # stride granules -> slabs with a free slot
        self._free_slots: dict[int, int] = {}  # stride granules -> free slots in its open slabs
        self.grow_ready(spec.size_bytes if ready_bytes is None else ready_bytes)

    def grow_ready(self, ready_bytes: int) -> None:
        """The first `ready_bytes` may be given out from now on; less than before changes nothing."""
        ready_bytes = min(ready_bytes, self.spec.size_bytes)
        if ready_bytes <= self.ready_bytes:
            return
        self.ready_bytes = ready_bytes
        while self._ready_slabs < self.slab_total and self._slab_end(self._ready_slabs) <= ready_bytes:
            heapq.heappush(self._unused, self._ready_slabs)
            self._ready_slabs += 1

    @property
    def slab_total(self) -> int:
        return -(-self.spec.size_bytes // self.spec.slab_bytes)

    def slab_capacity(self, number: int, stride_bytes: int) -> int:
        """How many slots of a stride a slab holds (the last slab may be short)."""
        return (self._slab_end(number) - number * self.spec.slab_bytes) // stride_bytes

    def class_capacity(self, stride_bytes: int) -> int:
        """How many slots of a stride an empty, ready pool would hold."""
        if self._ready_slabs == self.slab_total:
            return (self.slab_total - 1) * (self.spec.slab_bytes // stride_bytes) + self.slab_capacity(
                self.slab_total - 1, stride_bytes
            )
        return self._ready_slabs * (self.spec.slab_bytes // stride_bytes)

    def allocate(self, stride_bytes: int, count: int) -> Slots:
        """Up to `count` slots; fewer when there are no more."""
        if count <= 0:
            return _NONE
        stride = stride_bytes // SLOT_GRANULE
        whole = self._allocate_run(stride, count)
        if whole is not None:
            return whole
        pieces: list[Slots] = []
        missing = count
        while missing:
            slab = self._open_slab(stride)
            if slab is None:
                break
            piece = self._take(slab, missing, contiguous=False)
            pieces.append(piece)
            missing -= len(piece)
        return np.concatenate(pieces) if len(pieces) > 1 else pieces[0] if pieces else _NONE

    def release(self, slots: Slots) -> None:
        """Gives slots back (any mix of strides)."""
        if not len(slots):
            return
        numbers = slots // self.slab_granules
        first = int(numbers[0])
        if len(slots) == 1 or bool((numbers == first).all()):
            self._release_in(first, slots)
            return
        for number in np.unique(numbers):
            self._release_in(int(number), slots[numbers == number])

    def close_slab(self, slab: Slab) -> None:
        """The slab gives no more slots until it is empty or reopened."""
        if not slab.closed:
            slab.closed = True
            self._free_slots[slab.stride] -= slab.free_count
            self._open[slab.stride].pop(slab.number, None)

    def reopen_slab(self, slab: Slab) -> None:
        if slab.closed and self.slabs.get(slab.number) is slab:
            slab.closed = False
            self._free_slots[slab.stride] += slab.free_count
            if slab.free_count:
                self._open.setdefault(slab.stride, {})[slab.number] = slab

    def occupy(self, stride_bytes: int, slots: Slots) -> bool:
        """Marks exactly these slots as used (warm restart). False: they do not fit here or are taken; some may be
        marked then, so the caller throws the pool away."""
        stride = stride_bytes // SLOT_GRANULE
        for number in np.unique(slots // self.slab_granules):
            mine = slots[slots // self.slab_granules == number]
            slab = self.slabs.get(int(number))
            if slab is None and int(number) in self._unused:
                self._unused.remove(int(number))
                heapq.heapify(self._unused)
                slab = self._make_slab(int(number), stride)
            if slab is None or slab.stride != stride:
                return False
            places, odd = np.divmod(mine.astype(np.int64) - slab.first, stride)
            if odd.any() or int(places.max()) >= slab.count or not slab.free[places].all():
                return False
            if len(np.unique(places)) != len(places):
                return False
            slab.free[places] = False
            slab.free_count -= len(mine)
            self._free_slots[stride] -= len(mine)
            self.used_bytes += len(mine) * stride_bytes
            if not slab.free_count:
                self._open[stride].pop(slab.number, None)
        return True

    def free_slots(self, stride_bytes: int) -> int:
        """Slots of a stride that `allocate` could give now, unused slabs included."""
        inside = self._free_slots.get(stride_bytes // SLOT_GRANULE, 0)
        unused = len(self._unused)
        if not unused:
            return inside
        inside += unused * (self.spec.slab_bytes // stride_bytes)
        if self._last_is_short and self.slab_total - 1 in self._unused:
            inside += self.slab_capacity(self.slab_total - 1, stride_bytes) - self.spec.slab_bytes // stride_bytes
        return inside

    def unused_slabs(self) -> int:
        return len(self._unused)

    def unused_numbers(self) -> set[int]:
        """Slabs that belong to no class (for checks)."""
        return set(self._unused)

    def live_slots(self, slab: Slab) -> Slots:
        """Slots of a slab that are in use."""
        return (slab.first + np.flatnonzero(~slab.free) * slab.stride).astype(np.uint32)

    def is_used(self, slot: int) -> bool:
        """Whether this slot is in use (for checks)."""
        slab = self.slabs.get(slot // self.slab_granules)
        if slab is None:
            return False
        place, odd = divmod(slot - slab.first, slab.stride)
        return not odd and place < slab.count and not slab.free[place]

    def _allocate_run(self, stride: int, count: int) -> Slots | None:
        """One contiguous run out of the first few open slabs or an unused one."""
        for slab in islice(self._open.get(stride, {}).values(), _LOOKED_AT):
            if slab.free_count >= count:
                run = self._take(slab, count, contiguous=True)
                if len(run):
                    return run
        if count * stride > self.slab_granules:
            return None
        fresh = self._assign_unused(stride)
        if fresh is None:
            return None
        if fresh.free_count < count:  # the short last slab
            self._retire(fresh)
            return None
        return self._take(fresh, count, contiguous=True)

    def _take(self, slab: Slab, count: int, *, contiguous: bool) -> Slots:
        taken = slab.take(count, contiguous=contiguous)
        self.used_bytes += len(taken) * slab.stride * SLOT_GRANULE
        self._free_slots[slab.stride] -= len(taken)
        if not slab.free_count:
            del self._open[slab.stride][slab.number]
        return taken

    def _open_slab(self, stride: int) -> Slab | None:
        slabs = self._open.get(stride)
        if slabs:
            return next(iter(slabs.values()))
        return self._assign_unused(stride)

    def _assign_unused(self, stride: int) -> Slab | None:
        """The lowest unused slab that holds at least one slot (only the last slab can be too short for one)."""
        passed = None
        slab = None
        while self._unused and slab is None:
            number = heapq.heappop(self._unused)
            slab = self._make_slab(number, stride)
            if slab is None:
                passed = number
        if passed is not None:
            heapq.heappush(self._unused, passed)
        return slab

    def _make_slab(self, number: int, stride: int) -> Slab | None:
        """A slab out of a number the caller took from the unused ones; None if it holds no slot of that stride."""
        count = self.slab_capacity(number, stride * SLOT_GRANULE)
        if count <= 0:
            return None
        slab = Slab(number, number * self.slab_granules, stride, count)
        self.slabs[number] = slab
        self._open.setdefault(stride, {})[number] = slab
        self._free_slots[stride] = self._free_slots.get(stride, 0) + count
        return slab

    def _release_in(self, number: int, slots: Slots) -> None:
        slab = self.slabs[number]
        places = (slots.astype(np.int64) - slab.first) // slab.stride
        assert not slab.free[places].any(), "slot released twice"
        slab.free[places] = True
        slab.free_count += len(slots)
        self.used_bytes -= len(slots) * slab.stride * SLOT_GRANULE
        if not slab.closed:
            self._free_slots[slab.stride] += len(slots)
            self._open.setdefault(slab.stride, {})[number] = slab
        if slab.free_count == slab.count:
            self._retire(slab)

    def _retire(self, slab: Slab) -> None:
        """An empty slab belongs to no class any more."""
        if not slab.closed:
            self._free_slots[slab.stride] -= slab.count
            del self._open[slab.stride][slab.number]
        del self.slabs[slab.number]
        heapq.heappush(self._unused, slab.number)

    def _slab_end(self, number: int) -> int:
        return min((number + 1) * self.spec.slab_bytes, self.spec.size_bytes)
