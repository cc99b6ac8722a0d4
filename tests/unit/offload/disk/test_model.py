"""Random operations on a small log beside a plain dict: what is there, what must not be, right bytes, room, counts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from prefixcache_offload.disk import ENTRY, Outcome
from tests.unit.offload.disk.fake_disk import FakeDisk
from tests.unit.offload.disk.log import SMALL, Log, entries_of, numbers_of

OPTIONS = replace(SMALL, cap_bytes=320 << 10)
numbers = st.integers(0, 24)


class LogBesideDict(RuleBasedStateMachine):
    """`known` is what a core would hold: block -> its record's entry. `cleared` must not come back by itself."""

    @initialize()
    def start(self) -> None:
        self.disk = FakeDisk()
        self.log = Log(self.disk, OPTIONS)
        self.known: dict[int, np.void] = {}
        self.cleared: set[int] = set()

    @rule(of=st.lists(numbers, min_size=1, max_size=12, unique=True))
    def write(self, of: list[int]) -> None:
        job = self.log.write(of)
        assert set(job.told) <= {Outcome.OK, Outcome.NO_ROOM}
        for number, told, entry in zip(of, job.told, job.entries, strict=True):
            if told is Outcome.OK:
                self._forget(number)
                self.known[number] = entry
                self.cleared.discard(number)

    @rule(of=st.lists(numbers, max_size=6, unique=True))
    def clear(self, of: list[int]) -> None:
        if self.log.clear(of).told == [Outcome.OK]:
            gone = set(of) if of else set(range(25))
            self.cleared |= gone
            for number in gone:
                self._forget(number)

    @rule(place=st.integers(0, 20), keep=st.sets(numbers))
    def free(self, place: int, keep: set[int]) -> None:
        rows = self.log.tier.segments()
        if not rows:
            return
        number = rows[place % len(rows)].number
        mine = [n for n, e in self.known.items() if e["segment"] == number]
        kept = [n for n in mine if n in keep]
        freed = self.log.free(number, np.array([self.known[n] for n in kept] or np.zeros(0, ENTRY)))
        if freed.freed:
            assert all(row.number != number for row in self.log.tier.segments())
            for n in mine:
                del self.known[n]
        for n, entry, outcome in zip(kept, freed.entries, freed.outcomes, strict=True):
            if outcome == Outcome.OK:
                self._forget(n)
                self.known[n] = entry

    @rule(killed=st.booleans())
    def restart(self, *, killed: bool) -> None:
        if not killed:
            assert self.log.tier.close()
        self.disk = self.disk.after_kill()
        self.log = Log(self.disk, OPTIONS)
        told = self.log.recover()
        there = dict(zip(numbers_of(told), told, strict=True))
        assert len(there) == len(told)
        assert set(self.known) <= set(there)
        assert not self.cleared & set(there)
        self.known = there

    @invariant()
    def all_is_right(self) -> None:
        if not hasattr(self, "log"):
            return
        wanted = np.array(list(self.known.values())) if self.known else entries_of([])
        assert self.log.check(wanted) == set(self.known)
        status = self.log.tier.status()
        assert self.disk.total_bytes <= status.used_bytes <= OPTIONS.cap_bytes
        files = {name[-8:]: len(file.data) for name, file in self.disk.files.items() if "segment" in name}
        rows = {f"{row.number:08x}": row.size_bytes for row in self.log.tier.segments()}
        assert rows == files
        assert status.used_bytes == OPTIONS.meta_cap_bytes + sum(files.values())
        assert all(size <= OPTIONS.new_segment_bytes for size in files.values())
        assert status.live_bytes == int(wanted["length"].sum())
        assert status.queued_write_bytes == status.queued_read_bytes == 0
        assert not status.health.writes_off

    def _forget(self, number: int) -> None:
        entry = self.known.pop(number, None)
        if entry is not None:
            self.log.tier.drop(np.array([entry]))


LogBesideDict.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestLogBesideDict = LogBesideDict.TestCase
