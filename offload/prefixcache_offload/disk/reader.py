"""Reads records straight into the caller's memory, neighbours with one call, and believes none of them unchecked.

Any number of threads call `step`. A group is records that lie next to each other (small gaps are read over) and belong
to one job. Each record is judged by its header (is it the one wanted, at this place, of this directory) and by the
checksum of its payload; what fails is `MISMATCH` and its target holds rubbish. A read of `length` bytes may overwrite
its target up to the next multiple of 4 KiB, if the target begins on a page and the memory reaches that far; else it
goes through a buffer of its own, as does what lies on disk in another form: it is decoded into its target here.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import RLock
from typing import NamedTuple

import numpy as np

from prefixcache_offload.codecs import lossless
from prefixcache_offload.disk.outcomes import Outcome, trouble_of
from prefixcache_offload.disk.records import (
    PAGE,
    Bytes,
    Codec,
    Entries,
    digest,
    good_headers,
    headers_over,
    known,
    record_pages,
    same_records,
    stored_bytes,
)
from prefixcache_offload.disk.seam import Scratches, read_fully, scratch
from prefixcache_offload.disk.shared import Done, Ended, Indexes, Outcomes, Shared

_LARGEST_GAP = 64 << 10
_MOST_IN_GROUP = 256
_RAW = int(Codec.RAW)
_OK, _MISMATCH, _TRUNCATED = int(Outcome.OK), int(Outcome.MISMATCH), int(Outcome.TRUNCATED)
"""As numbers: numpy asks a member of an enum for a dozen names before it compares."""


@dataclass(eq=False, slots=True)
class ReadJob:
    """Records to read. entries: ENTRY[n] with namespace, key, part, segment, page and length as they were told when
    the record was written or found; payload i goes to memory[at[i] : at[i] + length]. as_stored: the payloads are
    wanted as they lie on disk, so there must be room for `stored_bytes`."""

    job: int
    memory: Bytes
    at: Indexes
    entries: Entries
    done: Done
    as_stored: bool = False
    left: int = 0
    turn: RLock = field(default_factory=RLock)
    """Held around each call of `done`, so that the call with nothing left comes last."""


class _Group(NamedTuple):
    job: ReadJob
    which: list[int]
    """Numbers in the job, in the order they lie on disk."""


class _Plan(NamedTuple):
    """One call: where it begins, its buffers, the headers among them, and payloads that go through a copy."""

    offset: int
    buffers: list[memoryview]
    headers: memoryview
    """Pages, at least as many as there are records."""
    ends: list[int]
    """Bytes of the call after which record i is complete."""
    copies: dict[int, memoryview]


class Reader:
    """The read side of the tier."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._queue: deque[_Group] = deque()
        self.queued_bytes = 0
        """Payload that waits."""
        self._junk = scratch(_LARGEST_GAP)
        self._headers = Scratches(_MOST_IN_GROUP * PAGE)

    def submit(self, job: ReadJob) -> None:
        """Queue a job's groups, or end it at once if reading is off."""
        shared, count = self._shared, len(job.entries)
        job.left = count
        with shared.lock:
            job.entries = shared.table.as_stored(job.entries)
        groups = group_neighbours(job.entries, shared.options.read_bytes)
        with shared.lock:
            off = shared.closing or shared.health.reads_off is not None
            why = Outcome.SHUT_DOWN if shared.closing else Outcome.TIER_OFF
            if not off:
                self._queue.extend(_Group(job, index) for index in groups)
                self.queued_bytes += int(job.entries["length"].sum(dtype=np.int64))
                shared.reads_pending += len(groups)
                shared.reads_wait.notify(len(groups))
        if off and count:
            self._end(_Group(job, list(range(count))), np.full(count, why, np.uint8), job.entries)

    def cancel(self, job: int) -> None:
        """End what has not begun of a job; what is in the kernel ends by itself."""
        self._drop(lambda group: group.job.job == job, Outcome.CANCELLED)

    def drop_all(self, outcome: Outcome) -> None:
        """End everything that waits."""
        self._drop(lambda _: True, outcome)

    def wait_for_work(self) -> bool:
        """Block until `step` may have something to do; False once the tier closes."""
        shared = self._shared
        with shared.lock:
            shared.reads_wait.wait_for(lambda: shared.closing or bool(self._queue))
            return not shared.closing or bool(self._queue)

    def _fewer_pending(self) -> None:
        if not self._shared.reads_pending:
            self._shared.reads_done.notify_all()

    def step(self) -> bool:
        """Read one group. False if there was none."""
        shared = self._shared
        with shared.lock:
            if not self._queue:
                return False
            group = self._queue.popleft()
            wanted = group.job.entries[group.which]
            self.queued_bytes -= int(wanted["length"].sum(dtype=np.int64))
            segment = shared.table.hold(int(wanted["segment"][0]))
            headers = self._headers.take()
        plan = self._plan(group, wanted, headers)
        got, error = 0, None
        with shared.calling((group.job.job,)) as call:
            try:
                if segment is not None:
                    got = read_fully(shared.disk, shared.table.fd(segment), plan.buffers, plan.offset)
            except OSError as failed:
                error = failed
        with shared.lock:
            shared.counters.read_seconds += shared.clock() - call.started
            shared.counters.read_calls += 1
            fds = shared.table.let_go(segment) if segment is not None else []
        shared.close_fds(fds)
        if segment is None or error is not None:
            why = Outcome.GONE if segment is None else Outcome.IO_ERROR
            outcomes, found = np.full(len(wanted), why, np.uint8), wanted
        else:
            outcomes, found = self._judge(group, wanted, plan, got)
        self._note_health(error, outcomes)
        with shared.lock:
            self._headers.give_back(headers)
            shared.reads_pending -= 1
            shared.counters.read_bytes += int(stored_bytes(wanted)[outcomes == _OK].sum())
            self._fewer_pending()
        self._end(group, outcomes, found)
        return True

    # --- one group -------------------------------------------------------------------------------------------------

    def _plan(self, group: _Group, wanted: Entries, headers: memoryview) -> _Plan:
        buffers: list[memoryview] = []
        copies: dict[int, memoryview] = {}
        ends: list[int] = []
        memory = group.job.memory
        begin = next_page = int(wanted["page"][0])
        decoded = (wanted["codec"] != _RAW) & (not group.job.as_stored)
        for i, (page, pages) in enumerate(zip(wanted["page"].tolist(), record_pages(wanted).tolist(), strict=True)):
            if page > next_page:
                buffers.append(self._junk[: (page - next_page) * PAGE])
            buffers.append(headers[i * PAGE : (i + 1) * PAGE])
            rounded, start = (pages - 1) * PAGE, int(group.job.at[group.which[i]])
            fits = not (memory.ctypes.data + start) % PAGE and start + rounded <= memory.size
            if rounded and fits and not decoded[i]:
                buffers.append(memory[start : start + rounded].data)
            elif rounded:
                copies[i] = scratch(rounded)
                buffers.append(copies[i])
            next_page = page + pages
            ends.append((next_page - begin) * PAGE)
        return _Plan(begin * PAGE, buffers, headers, ends, copies)

    def _judge(self, group: _Group, wanted: Entries, plan: _Plan, got: int) -> tuple[Outcomes, Entries]:
        """Outcome of each record after a call that read `got` bytes, and the entries that were found."""
        pages = np.frombuffer(plan.headers[: len(wanted) * PAGE], np.uint8)
        found: Entries = headers_over(pages)["entry"].copy()
        whole = np.array(plan.ends) <= got
        right = whole & good_headers(pages, self._shared.directory.nonce) & same_records(found, wanted)
        readable = known(found) | group.job.as_stored
        for i in np.flatnonzero(right & readable).tolist():
            right[i] = self._take(group, i, found[i : i + 1], plan.copies.get(i))
        outcomes = np.where(right, _OK, np.where(whole, _MISMATCH, _TRUNCATED)).astype(np.uint8)
        outcomes[right & ~readable] = Outcome.UNKNOWN_CODEC
        return outcomes, found

    def _take(self, group: _Group, i: int, found: Entries, copy: memoryview | None) -> bool:
        """Whether a payload is the one its header tells of; it is at its target then. found: ENTRY[1]."""
        job, size, length = group.job, int(stored_bytes(found)[0]), int(found["length"][0])
        start = int(job.at[group.which[i]])
        payload = job.memory[start : start + size] if copy is None else np.frombuffer(copy, np.uint8)[:size]
        if payload.size != size or digest(payload) != found["digest"][0].tobytes():
            return False
        if found["codec"][0] != _RAW and not job.as_stored:
            return copy is not None and self._decode(payload, job.memory[start : start + length])
        if copy is not None:
            np.copyto(job.memory[start : start + size], payload)
        return True

    def _decode(self, payload: Bytes, target: Bytes) -> bool:
        began = self._shared.clock()
        whole = lossless.unpack(payload, target)
        with self._shared.lock:
            self._shared.counters.decoded_bytes += target.size
            self._shared.counters.decode_seconds += self._shared.clock() - began
        return whole

    def _note_health(self, error: OSError | None, outcomes: Outcomes) -> None:
        with self._shared.lock:
            health = self._shared.health
            if error is not None:
                health.read_failed(trouble_of(error), self._shared.options.read_errors_until_off)
            elif (outcomes == _OK).any():
                health.read_worked()
            off = health.reads_off is not None
        if off:
            self.drop_all(Outcome.TIER_OFF)

    def _drop(self, which: Callable[[_Group], bool], outcome: Outcome) -> None:
        shared = self._shared
        with shared.lock:
            dropped = [group for group in self._queue if which(group)]
            self._queue = deque(group for group in self._queue if not which(group))
            shared.reads_pending -= len(dropped)
            for group in dropped:
                self.queued_bytes -= int(group.job.entries["length"][group.which].sum(dtype=np.int64))
            self._fewer_pending()
        for group in dropped:
            wanted = group.job.entries[group.which]
            self._end(group, np.full(len(wanted), outcome, np.uint8), wanted)

    def _end(self, group: _Group, outcomes: Outcomes, entries: Entries) -> None:
        job = group.job
        with job.turn:
            job.left -= len(group.which)
            with self._shared.lock:
                for outcome in outcomes.tolist():
                    self._shared.counters.reads[Outcome(outcome)] += 1
            job.done(Ended(job.job, np.array(group.which), outcomes, entries, job.left))


def group_neighbours(entries: Entries, most_bytes: int) -> list[list[int]]:
    """Cut records into groups that one call can read; the group with the earliest record comes first.

    The first group on disk is a quarter of the others, so that the first bytes of a prefix arrive early.
    """
    order = np.lexsort((entries["page"], entries["segment"])).tolist()
    segments, pages, lengths = (entries[name].tolist() for name in ("segment", "page", "length"))
    sizes = record_pages(entries).tolist()
    groups: list[list[int]] = []
    total = 0
    for i in order:
        most = most_bytes if len(groups) > 1 else most_bytes // 4
        last = groups[-1][-1] if groups else None
        gap = -1 if last is None or segments[last] != segments[i] else (pages[i] - pages[last] - sizes[last]) * PAGE
        if 0 <= gap <= _LARGEST_GAP and total + lengths[i] <= most and len(groups[-1]) < _MOST_IN_GROUP:
            groups[-1].append(i)
            total += lengths[i]
        else:
            groups.append([i])
            total = lengths[i]
    return sorted(groups, key=min)
