"""Bringing blocks back from disk for a lease, and whether that is worth it.

Rules: the path is pinned before its slots are looked for, and slots being read belong to the load until their read has
ended, whatever became of the blocks. A block is in memory when all its parts came. Only what comes within the worker's
deadline and faster than it would compute is promised; what does not come ends the promise with its reason. Several
leases share one load. Must not know: how bytes move, who else wants memory.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from prefixcache.core.commands import Arrived, CancelReads, Command, ReadRecords, Records, Run, SetGenerations
from prefixcache.core.events import AcquireRequested, ArrivalsCancelled, ReadEnd, RecordsRead
from prefixcache.core.foreign_leases import read_run
from prefixcache.core.ids import KEY_BYTES, NO_SLOT, Rows, Slots
from prefixcache.core.leases import Lease
from prefixcache.core.meter import ReadMeter
from prefixcache.core.namespaces import Namespace
from prefixcache.core.radix import DETACHED, ROW_DTYPE, Node, Path, Pin, path_to
from prefixcache.core.reasons import DiskDrop, Kind, Miss, Refusal
from prefixcache.core.removal import Remover
from prefixcache.core.room import RoomMaker
from prefixcache.core.spec import DiskSpec
from prefixcache.core.state import State
from prefixcache.core.table import NO_SEGMENT

_WAITING, _CAME, _FAILED, _LOST, _PLACED = range(5)


class Load:
    """One ReadRecords under way: rows in the order of their path; `state` of each, `left` parts still to come."""

    __slots__ = (
        "cancelled", "front", "generation", "left", "number", "pins", "records", "rows", "slots", "space", "state",
        "waiters",
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
        pins the answered end at once, and hands the lease to `wait`."""
        first = event.from_block
        wish = Wish(end)
        rows = np.frombuffer(path.packed_rows(), ROW_DTYPE)[:end]
        cold = space.table.parts[0].slots[rows] == NO_SLOT
        cold[:first] = False
        if not cold.any():
            return wish
        self._cut_by_time(event, space, (rows, cold), now, wish)
        if wish.end > first and cold[: wish.end].any():
            self._begin(space, path, (rows[: wish.end], cold[: wish.end]), wish, now, out)
        wish.cold = cold[first : wish.end] if wish.end > first and cold[: wish.end].any() else None
        return wish

    def _cut_by_time(
        self, event: AcquireRequested, space: Namespace, found: tuple[Rows, NDArray[np.bool_]], now: float, wish: Wish
    ) -> None:
        """Shortens the wish to what comes in time, if that beats computing."""
        rows, cold = found
        hot = int(np.argmax(cold))
        if not self.state.disk.reads_on:
            wish.end, wish.stop = hot, Miss.TIER_OFF
            return
        block_bytes = sum(part.size_bytes for part in space.spec.parts)
        fresh = cold.copy()
        if space.loading:
            coming = [space.loading.get(row) for row in rows.tolist()]
            fresh &= np.array([load is None for load in coming], np.bool_)
            given_up = np.array([load is not None and load.cancelled for load in coming], np.bool_)
            if given_up.any():  # they end at any moment; until then nobody else can load them
                wish.end, wish.stop = int(np.argmax(given_up)), Miss.DEADLINE
                cold[wish.end :] = False
        wait_s = self.meter.wait_s(now)
        arrives = wait_s + np.cumsum(fresh) * (block_bytes / self.meter.bytes_per_s)
        in_time = arrives[cold] <= event.deadline_s
        if not in_time.all():
            wish.end = int(np.flatnonzero(cold)[int(np.argmin(in_time))])
            wish.stop = Miss.DEADLINE
        computes_s = event.recompute_s_per_token * space.block_tokens
        if computes_s and wish.end > hot:
            # From the first cold block on, everything would be computed instead. In the long run loading gains or
            # loses with every block, so it is all or nothing.
            gains = computes_s * np.arange(1, wish.end - hot + 1) - arrives[hot : wish.end]
            if gains.max() < 0:
                wish.end, wish.stop = hot, Miss.SLOWER_THAN_RECOMPUTE
            else:
                best = hot + int(np.argmax(gains)) + 1
                if best < wish.end:
                    wish.end, wish.stop = best, Miss.SLOWER_THAN_RECOMPUTE
        if wish.end > hot:
            wish.eta_s = float(arrives[wish.end - 1])

    def _begin(
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
        block_bytes = sum(space.spec.parts[part].size_bytes for part in range(len(space.strides)))
        room = max(self.spec.loading_bytes - self.meter.pending_bytes, 0) // block_bytes
        granted: dict[int, Slots] = {}
        if len(places) and room:
            granted = self.room.allocate(space, list(range(len(space.strides))), min(len(places), room), out)
        got = len(granted[0]) if granted else 0
        if got < len(places):
            wish.end, wish.stop = int(places[got]), Miss.POOL_FULL
            places = places[:got]
            wish.loads = [load for load in wish.loads if np.isin(load.rows, rows[: wish.end]).any()]
        if got:
            wish.loads.append(self._read(space, (rows, places, keys), granted, pins, now, out))
        else:
            self.remover.unpin_all(pins)

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
        self.meter.begin(len(mine) * sum(part.size_bytes for part in space.spec.parts), now)
        out.append(SetGenerations(state.host_pool, load.held_slots(), load.generation))
        out.append(ReadRecords(load.number, state.host_pool, load.records))
        return load

    def wait(self, lease: Lease, wish: Wish) -> None:
        """The lease waits for these loads."""
        for load in wish.loads:
            load.waiters.append(lease)
        lease.loads = list(wish.loads)

    def leave(self, lease: Lease, out: list[Command]) -> None:
        """A lease ended; loads that nobody waits for any more are called off."""
        for load in lease.loads:
            if lease in load.waiters:
                load.waiters.remove(lease)
            if not load.waiters and load.number in self.loads:
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
        self._tell(load, out)

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

    def _tell(self, load: Load, out: list[Command]) -> None:
        """Tells leases what came for them, and those for whom nothing more will come that it ends there."""
        for lease in list(load.waiters):
            self._tell_one(load, lease, out)
        if load.number not in self.loads:
            load.waiters.clear()

    def _tell_one(self, load: Load, lease: Lease, out: list[Command]) -> None:
        space, reply = lease.space, lease.reply
        pin = lease.pins[0]
        path = path_to(pin.node, pin.depth)
        first, end = reply.from_block, reply.from_block + reply.planned_blocks
        ready, next_row = lease.ready_end, -1
        if path.nodes and not path.nodes[0].start:
            rows = np.frombuffer(path.packed_rows(), ROW_DTYPE)[:end]
            cold = np.flatnonzero(space.table.parts[0].slots[rows[lease.ready_end :]] == NO_SLOT)
            ready = lease.ready_end + int(cold[0]) if len(cold) else end
            next_row = int(rows[ready]) if ready < end else -1
        coming = space.loading.get(next_row) if next_row >= 0 else None
        if coming is not None and lease not in coming.waiters:
            coming.waiters.append(lease)  # somebody else has begun to load it meanwhile
            lease.loads.append(coming)
        done = coming is None
        runs: tuple[Run, ...] = ()
        if ready > lease.ready_end:
            wanted = path.stretches(lease.ready_end, ready)
            parts = range(len(space.strides))
            runs = tuple([read_run(space, part, wanted, lease.ready_end, self.state.host_pool) for part in parts])
            lease.runs += runs
            lease.ready_end = ready
        if len(runs) or done:
            stop = self._why(load) if done and ready < end else None
            lease.stop = stop
            out.append(Arrived(lease.lease, lease.session, ready - first, runs, stop, done))
        if done:
            for other in lease.loads:
                if lease in other.waiters:
                    other.waiters.remove(lease)
            lease.loads = []

    def _why(self, load: Load) -> Miss:
        return Miss.CHECKSUM if self.state.disk.reads_on else Miss.TIER_OFF


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
