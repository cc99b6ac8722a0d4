"""Whether blocks that are on disk only are worth bringing back for a lease, and the order to do it.

Rules: the path is pinned before its slots are looked for. Only what a prefix of the promised length needs is read (of a
sliding group the last window), and only what comes within the worker's deadline and faster than it would compute is
promised; what is not, has its reason. Several leases share one load. Must not know: how bytes move, what becomes of
them (landing does), who else wants memory.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from prefixcache.core.commands import Arrived, CancelReads, Command, ReadRecords, SetGenerations
from prefixcache.core.events import AcquireRequested, ArrivalsCancelled
from prefixcache.core.ids import NO_SLOT, Slots
from prefixcache.core.leases import Lease
from prefixcache.core.loads import Found, Load, Mask, Wish, found_in_path
from prefixcache.core.meter import ReadMeter
from prefixcache.core.namespaces import Namespace
from prefixcache.core.policy.tiered import TieredLeaves
from prefixcache.core.radix import ROW_DTYPE, Path, Pin, node_at
from prefixcache.core.reasons import Miss
from prefixcache.core.removal import Remover
from prefixcache.core.room import RoomMaker
from prefixcache.core.spec import DiskSpec
from prefixcache.core.state import State
from prefixcache.core.survey import Counts, Survey

MARGIN = 1.05  # loading must be faster than computing by so much, as nobody knows the disk's speed exactly


class _Plan:
    """What may be promised of one path. fresh: per part bool[n], what nobody loads yet; possible: by length."""

    __slots__ = ("base", "fresh", "keys", "path", "possible", "survey")

    def __init__(self, path: Path, survey: Survey, loading: dict[tuple[int, int], Load]) -> None:
        self.path = path
        self.keys = b"".join([node.edge for node in path.nodes])  # before making room splits nodes
        self.survey = survey
        self.base = survey.longest(survey.in_memory)
        lengths = np.arange(survey.first + 1, survey.end + 1)
        self.possible: Mask = survey.stored & (lengths > self.base)
        self.fresh = survey.lacking
        if loading:
            self._see_what_comes(loading)

    def _see_what_comes(self, loading: dict[tuple[int, int], Load]) -> None:
        """What somebody loads need not be read again; what is being called off ends at any moment, and until then
        nobody else can load it, so no prefix that needs it is possible."""
        rows = self.survey.rows.tolist()
        self.fresh = []
        for part, lacking in enumerate(self.survey.lacking):
            fresh = lacking.copy()
            called_off = np.zeros(len(rows), np.bool_)
            for place in np.flatnonzero(lacking).tolist():
                load = loading.get((rows[place], part))
                if load is not None:
                    fresh[place] = False
                    called_off[place] = load.cancelled
            if called_off.any():
                self.possible &= self.survey.needed(part, called_off) == 0
            self.fresh.append(fresh)

    def allow(self, wish: Wish, mask: Mask, why: Miss) -> None:
        """Of the lengths only these."""
        self.possible &= mask
        wish.cut(max(self.survey.longest(self.possible), self.base), why)

    def wanted(self, end: int) -> dict[int, Mask]:
        """Per part bool[n]: what is to be read for a prefix of `end` blocks."""
        wanted = {}
        for part, fresh in enumerate(self.fresh):
            mask = np.zeros(len(fresh), np.bool_)
            needed = self.survey.range_of(part, end)
            mask[needed] = fresh[needed]
            wanted[part] = mask
        return wanted

    def awaited(self, end: int, loading: dict[tuple[int, int], Load]) -> list[Load]:
        """Loads of others that a prefix of `end` blocks waits for."""
        found: dict[int, Load] = {}
        for part, lacking in enumerate(self.survey.lacking if loading else ()):
            needed = self.survey.range_of(part, end)
            for row in self.survey.rows[needed][lacking[needed]].tolist():
                load = loading.get((row, part))
                if load is not None:
                    found[load.number] = load
        return list(found.values())


class Loader:
    """See the module's rules."""

    def __init__(self, state: State, remover: Remover, room: RoomMaker, spec: DiskSpec) -> None:
        self.state = state
        self.remover = remover
        self.room = room
        self.spec = spec
        self.loads: dict[int, Load] = {}
        self.meter = ReadMeter(spec.read_bytes_per_s, spec.read_latency_s)

    def load_s(self, size_bytes: int) -> float:
        """How long it would take now to bring so many bytes to memory."""
        return self.meter.wait_s() + size_bytes / self.meter.bytes_per_s

    def plan(
        self, event: AcquireRequested, space: Namespace, path: Path, limit: int, now: float, out: list[Command]
    ) -> Wish:
        """Decides how much of the first `limit` blocks of `path` is promised, and begins to load what of it is not in
        memory. The caller walks anew after it, pins the answered end at once, and gives the lease to the wish."""
        rows = np.frombuffer(path.packed_rows(), ROW_DTYPE)[:limit]
        survey = Survey(space, rows, event.from_block)
        wish = Wish(survey.longest(survey.stored))
        if survey.longest(survey.in_memory) == wish.end:
            return wish
        plan = _Plan(path, survey, space.loading)
        self._choose(event, space, plan, wish)
        if wish.end > plan.base:
            self._begin(plan, wish, now, out)
        elif wish.stop is Miss.SLOWER_THAN_RECOMPUTE and self.meter.in_doubt(now):
            self._try_one(plan, now, out)
        if wish.end > plan.base:
            wish.cold = survey.lacks(wish.end)
        return wish

    def fetch(self, space: Namespace, path: Path, most_bytes: int, now: float, out: list[Command]) -> Wish:
        """Begins to load what is not in memory of a path, for nobody in particular, as far as `most_bytes` under way
        allow. Such loads go on although no lease waits for them."""
        survey = Survey(space, np.frombuffer(path.packed_rows(), ROW_DTYPE), 0)
        wish = Wish(survey.longest(survey.stored))
        plan = _Plan(path, survey, space.loading)
        if not self.state.disk.reads_on:
            wish.cut(plan.base, Miss.TIER_OFF)
        plan.allow(wish, plan.possible, Miss.DEADLINE)
        plan.allow(wish, self._size(plan) <= most_bytes - self.meter.pending_bytes, Miss.BEYOND_LIMIT)
        if wish.end > plan.base:
            self._begin(plan, wish, now, out)
        if wish.end > plan.base:
            wish.cold = survey.lacks(wish.end)
        for load in wish.loads:
            load.kept = True
        return wish

    @staticmethod
    def _size(plan: _Plan) -> Counts:
        """By length: bytes that have to be read for it."""
        size = np.zeros(len(plan.survey.rows), np.int64)
        for part, fresh in enumerate(plan.fresh):
            if fresh.any():
                size += plan.survey.needed(part, fresh) * plan.survey.space.spec.parts[part].size_bytes
        return size

    def _choose(self, event: AcquireRequested, space: Namespace, plan: _Plan, wish: Wish) -> None:
        """Shortens the wish to what comes in time, if that beats computing."""
        survey, base = plan.survey, plan.base
        computes_s = event.recompute_s_per_token * space.block_tokens
        self.weigh(space, computes_s)
        if not self.state.disk.reads_on:
            wish.cut(base, Miss.TIER_OFF)
            return
        size = self._size(plan)
        arrives = self.meter.wait_s() + size / self.meter.bytes_per_s
        plan.allow(wish, plan.possible, Miss.DEADLINE)
        plan.allow(wish, size <= self.spec.loading_bytes - self.meter.pending_bytes, Miss.POOL_FULL)
        plan.allow(wish, arrives <= event.deadline_s, Miss.DEADLINE)
        if computes_s and wish.end > base:
            # Everything behind what is in memory would be computed instead.
            lengths = np.arange(survey.first + 1, survey.end + 1)
            gains = np.where(plan.possible, computes_s * (lengths - base) - MARGIN * arrives, -1.0)
            best = survey.first + int(np.argmax(gains)) + 1 if gains.max() >= 0 else base
            wish.cut(best, Miss.SLOWER_THAN_RECOMPUTE)
        if wish.end > base:
            wish.eta_s = float(arrives[wish.end - survey.first - 1])

    def weigh(self, space: Namespace, computes_s: float) -> None:
        """Whether what is on disk is so quickly back that it should leave memory first: faster than this worker
        computes a block."""
        if isinstance(space.policy, TieredLeaves):
            loads_s = MARGIN * space.block_bytes / self.meter.bytes_per_s
            space.policy.clean_first = self.state.disk.reads_on and (not computes_s or loads_s <= computes_s)

    def _try_one(self, plan: _Plan, now: float, out: list[Command]) -> None:
        """Loads one block that nobody waits for: nothing else would tell that the disk has become faster."""
        survey = plan.survey
        place = int(np.argmax(survey.lacks(survey.longest(survey.stored))))
        wanted = {part: np.zeros(len(survey.rows), np.bool_) for part in range(len(plan.fresh))}
        columns = survey.space.table.parts
        for part, mask in wanted.items():
            mask[place] = plan.fresh[part][place] and columns[part].segments[survey.rows[place]] != 0
        pins = self._pin(plan, survey.first + place + 1)
        slots = self._allocate(survey.space, wanted, out)
        if all(len(slots[part]) == np.count_nonzero(mask) for part, mask in wanted.items()):
            self._read(plan, wanted, slots, pins, now, out)
        else:
            self.remover.release_slots(np.concatenate(list(slots.values())))
            self.remover.unpin_all(pins)

    def _pin(self, plan: _Plan, end: int) -> list[Pin]:
        pins: list[Pin] = []
        self.remover.pin(node_at(plan.path, end), end, pins)
        return pins

    def _begin(self, plan: _Plan, wish: Wish, now: float, out: list[Command]) -> None:
        space = plan.survey.space
        pins = self._pin(plan, wish.end)
        wanted = plan.wanted(wish.end)
        slots = self._allocate(space, wanted, out)
        if any(len(slots[part]) < np.count_nonzero(mask) for part, mask in wanted.items()):
            self._make_do(plan, wish, slots)
            wanted = plan.wanted(wish.end) if wish.end > plan.base else {}
            for part, granted in slots.items():
                used = int(np.count_nonzero(wanted[part])) if wanted else 0
                self.remover.release_slots(granted[used:])
                slots[part] = granted[:used]
        wish.loads = plan.awaited(wish.end, space.loading) if wish.end > plan.base else []
        if any(len(granted) for granted in slots.values()):
            wish.loads.append(self._read(plan, wanted, slots, pins, now, out))
        else:
            self.remover.unpin_all(pins)

    def _make_do(self, plan: _Plan, wish: Wish, slots: dict[int, Slots]) -> None:
        """There are too few slots: the longest prefix that needs no more."""
        fits = np.ones(len(plan.survey.rows), np.bool_)
        for part, granted in slots.items():
            fits &= plan.survey.needed(part, plan.fresh[part]) <= len(granted)
        lengths = np.arange(plan.survey.first + 1, plan.survey.end + 1)
        plan.allow(wish, fits & (lengths <= wish.end), Miss.POOL_FULL)

    def _allocate(self, space: Namespace, wanted: dict[int, Mask], out: list[Command]) -> dict[int, Slots]:
        """Slots by part for what is wanted of it, or fewer."""
        counts: dict[int, list[int]] = {}
        for part, mask in wanted.items():
            counts.setdefault(int(np.count_nonzero(mask)), []).append(part)
        slots: dict[int, Slots] = {}
        for count, parts in counts.items():
            none = {part: np.empty(0, np.uint32) for part in parts}
            slots.update(self.room.allocate(space, parts, count, out) if count else none)
        return slots

    def _read(
        self, plan: _Plan, wanted: dict[int, Mask], slots: dict[int, Slots], pins: list[Pin], now: float,
        out: list[Command],
    ) -> Load:  # fmt: skip
        """Begins one load, which takes the pins over."""
        survey, space = plan.survey, plan.survey.space
        places = np.flatnonzero(np.logical_or.reduce(list(wanted.values())))
        rows = survey.rows[places].astype(np.uint32)
        spread: dict[int, Slots] = {}
        for part, granted in slots.items():
            if len(granted):
                spread[part] = np.full(len(rows), NO_SLOT, np.uint32)
                spread[part][wanted[part][places]] = granted
        return self.start(space, found_in_path(rows, survey.first + places, plan.keys), spread, pins, now, out)

    def start(
        self, space: Namespace, found: Found, slots: dict[int, Slots], pins: list[Pin], now: float, out: list[Command]
    ) -> Load:
        """Begins a load, which takes the pins over. slots: per part u32[rows], NO_SLOT where it is not read."""
        state = self.state
        load = Load(state.disk.next_job(), space, found, slots, state.next_generation())
        for pin in pins:
            pin.holder = load.pins
        load.pins += pins
        self.loads[load.number] = load
        held = load.held_slots()
        state.disk.granted_bytes += sum(
            int(np.count_nonzero(mine != NO_SLOT)) * space.strides[part] for part, mine in slots.items()
        )
        space.loading.update(dict.fromkeys(load.names(slice(None)), load))
        for number, count in Counter(load.records.segments.tolist()).items():
            state.disk.segment(number).reads += count
        self.meter.begin(load.size_bytes, now)
        out.append(SetGenerations(state.host_pool, held, load.generation))
        out.append(ReadRecords(load.number, state.host_pool, load.records))
        return load

    def leave(self, lease: Lease, out: list[Command]) -> None:
        """A lease ended; loads that nobody waits for any more are called off."""
        for load in lease.loads:
            if lease in load.waiters:
                load.waiters.remove(lease)
            if not load.waiters and not load.kept and load.number in self.loads:
                load.cancelled = True
                out.append(CancelReads(load.number))
        lease.loads = []

    def turn_off(self, out: list[Command]) -> None:
        """The disk cannot be read: nobody waits for it any more, although a read that hangs may not have ended."""
        waiting = {lease.serial: lease for load in self.loads.values() for lease in load.waiters}
        for lease in waiting.values():
            self._stop_waiting(lease, Miss.TIER_OFF, out)

    def give_up(self, event: ArrivalsCancelled, out: list[Command]) -> None:
        """A worker waits no more."""
        lease = self.state.leases.get(event.lease)
        if lease is not None and lease.session == event.session and lease.loads:
            self._stop_waiting(lease, Miss.DEADLINE, out)

    def _stop_waiting(self, lease: Lease, why: Miss, out: list[Command]) -> None:
        self.leave(lease, out)
        lease.stop = why
        ready = lease.ready_end - lease.reply.from_block
        out.append(Arrived(lease.lease, lease.session, ready, (), lease.stop, done=True))
