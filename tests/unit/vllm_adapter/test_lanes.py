"""Jobs end once and in bounded time, whatever the thread is busy with."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from prefixcache_vllm.lanes import Job, Lane, Outcome
from tests.e2e.processes import wait_until

ROWS = np.arange(2)
KEYS = [b"a", b"b"]


class Work:
    """Does jobs when told to; job 13 is a mistake."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.began: list[int] = []
        self.left: list[float] = []
        self.now = 0.0

    def do(self, job: Job, left_s: float) -> Outcome:
        self.began.append(job.number)
        self.left.append(left_s)
        self.open.wait(20)
        if job.number == 13:
            raise RuntimeError("a mistake of ours")
        return Outcome(job, job.keys, {}, 10)


@pytest.fixture
def work() -> Work:
    return Work()


@pytest.fixture
def lane(work: Work) -> Iterator[Lane]:
    made = Lane("test", work.do, 2, 1.0, lambda: work.now)
    yield made
    work.open.set()
    made.close(5.0)


def ended(lane: Lane, count: int) -> dict[int, Outcome]:
    found: dict[int, Outcome] = {}
    assert wait_until(lambda: found.update({each.job.number: each for each in lane.take()}) or len(found) >= count)
    return found


def test_a_job_ends_once(lane: Lane) -> None:
    lane.submit(1, KEYS, ROWS)
    lane.submit(13, KEYS, ROWS)
    found = ended(lane, 2)
    assert (found[1].ok, found[1].done, found[1].size_bytes) == (True, KEYS, 10)
    assert (found[13].ok, found[13].not_done) == (False, {"internal": 2})
    assert lane.take() == []


def test_what_does_not_begin_in_time_fails(lane: Lane, work: Work) -> None:
    work.open.clear()
    lane.submit(1, KEYS, ROWS)
    assert wait_until(lambda: work.began == [1])
    work.now = 0.6
    lane.submit(2, KEYS, ROWS)
    work.now = 1.2
    assert lane.take() == [], "the one that runs is not broken off, the other has time"
    work.now = 1.6
    (late,) = lane.take()
    assert (late.job.number, late.not_done) == (2, {"deadline": 2})
    work.open.set()
    assert ended(lane, 1)[1].ok
    assert work.began == [1]
    assert work.left == [1.0]


def test_too_many_are_not_taken(lane: Lane, work: Work) -> None:
    work.open.clear()
    lane.submit(1, KEYS, ROWS)
    assert wait_until(lambda: work.began == [1])
    for number in (2, 3, 4):
        lane.submit(number, KEYS, ROWS)
    (refused,) = lane.take()
    assert (refused.job.number, refused.not_done) == (4, {"queue_full": 2})
    work.open.set()
    assert set(ended(lane, 3)) == {1, 2, 3}


def test_draining_waits_for_what_runs_and_calls_off_the_rest(lane: Lane, work: Work) -> None:
    work.open.clear()
    lane.submit(1, KEYS, ROWS)
    assert wait_until(lambda: work.began == [1])
    lane.submit(2, KEYS, ROWS)
    threading.Timer(0.05, work.open.set).start()
    assert lane.drain()
    found = {each.job.number: each for each in lane.take()}
    assert found[1].ok
    assert found[2].not_done == {"called_off": 2}
    lane.submit(3, KEYS, ROWS)
    assert ended(lane, 1)[3].ok, "it goes on"


def test_closing_takes_no_more(work: Work) -> None:
    lane = Lane("test", work.do, 2, 1.0)
    work.open.clear()
    lane.submit(1, KEYS, ROWS)
    assert wait_until(lambda: work.began == [1])
    assert not lane.close(0.01), "it says that something still runs"
    lane.submit(2, KEYS, ROWS)
    assert [each.not_done for each in lane.take()] == [{"called_off": 2}]
    work.open.set()
    assert lane.close(5.0)
