"""Loading from disk never costs a request more than computing, by more than 5%, whatever the disk's speed is.

A disk that reads one record after the other at a given speed, workers whose requests overlap, and the planner, which is
told neither: it has to find out. Time is simulated.
"""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass

import numpy as np
import pytest

from prefixcache.core.commands import Acquired, Arrived, Command, ReadRecords
from prefixcache.core.events import AcquireRequested, DiskRecovered, LeaseReleased, RecordsRead
from prefixcache.core.ids import KEY_BYTES
from prefixcache.core.reasons import Miss
from prefixcache.core.spec import DiskSpec
from tests.unit.core.disk_harness import DiskHarness
from tests.unit.core.harness import GRANULE, TOKENS, A, Harness, chain

PROMPTS = [chr(ord("a") + number) + "x" * 11 for number in range(8)]
BLOCKS = 12
COMPUTE_S = 0.010  # of one block
WARM_UP = 64
"""Records after whose reading the planner should know how fast the disk is; requests before that do not count."""


@dataclass
class Request:
    """One prompt of one worker: when it came, what was promised, how much of it is there."""

    began: float
    reply: Acquired
    ready: int
    counts: bool


class Throttled:
    """A planner whose blocks are all on a disk that takes `record_s` a record."""

    def __init__(self, record_s: float, seed: int) -> None:
        self.rng = random.Random(seed)
        self.record_s = record_s
        self.harness = DiskHarness(slots=4 * BLOCKS)
        self.planner = self.harness.planner
        self.queue: list[tuple[int, int]] = []  # (job, record) in the order in which they are read
        self.events: list[tuple[float, int, str]] = []
        self.requests: dict[bytes, Request] = {}
        self.costs: list[tuple[float, float]] = []  # (what a request took, what computing would have taken)
        self.promised = 0
        self.order = itertools.count()
        self.records_read = 0
        self._put_on_disk()

    def run(self, requests: int, pause_s: float) -> None:
        at = 0.0
        for _ in range(requests):
            at += self.rng.expovariate(1 / pause_s)
            self._at(at, "request")
        while self.events:
            self.harness.now, _, what = heapq.heappop(self.events)
            if what == "request":
                self._request()
            else:
                job, record = self.queue.pop(0)
                self.records_read += 1
                self._send(RecordsRead(job, np.array([record], np.uint32), np.zeros(1, np.uint8)))
                if self.queue:
                    self._at(self.harness.now + self.record_s, "read")

    def _put_on_disk(self) -> None:
        self.planner.state.disk.recovered = False
        for number, letters in enumerate(PROMPTS):
            keys = chain(letters)
            pages = np.arange(BLOCKS, dtype=np.uint32)
            parents = bytes(KEY_BYTES) + keys[:-KEY_BYTES]
            parts = np.zeros(BLOCKS, np.uint16)
            segments = np.full(BLOCKS, number + 1, np.uint32)
            Harness.send(self.harness, DiskRecovered(1, parts, segments, pages, keys, parents, pages))

    def _request(self) -> None:
        letters = self.rng.choice(PROMPTS)
        event = AcquireRequested(
            A, self.harness.new_id(), 1, chain(letters), 0, BLOCKS * TOKENS, 1000.0,
            deadline_s=1000.0, recompute_s_per_token=COMPUTE_S / TOKENS,
        )  # fmt: skip
        for command in self._send(event):
            if isinstance(command, Acquired):
                request = Request(self.harness.now, command, command.ready_blocks, self.records_read >= WARM_UP)
                self.promised += command.planned_blocks - command.ready_blocks
                if command.ready_blocks == command.planned_blocks:
                    self._finish(request)
                else:
                    self.requests[command.lease] = request

    def _send(self, event: object) -> list[Command]:
        commands = list(self.planner.handle(event, self.harness.now))  # type: ignore[arg-type]  # events only
        for command in commands:
            if isinstance(command, ReadRecords):
                if not self.queue:
                    self._at(self.harness.now + self.record_s, "read")
                self.queue += [(command.job, record) for record in range(len(command.records.rows))]
            elif isinstance(command, Arrived) and command.done:
                request = self.requests.pop(command.lease)
                request.ready = command.ready_blocks
                self._finish(request)
        return commands

    def _finish(self, request: Request) -> None:
        """Everything that was promised is there; the rest is computed."""
        hot = request.reply.ready_blocks
        took_s = self.harness.now - request.began + (BLOCKS - request.ready) * COMPUTE_S
        if request.counts:
            self.costs.append((took_s, (BLOCKS - hot) * COMPUTE_S))
        if request.reply.planned_blocks:
            self.planner.handle(LeaseReleased(A, request.reply.lease, None, Miss.UNUSED), self.harness.now)

    def _at(self, when: float, what: str) -> None:
        heapq.heappush(self.events, (when, next(self.order), what))


@pytest.mark.parametrize("speed", [0.1, 0.5, 0.8, 0.95, 1.05, 1.5, 5.0], ids=lambda speed: f"{speed}x")
@pytest.mark.parametrize("pause_s", [0.5, 0.1, 0.02], ids=["idle", "busy", "overloaded"])
def test_no_request_is_slower_than_computing_by_more_than_5_percent(speed: float, pause_s: float) -> None:
    """speed: blocks read in the time that computing one takes."""
    disk = Throttled(COMPUTE_S / speed, seed=int(speed * 100))
    disk.run(400, pause_s)
    late = [(took, computing) for took, computing in disk.costs if took > 1.05 * computing + 1e-9]
    assert not late, f"{len(late)} of {len(disk.costs)}: {late[:5]}"
    if speed > 1.2 and pause_s > 0.05:
        assert disk.promised > 0
        saved = 1 - sum(took for took, _ in disk.costs) / sum(computing for _, computing in disk.costs)
        assert saved > 0.1


def test_a_disk_that_is_much_slower_than_computing_is_left_alone_in_the_end() -> None:
    disk = Throttled(100 * COMPUTE_S, seed=1)
    disk.run(100, 0.5)
    assert all(took <= 1.05 * computing + 1e-9 for took, computing in disk.costs)


def test_the_default_is_believed_until_something_was_read() -> None:
    assert DiskSpec().read_bytes_per_s == 1e9
    assert GRANULE / 1e9 < COMPUTE_S
