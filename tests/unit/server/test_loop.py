"""The owner: order, time, late replies, and what happens when the planner fails."""

import threading
from concurrent.futures import Future

import numpy as np
import pytest

from prefixcache.core import commands as c
from prefixcache.core import events as e
from prefixcache.core.reasons import Kind, Refusal
from prefixcache.server.errors import CallError
from prefixcache.server.loop import Owner, Timer

LEASE = b"l" * 16


class Planned:
    """A planner that answers what it is told to, and remembers what it was asked at what time. It makes no faults but
    those put into `answers`."""

    def __init__(self, *answers: list[c.Command] | Exception) -> None:
        self.answers = list(answers)
        self.seen: list[tuple[e.Event, float]] = []

    def handle(self, event: e.Event, now: float) -> list[c.Command]:
        self.seen.append((event, now))
        answer = self.answers.pop(0) if self.answers else []
        if isinstance(answer, Exception):
            raise answer
        return answer


class Clock:
    def __init__(self) -> None:
        self.now = 10.0

    def __call__(self) -> float:
        return self.now


def acquire() -> e.AcquireRequested:
    return e.AcquireRequested(b"s" * 16, LEASE, 1, b"", 0, 0, 1.0)


def acquired() -> c.Acquired:
    return c.Acquired(LEASE, 0, 0, 0, (), None, (0, 0, 0, 0), 0.0)


def test_orders_are_carried_out_in_order_before_the_reply() -> None:
    done: list[object] = []
    slots = np.zeros(1, np.uint32)
    commands: list[c.Command] = [
        c.LeaseEnded(LEASE, b"", acquired().stop),  # type: ignore[arg-type]  # its reason does not matter here
        c.SetGenerations(0, slots, 5),
        c.Cleared(1, 0),
        c.DrainFinished(),
    ]
    owner = Owner(Planned(commands), {c.LeaseEnded: done.append, c.SetGenerations: done.append})
    assert owner.call(e.ClearRequested()) == c.Cleared(1, 0)
    assert [type(item) for item in done] == [c.LeaseEnded, c.SetGenerations]


def test_a_late_reply_finds_who_waits_for_it() -> None:
    other = c.Refused(Kind.NOT_FOUND, Refusal.LEASE_UNKNOWN, "", subject=b"x" * 16)
    planner = Planned([], [other], [acquired()], [acquired()])
    owner = Owner(planner, {})
    waiting = owner.acquire(acquire())
    assert isinstance(waiting, Future)
    assert owner.call(e.TimePassed()) is other, "another's reply is not taken for it"
    assert not waiting.done()
    assert owner.call(e.VerifyDone(1)) is None
    assert isinstance(waiting.result(0), c.Acquired)
    assert isinstance(owner.acquire(acquire()), c.Acquired)


def test_a_repeated_acquire_waits_for_the_same_reply() -> None:
    owner = Owner(Planned([], [], [acquired()]), {})
    first, second = owner.acquire(acquire()), owner.acquire(acquire())
    assert first is second
    owner.call(e.VerifyDone(1))
    assert isinstance(first, Future)
    assert first.done()


def test_time_never_goes_back_and_stands_still_under_a_write() -> None:
    clock, planner = Clock(), Planned()
    owner = Owner(planner, {}, clock)
    owner.call(e.TimePassed())
    clock.now = 5.0
    owner.call(e.TimePassed())
    clock.now = 20.0
    owner.call(e.TimePassed())
    with owner.lock:
        first = owner.hold_time()
    clock.now = 30.0
    owner.call(e.TimePassed())
    with owner.lock:
        second = owner.hold_time()
    clock.now = 40.0
    owner.let_time_pass(first)
    owner.call(e.TimePassed())
    owner.let_time_pass(second)
    owner.call(e.TimePassed())
    assert [now for _, now in planner.seen] == [10.0, 10.0, 20.0, 20.0, 20.0, 40.0]


def test_after_a_failure_nothing_is_decided() -> None:
    owner = Owner(Planned(ZeroDivisionError()), {})
    with pytest.raises(ZeroDivisionError):
        owner.call(e.TimePassed())
    assert owner.failure == "TimePassed failed"
    with pytest.raises(CallError, match="must be restarted"):
        owner.call(e.TimePassed())


def test_the_timer_lets_time_pass_and_beats_only_while_the_planner_works() -> None:
    planner, beaten, chored = Planned([], [], ZeroDivisionError()), threading.Event(), threading.Event()
    owner = Owner(planner, {})
    timer = Timer(owner, beaten.set, period_s=0.001)
    timer.add(chored.set)
    timer.start()
    assert beaten.wait(20)
    assert chored.wait(20)
    timer.stop()
    assert all(isinstance(event, e.TimePassed) for event, _ in planner.seen)


def test_a_timer_that_was_never_started_can_be_stopped() -> None:
    Timer(Owner(Planned(), {}), lambda: None).stop()
