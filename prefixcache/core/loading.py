"""Bringing blocks back from disk for a lease, and whether that is worth it.

Rules: the path is pinned before its slots are looked for, and slots being read belong to the load until their read has
ended, whatever became of the blocks. A block is in memory when all its parts came. Only what comes within the worker's
deadline and faster than it would compute is promised; what does not come ends the promise with its reason. Several
leases share one load. Must not know: how bytes move, who else wants memory.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from prefixcache.core.arriving import tell_waiters
from prefixcache.core.commands import Arrived, CancelReads, Command, ReadRecords, Records, SetGenerations
from prefixcache.core.events import AcquireRequested, ArrivalsCancelled, ReadEnd, RecordsRead
from prefixcache.core.ids import KEY_BYTES, NO_SLOT, Rows, Slots
from prefixcache.core.leases import Lease
from prefixcache.core.meter import ReadMeter
from prefixcache.core.namespaces import Namespace
from prefixcache.core.policy.base import UNKNOWN_BIRTH
from prefixcache.core.radix import DETACHED, ROW_DTYPE, Node, Path, Pin
from prefixcache.core.reasons import DiskDrop, Kind, Miss, Refusal
from prefixcache.core.removal import Remover
from prefixcache.core.room import RoomMaker
from prefixcache.core.spec import DiskSpec
from prefixcache.core.state import State
from prefixcache.core.table import NO_SEGMENT

_MARGIN = 1.05  # loading must be faster than computing by so much, as nobody knows the disk's speed exactly
_WAITING, _CAME, _FAILED, _LOST, _PLACED = range(5)


class Load:
    """One ReadRecords under way: rows in the order of their path; `state` of each, `left` parts still to come."""

    __slots__ = (
        "cancelled", "front", "generation", "kept", "left", "lost", "number", "pins", "records", "rows", "slots",
        "space", "state", "waiters",
    )  # fmt: skip

    def __init__(self, number: int, space: Namespace, rows: Rows, slots: dict[int, Slots], generation: int) -> None:
        self.number = number
        self.space = space
        self.rows = rows
        self.slots = slots
        self.generation = generation
        self.pins: list[Pin] = []
        self.waiters: list[Lease] = []
        self.state: NDArray[np.uint8] = np.full(len(rows), _WAITING, np.uint8)
        self.left: NDArray[np.uint8] = np.full(len(rows), len(slots), np.uint8)
        self.front = 0  # rows before it are settled
        self.cancelled = False
        self.kept = False  # it goes on although no lease waits for it
        self.lost = False  # some record was not there, or not whole
        self.records: Records

    def held_slots(self) -> Slots:
        """Slots that are still its own."""
        mine = self.state != _PLACED
        return np.concatenate([slots[mine] for slots in self.slots.values()])

    @property
    def open_records(self) -> int:
        return int(self.left.sum())


class Wish:
    """What of a path is to be promised: `end` blocks, of which `cold` (bool[end - first]) are not in memory now; `stop`
    says why it is not more."""

    __slots__ = ("cold", "end", "eta_s", "loads", "stop")

    def __init__(self, end: int) -> None:
        self.end = end
        self.cold: NDArray[np.bool_] | None = None
        self.stop: Miss | None = None
        self.eta_s = 0.0
        self.loads: list[Load] = []

    def give(self, lease: Lease) -> None:
        """The lease waits for these loads."""
        if self.cold is not None:
            lease.cold = self.cold
            lease.loads = self.loads
            for load in self.loads:
                load.waiters.append(lease)


class Loader:
    """See the module's rules."""

    def __init__(self, state: State, remover: Remover, room: RoomMaker, spec: DiskSpec) -> None:
        self.state = state
        self.remover = remover
        self.room = room
        self.spec = spec
        self.loads: dict[int, Load] = {}
        self.meter = ReadMeter(spec.read_bytes_per_s, spec.read_latency_s)

    # -- the promise -------------------------------------------------------------------------------------------------

    def plan(
        self, event: AcquireRequested, space: Namespace, path: Path, end: int, now: float, out: list[Command]
    ) -> Wish:
        """Decides about the cold blocks of `path` below `end` and begins to load them. The caller walks anew after it,
        pins the answered end at once, and gives the lease to the wish."""
        first = event.from_block
        wish = Wish(end)
        rows = np.frombuffer(path.packed_rows(), ROW_DTYPE)[:end]
        cold = space.table.parts[0].slots[rows] == NO_SLOT
        cold[:first] = False
        if not cold.any():
            return wish
        self._cut_by_time(event, space, (rows, cold), wish)
        if wish.end > first and cold[: wish.end].any():
            self.begin(space, path, (rows[: wish.end], cold[: wish.end]), wish, now, out)
        elif wish.stop is Miss.SLOWER_THAN_RECOMPUTE and self.meter.in_doubt(now):
            self._try_one(space, path, (rows, cold), now, out)
        wish.cold = cold[first : wish.end] if wish.end > first and cold[: wish.end].any() else None
        return wish

    def _try_one(
        self, space: Namespace, path: Path, found: tuple[Rows, NDArray[np.bool_]], now: float, out: list[Command]
    ) -> None:
        """Loads one block that nobody waits for: nothing else would tell that the disk has become faster."""
        rows, cold = found
        end = int(np.argmax(cold)) + 1
        self.begin(space, path, (rows[:end], cold[:end]), Wish(end), now, out)

    def _cut_by_time(
        self, event: AcquireRequested, space: Namespace, found: tuple[Rows, NDArray[np.bool_]], wish: Wish
    ) -> None:
        """Shortens the wish to what comes in time, if that beats computing."""
        rows, cold = found
        hot = int(np.argmax(cold))
        if not self.state.disk.reads_on:
            wish.end, wish.stop = hot, Miss.TIER_OFF
            return
        fresh = cold.copy()
        if space.loading:
            fresh &= self.not_coming(space, rows, cold, wish)
        arrives = self.meter.wait_s() + np.cumsum(fresh) * (space.block_bytes / self.meter.bytes_per_s)
        in_time = arrives[cold] <= event.deadline_s
        if not in_time.all():
            wish.end = int(np.flatnonzero(cold)[int(np.argmin(in_time))])
            wish.stop = Miss.DEADLINE
        computes_s = event.recompute_s_per_token * space.block_tokens
        if computes_s and wish.end > hot:
            # From the first cold block on, everything would be computed instead.
            gains = computes_s * np.arange(1, wish.end - hot + 1) - _MARGIN * arrives[hot : wish.end]
            best = hot + int(np.argmax(gains)) + 1 if gains.max() >= 0 else hot
            if best < wish.end:
                wish.end, wish.stop = best, Miss.SLOWER_THAN_RECOMPUTE
        if wish.end > hot:
            wish.eta_s = float(arrives[wish.end - 1])

    def not_coming(self, space: Namespace, rows: Rows, cold: NDArray[np.bool_], wish: Wish) -> NDArray[np.bool_]:
        """bool[n]: which rows nobody loads yet. What is being called off ends the wish: it ends at any moment, and
        until then nobody else can load it."""
        coming = [space.loading.get(row) for row in rows.tolist()]
        given_up = np.array([load is not None and load.cancelled for load in coming], np.bool_)
        if given_up.any():
            wish.end, wish.stop = int(np.argmax(given_up)), Miss.DEADLINE
            cold[wish.end :] = False
        return np.array([load is None for load in coming], np.bool_)

    def begin(
        self, space: Namespace, path: Path, found: tuple[Rows, NDArray[np.bool_]], wish: Wish, now: float,
        out: list[Command],
    ) -> None:  # fmt: skip
        rows, cold = found
        last = next(node for node in reversed(path.nodes) if node.start < wish.end)
        pins: list[Pin] = []
        self.remover.pin(last, wish.end, pins)
        keys = b"".join([node.edge for node in path.nodes])[: wish.end * KEY_BYTES]
        wish.loads = list({id(load): load for row in rows[cold].tolist() if (load := space.loading.get(row))}.values())
        places = np.flatnonzero(cold)
        if space.loading:
            places = places[[row not in space.loading for row in rows[places].tolist()]]
        granted = self._allocate(space, len(places), out)
        got = len(granted[0]) if granted else 0
        if got < len(places):
            wish.end, wish.stop = int(places[got]), Miss.POOL_FULL
            places = places[:got]
            wish.loads = [load for load in wish.loads if np.isin(load.rows, rows[: wish.end]).any()]
        if got:
            wish.loads.append(self._read(space, (rows, places, keys), granted, pins, now, out))
        else:
            self.remover.unpin_all(pins)

    def _allocate(self, space: Namespace, blocks: int, out: list[Command]) -> dict[int, Slots]:
        """Slots by part for up to so many blocks; empty for none."""
        room = max(self.spec.loading_bytes - self.meter.pending_bytes, 0) // space.block_bytes
        if not min(blocks, room):
            return {}
        return self.room.allocate(space, list(range(len(space.strides))), min(blocks, room), out)

    def _read(
        self, space: Namespace, found: tuple[Rows, NDArray[np.int64], bytes], slots: dict[int, Slots], pins: list[Pin],
        now: float, out: list[Command],
    ) -> Load:  # fmt: skip
        """Begins one load, which takes the pins over."""
        rows, places, keys = found
        state = self.state
        mine = rows[places].astype(np.uint32)
        load = Load(state.disk.next_job(), space, mine, slots, state.next_generation())
        for pin in pins:
            pin.holder = load.pins
        load.pins += pins
        load.records = _records(space, (mine, places, keys), slots)
        self.loads[load.number] = load
        state.disk.granted_bytes += len(mine) * sum(space.strides)
        space.loading.update(dict.fromkeys(mine.tolist(), load))
        for number, count in zip(*np.unique(load.records.segments, return_counts=True), strict=True):
            state.disk.segment(int(number)).reads += int(count)
        self.meter.begin(len(mine) * space.block_bytes, now)
        out.append(SetGenerations(state.host_pool, load.held_slots(), load.generation))
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

    def give_up(self, event: ArrivalsCancelled, out: list[Command]) -> None:
        """A worker waits no more."""
        lease = self.state.leases.get(event.lease)
        if lease is None or lease.session != event.session or not lease.loads:
            return
        self.leave(lease, out)
        lease.stop = Miss.DEADLINE
        ready = lease.ready_end - lease.reply.from_block
        out.append(Arrived(lease.lease, lease.session, ready, (), lease.stop, done=True))

    # -- the bytes ---------------------------------------------------------------------------------------------------

    def done(self, event: RecordsRead, now: float, out: list[Command]) -> None:
        """Some records ended."""
        load = self.loads.get(event.job)
        if load is None:
            self.state.refuse(out, Kind.NOT_FOUND, Refusal.COPY_UNKNOWN, f"no read {event.job} is under way")
            return
        records, space = load.records, load.space
        index = event.index
        sizes = np.array([part.size_bytes for part in space.spec.parts], np.int64)
        self.meter.end(int(sizes[records.parts[index]].sum()), now, fine=bool((event.ends == ReadEnd.OK).any()))
        for number, count in zip(*np.unique(records.segments[index], return_counts=True), strict=True):
            segment = self.state.disk.segments.get(int(number))
            if segment is not None:
                segment.reads -= int(count)
        self._note(load, index, self._judged(load, index, event.ends))
        self._settle(load, out)
        if not load.open_records:
            self._end(load, out)
        tell_waiters(self.state, load, over=load.number not in self.loads, out=out)

    def _judged(self, load: Load, index: NDArray[np.uint32], ends: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """A record that is not where it was read is not lost if it was appended again meanwhile."""
        if (ends != ReadEnd.LOST).all():
            return ends
        judged, records = ends.copy(), load.records
        for place in np.flatnonzero(ends == ReadEnd.LOST).tolist():
            at = index[place]
            segment = int(records.segments[at])
            known = self.state.disk.segments.get(segment)
            column = load.space.table.parts[int(records.parts[at])]
            if known is None or known.frozen or int(column.segments[records.rows[at]]) != segment:
                judged[place] = ReadEnd.FAILED
        return judged

    def _note(self, load: Load, index: NDArray[np.uint32], ends: NDArray[np.uint8]) -> None:
        """Counts parts down, and rows as come, failed or lost."""
        blocks = index // len(load.slots)
        np.subtract.at(load.left, blocks, 1)
        for end, state in ((ReadEnd.FAILED, _FAILED), (ReadEnd.LOST, _LOST)):
            bad = blocks[ends == end]
            load.state[bad[load.state[bad] != _LOST]] = state
        load.lost |= bool((ends == ReadEnd.LOST).any())
        came = (load.left == 0) & (load.state == _WAITING)
        load.state[came] = _CAME

    def _settle(self, load: Load, out: list[Command]) -> None:
        """Places what came, from the front, and forgets what is lost."""
        space = load.space
        while load.front < len(load.rows) and not load.left[load.front]:
            state = load.state[load.front]
            end = load.front + 1
            while end < len(load.rows) and not load.left[end] and load.state[end] == state:
                end += 1
            rows = load.rows[load.front : end]
            for row in rows.tolist():
                space.loading.pop(row, None)
            if state == _CAME:
                self._place(load, slice(load.front, end))
            else:
                pieces = [slots[load.front : end] for slots in load.slots.values()]
                self.remover.release_slots(np.concatenate(pieces))
                load.state[load.front : end] = _PLACED
                if state == _LOST:
                    self._lose(space, rows, out)
            load.front = end

    def _place(self, load: Load, which: slice) -> None:
        """Rows that came are in memory from now on, where their blocks still are."""
        index = load.space.tree.index
        assert index is not None
        at = which.start
        while at < which.stop:
            node = index.node_of(int(load.rows[at]))
            assert node is not None  # pinned
            place = int(np.flatnonzero(node.row_array() == load.rows[at])[0])
            count = min(which.stop - at, node.count - place)
            # A path's rows lie in its nodes in order, but rows that came earlier may lie between.
            same = node.row_array()[place : place + count] == load.rows[at : at + count]
            count = count if same.all() else int(np.argmin(same))
            if node.state == DETACHED:
                pieces = [slots[at : at + count] for slots in load.slots.values()]
                self.remover.release_slots(np.concatenate(pieces))
            else:
                self._warm(load, node, place, slice(at, at + count))
            load.state[at : at + count] = _PLACED
            at += count

    def _warm(self, load: Load, node: Node, place: int, which: slice) -> None:
        space, tree = load.space, load.space.tree
        count = which.stop - which.start
        if place:
            tree.split(node, place)
        if count < node.count:
            node = tree.split(node, count)
        rows = node.row_array()
        for part, slots in load.slots.items():
            space.table.bring(part, rows, slots[which], load.generation)
        space.cold_blocks -= count
        self.state.stats.blocks_loaded += count
        tree.set_cold(node, cold=False)
        if space.policy.remembers:
            space.policy.stored(space, node, UNKNOWN_BIRTH)
        above = node.parent
        if above is not None:
            space.policy.remove_leaf(above)
        self.remover.offer_leaf(self.remover.join_like(space, node))

    def _lose(self, space: Namespace, rows: Rows, out: list[Command]) -> None:
        """Records that will never be read: their blocks leave, and all that follows them."""
        self.state.stats.disk_drops[DiskDrop.LOST] += len(rows)
        index = space.tree.index
        assert index is not None
        for row in rows.tolist():
            node = index.node_of(row)
            if node is not None and node.state != DETACHED:
                self.remover.forget_block(space, node, row, out)

    def _end(self, load: Load, out: list[Command]) -> None:
        assert load.front == len(load.rows)
        del self.loads[load.number]
        self.remover.unpin_all(load.pins)


def _records(space: Namespace, found: tuple[Rows, NDArray[np.int64], bytes], slots: dict[int, Slots]) -> Records:
    """The records of all parts of some rows, block by block."""
    rows, places, keys = found
    count = len(slots)
    columns = [space.table.parts[part] for part in range(count)]
    packed = np.frombuffer(bytes(KEY_BYTES) + keys, np.uint8).reshape(-1, KEY_BYTES)
    at = np.repeat(places, count)
    segments = np.stack([column.segments[rows] for column in columns], axis=1).reshape(-1)
    assert (segments != NO_SEGMENT).all()
    return Records(
        space.number,
        np.tile(np.arange(count, dtype=np.uint16), len(rows)),
        np.repeat(rows, count),
        np.stack([slots[part] for part in range(count)], axis=1).reshape(-1),
        segments,
        np.stack([column.pages[rows] for column in columns], axis=1).reshape(-1),
        packed[at + 1].tobytes(),
        packed[at].tobytes(),
        at.astype(np.uint32),
    )
