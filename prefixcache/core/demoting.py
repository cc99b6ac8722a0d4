"""Writing blocks to disk: ahead of need, early in idle time, and when asked to.

Rules: before memory is short a reserve of it is free or on disk as well; a grant never waits for that. A leaf is never
written before what stands in front of it, so that every record can be restored. What is being written is pinned, so its
slots keep their bytes; it cannot be evicted meanwhile, which is why what is under way has a bound. Must not know: where
records go, what is wanted of a segment.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from prefixcache.core.commands import Command, Records, WriteRecords
from prefixcache.core.events import RecordsWritten, WriteEnd
from prefixcache.core.ids import KEY_BYTES, NO_SLOT, Rows
from prefixcache.core.meter import FillMeter
from prefixcache.core.namespaces import Namespace
from prefixcache.core.policy.tiered import TieredLeaves
from prefixcache.core.radix import DETACHED, ROW_DTYPE, VISIBLE, Node, Pin, path_to
from prefixcache.core.reasons import DiskDrop, Kind, Refusal
from prefixcache.core.removal import Remover
from prefixcache.core.spec import DiskSpec
from prefixcache.core.state import State
from prefixcache.core.table import DIGEST_BYTES, DIGEST_KNOWN, NO_SEGMENT, PartColumn

NO_PARENT = bytes(KEY_BYTES)
_OK, _CORRUPT, _FAILED = int(WriteEnd.OK), int(WriteEnd.CORRUPT), int(WriteEnd.FAILED)
"""As numbers: numpy asks a member of an enum for a dozen names before it compares."""
_HIT_OFTEN = 0b11  # two hits: a block is written early
_MOST_CANDIDATES = 1024
_DAY_S = 86_400.0
_MOST_RESERVES = 8  # written ahead of need for one reason; with 2 a full disk hits 1% fewer tokens


class WriteJob:
    """One WriteRecords under way. `serial`: as of a lease (slots that move away meanwhile are kept for it)."""

    __slots__ = ("left", "pins", "records", "serial", "size_bytes", "space")

    def __init__(self, space: Namespace, records: Records, size_bytes: int, serial: int) -> None:
        self.space = space
        self.records = records
        self.size_bytes = size_bytes
        self.serial = serial
        self.pins: list[Pin] = []
        self.left = len(records.rows)


class Demoter:
    """See the module's rules."""

    def __init__(self, state: State, remover: Remover, spec: DiskSpec) -> None:
        self.state = state
        self.remover = remover
        self.spec = spec
        self.jobs: dict[int, WriteJob] = {}
        self.writing_bytes = 0
        self.flushing = False
        self.flush_due = False  # more of a flush may be begun
        # What a flush may still begin, all of memory once: where the disk holds less, each write makes room by losing
        # what was written before. And what of it may fail, or it would be tried for ever.
        self._flush_left_bytes = 0
        self._flush_may_fail_bytes = 0
        self._fill = FillMeter()
        # What may still be written ahead of need, by policy, until something takes memory again: where the disk holds
        # less than the reserve, each write would make room by losing what the reserve counts, and so on for ever.
        self._left_bytes: dict[tuple[int, ...], int] = {}
        self._left_since = 0
        self._candidates: deque[tuple[Node, int]] = deque(maxlen=_MOST_CANDIDATES)
        self._early_left = float(spec.early_bytes_per_day)
        self._early_at = 0.0

    @property
    def most_bytes(self) -> int:
        """May be under way at once: a quarter of memory at most, as it cannot be evicted meanwhile."""
        return min(self.spec.writing_bytes, self.state.host.ready_bytes // 4)

    def refill(self, now: float, out: list[Command]) -> bool:
        """Begins to write the least valuable path while the reserve is not free, clean or on its way: a share of
        memory, but what is filled in a second at least. False: nothing is missing, or nothing can be done."""
        granted = self.state.disk.granted_bytes
        per_s = self._fill.per_s(granted, now)
        if not self.state.disk.writes_on:
            return False
        if granted != self._left_since:
            self.note_new_reason()
        tiered = ((key, each) for key, each in self.state.policies.items() if isinstance(each, TieredLeaves))
        return any(self._refill(signature, policy, per_s, out) for signature, policy in tiered)

    def note_new_reason(self) -> None:
        """The whole reserve may be written: memory was taken, or the disk works again."""
        self._left_since = self.state.disk.granted_bytes
        self._left_bytes.clear()

    def note_used(self, node: Node, depth: int) -> None:
        """A lease over this path ended; blocks that are hit again and again are candidates for an early write."""
        space = node.space
        if space is not None and space.on_disk and node.state == VISIBLE and not node.cold:
            at = min(depth, node.end) - node.start
            row = int.from_bytes(node.rows[4 * at - 4 : 4 * at], "little")
            if space.table.hits[row] >= _HIT_OFTEN and not space.table.is_clean(np.array([row]))[0]:
                self._candidates.append((node, depth))

    def note_wanted(self, node: Node, depth: int) -> None:
        """This path is pinned: it is the next to be written early."""
        self._candidates.appendleft((node, depth))

    def write_early(self, now: float, out: list[Command]) -> None:
        """In idle time, within the day's budget: candidates."""
        per_s = self.spec.early_bytes_per_day / _DAY_S
        self._early_left = min(self._early_left + (now - self._early_at) * per_s, self.spec.early_bytes_per_day)
        self._early_at = now
        if not self.state.disk.writes_on:
            return
        while self._candidates and not self.jobs:
            node, depth = self._candidates[0]
            if node.space is not None and self._early_left < node.space.block_bytes:
                return
            self._candidates.popleft()
            if _is_there(node) and node.state == VISIBLE and not node.cold and node.start < depth <= node.end:
                assert node.space is not None
                before = self.writing_bytes
                self._write_path(node.space, node, depth, out)
                self._early_left -= self.writing_bytes - before

    @property
    def is_flushing(self) -> bool:
        """Whether something is being written, or will be once the disk has started."""
        return bool(self.jobs) or (self.flushing and (self.flush_due or self.state.disk.is_starting))

    def flush(self) -> None:
        """From now on `flush_more` writes all that only memory holds; while the disk starts, as soon as it has."""
        self.flushing = True
        self._flush_left_bytes = self.state.host.ready_bytes
        self.note_working()

    def note_working(self) -> None:
        """Whether the disk takes writes may have changed: a flush waits for that."""
        self.flush_due = self.flushing and self.state.disk.writes_on
        self._flush_may_fail_bytes = self.most_bytes

    def done(self, event: RecordsWritten, out: list[Command]) -> None:
        """Some records ended."""
        job = self.jobs.get(event.job)
        if job is None:
            text = f"no write {event.job} is under way"
            self.state.refuse(out, Kind.NOT_FOUND, Refusal.COPY_UNKNOWN, text)
            return
        disk, records, space = self.state.disk, job.records, job.space
        disk.room_bytes = event.room_bytes
        rows, parts = records.rows[event.index], records.parts[event.index]
        space.writing.difference_update(zip(rows.tolist(), parts.tolist(), strict=True))
        fine = event.ends == _OK
        all_fine = bool(fine.all())
        if all_fine and len(space.strides) == 1:  # the usual end by far, and calls wait for it
            disk.place(space, 0, rows, event.segments, event.pages)
            self.state.stats.blocks_demoted += len(rows)
        else:
            self._place_some(space, event, rows, parts)
        self.remover.reorder(space, rows if all_fine else rows[fine])
        job.left -= len(event.index)
        if not job.left:
            self._end(event.job, job)
        if not all_fine:
            self._flush_may_fail_bytes -= job.size_bytes * int(np.count_nonzero(~fine)) // len(records.rows)
        self.flush_due = self.flushing and disk.writes_on and (all_fine or self.flush_due)

    def _place_some(self, space: Namespace, event: RecordsWritten, rows: Rows, parts: NDArray[np.uint16]) -> None:
        """Records of several parts, or some that did not get to the disk: those may be tried again."""
        fine = event.ends == _OK
        for part in range(len(space.strides)):
            mine = fine & (parts == part)
            if mine.any():
                self.state.disk.place(space, part, rows[mine], event.segments[mine], event.pages[mine])
        corrupt = event.ends == _CORRUPT
        if corrupt.any():
            self._forget_corrupt(space, rows[corrupt])
        failed = int(np.count_nonzero((event.ends == _FAILED) | corrupt))
        self.state.stats.disk_drops[DiskDrop.WRITE_FAILED] += failed
        self.state.stats.disk_drops[DiskDrop.NO_ROOM] += len(fine) - failed - int(np.count_nonzero(fine))
        self.state.stats.blocks_demoted += int(np.count_nonzero(fine & (parts == 0)))
        if not fine.all():
            self._left_bytes.clear()

    def _forget_corrupt(self, space: Namespace, rows: Rows) -> None:
        """Bytes changed in memory since they were committed: their blocks leave, and what follows them."""
        index = space.tree.index
        assert index is not None
        for row in rows.tolist():
            node = index.node_of(row)
            if node is not None and node.state != DETACHED:
                self.state.stats.parts_failed_verification += 1
                self.state.stats.blocks_cleared += self.remover.forget_block(space, node, row)

    def _end(self, number: int, job: WriteJob) -> None:
        del self.jobs[number]
        del self.state.disk.writing[number]
        self.writing_bytes -= job.size_bytes
        self.remover.unpin_all(job.pins)
        self.remover.mover.settle_retired()

    def _refill(self, signature: tuple[int, ...], policy: TieredLeaves, per_s: int, out: list[Command]) -> bool:
        host = self.state.host
        block_bytes = sum(signature)
        free = min(host.free_slots(stride) // signature.count(stride) for stride in set(signature))
        reserve_bytes = max(int(host.spec.size_bytes * self.spec.reserve_share), min(per_s, self.most_bytes))
        target = max(1, -(-reserve_bytes // block_bytes))
        missing = target - free - policy.clean_blocks - self.writing_bytes // block_bytes
        left = self._left_bytes.setdefault(signature, max(_MOST_RESERVES * reserve_bytes, block_bytes))
        if missing <= 0 or self.writing_bytes >= self.most_bytes or left <= 0:
            return False
        node = policy.dirty.victim()
        if node is None or node.space is None:
            return False
        written = self._write_path(node.space, node, node.end, out)
        self._left_bytes[signature] = left - written * block_bytes
        return written > 0

    def flush_more(self, out: list[Command]) -> bool:
        """Begins one more write of a flush; False if that is all for now."""
        if not self.flush_due:
            return False
        if self.writing_bytes < self.most_bytes and min(self._flush_left_bytes, self._flush_may_fail_bytes) > 0:
            victims = [
                policy.dirty.victim() for policy in self.state.policies.values() if isinstance(policy, TieredLeaves)
            ]
            node = next((victim for victim in victims if victim is not None), None)
            before = self.writing_bytes
            if node is not None and node.space is not None and self._write_path(node.space, node, node.end, out):
                self._flush_left_bytes -= self.writing_bytes - before
                return True
            self.flushing = bool(self.jobs)
        self.flush_due = False
        return False

    def _write_path(self, space: Namespace, node: Node, depth: int, out: list[Command]) -> int:
        """Begins to write what is not on disk of a path, front to back, as much as one job takes. Answers blocks."""
        path = path_to(node, depth)
        if not space.on_disk or not path.nodes or path.nodes[0].start or node.state == DETACHED:
            return 0
        rows = np.frombuffer(path.packed_rows(), ROW_DTYPE)
        wanted = self._wanted(space, rows)
        room = min(self.spec.job_bytes, max(self.most_bytes - self.writing_bytes, 0))
        places = np.flatnonzero(wanted)[: max(1, room // sum(space.strides))]
        if not len(places):
            return 0
        keys = b"".join([each.edge for each in path.nodes])
        records = self._records(space, rows, places, keys)
        size = sum(space.spec.parts[part].size_bytes for part in records.parts.tolist())
        job = WriteJob(space, records, size, self.state.next_serial())
        number = self.state.disk.next_job()
        self.jobs[number] = job
        self.state.disk.writing[number] = job.serial
        self.writing_bytes += size
        end = int(places[-1]) + 1
        last = next(each for each in reversed(path.nodes) if each.start < end)
        self.remover.pin(last, end, job.pins)
        if end == last.end:
            space.policy.remove_leaf(last)
        space.writing.update(zip(records.rows.tolist(), records.parts.tolist(), strict=True))
        out.append(WriteRecords(number, self.state.host_pool, records, _digests(space, records)))
        return len(places)

    def _wanted(self, space: Namespace, rows: Rows) -> NDArray[np.bool_]:
        """bool[n]: which blocks of a path are in memory only, and not on their way; nothing behind bytes that nobody
        has verified yet."""
        table = space.table
        wanted: NDArray[np.bool_] = ~table.is_clean(rows)
        if space.writing:
            under_way = {row for row, _ in space.writing}
            wanted &= np.array([row not in under_way for row in rows.tolist()], np.bool_)
        trusted = table.is_trusted(rows)
        if not trusted.all():
            wanted[int(np.argmin(trusted)) :] = False
        return wanted

    def _records(self, space: Namespace, rows: Rows, places: NDArray[np.int64], keys: bytes) -> Records:
        """What lacks a record of the blocks at `places` of a path, block by block, part by part."""
        table = space.table
        if len(table.parts) == 1:  # most namespaces, and calls wait for this
            at = places[_lacks_record(table.parts[0], rows[places])]
            parts = np.zeros(len(at), np.uint16)
            mine = rows[at].astype(np.uint32)
            slots = table.parts[0].slots[mine]
        else:
            lacking = [places[_lacks_record(part, rows[places])] for part in table.parts]
            at = np.concatenate(lacking)
            parts = np.repeat(np.arange(len(lacking), dtype=np.uint16), [len(each) for each in lacking])
            order = np.lexsort((parts, at))
            at, parts = at[order], parts[order]
            mine = rows[at].astype(np.uint32)
            slots = np.empty(len(at), np.uint32)
            for part, column in enumerate(table.parts):
                slots[parts == part] = column.slots[mine[parts == part]]
        packed = np.frombuffer(NO_PARENT + keys, np.uint8).reshape(-1, KEY_BYTES)
        nowhere = np.zeros(len(at), np.uint32)
        return Records(
            space.number, parts, mine, slots, nowhere, nowhere,
            packed[at + 1].tobytes(), packed[at].tobytes(), at.astype(np.uint32),
        )  # fmt: skip


def _digests(space: Namespace, records: Records) -> NDArray[np.uint8]:
    """u8[n, 16]: what is known of the bytes of these records; zeros where nothing is."""
    digests = np.zeros((len(records.rows), DIGEST_BYTES), np.uint8)
    for part, column in enumerate(space.table.parts):
        mine = np.flatnonzero(records.parts == part)
        rows = records.rows[mine]
        known = column.flags[rows] & DIGEST_KNOWN != 0
        if known.all():
            digests[mine] = column.digests[rows]
        else:
            digests[mine[known]] = column.digests[rows[known]]
    return digests


def _lacks_record(column: PartColumn, rows: Rows) -> NDArray[np.bool_]:
    """bool[n]: which rows have this part in memory only."""
    lacks: NDArray[np.bool_] = (column.segments[rows] == NO_SEGMENT) & (column.slots[rows] != NO_SLOT)
    return lacks


def _is_there(node: Node) -> bool:
    """Whether it is still a node of its tree (it may have become part of another)."""
    index = node.space.tree.index if node.space is not None else None
    return index is not None and index.by_number.get(node.number) is node
