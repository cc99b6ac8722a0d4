"""Events that nobody waits for: in their order, one at a time, by whoever drives, and at once where nobody does."""

import numpy as np
import pytest

from prefixcache.core import commands as c
from prefixcache.core import events as e
from prefixcache.server.background import Background
from prefixcache.server.loop import Owner
from tests.unit.server.test_loop import Planned


def made(*answers: list[c.Command] | Exception) -> tuple[Background, Planned, dict[type, object]]:
    planner = Planned(*answers)
    orders: dict[type, object] = {}
    background = Background(Owner(planner, orders))  # type: ignore[arg-type]  # filled below
    orders[c.MoreToDo] = background.note_more
    return background, planner, orders


def seen(planner: Planned) -> list[type]:
    return [type(event) for event, _ in planner.seen]


def read() -> e.RecordsRead:
    return e.RecordsRead(1, np.zeros(0, np.uint32), np.zeros(0, np.uint8))


def test_without_a_driver_everything_is_done_at_once() -> None:
    background, planner, _ = made([c.MoreToDo()], [c.MoreToDo()], [])
    background.post(e.TimePassed())
    assert seen(planner) == [e.TimePassed, e.WorkResumed, e.WorkResumed]


def test_a_driver_is_woken_once_and_does_a_step_at_a_time_what_somebody_waits_for_first() -> None:
    background, planner, _ = made([], [], [c.MoreToDo()], [])
    woken: list[bool] = []
    background.drive(lambda: woken.append(True))
    background.post(e.TimePassed())
    background.post(e.FlushStarted())
    background.post(read())
    assert (woken, seen(planner), background.backlog) == ([True], [], 3)
    assert background.step()
    assert seen(planner) == [e.RecordsRead]
    background.post(e.CopyDone(1, ok=True))
    assert woken == [True, True], "it may sleep again"
    while background.step():
        pass
    assert seen(planner) == [e.RecordsRead, e.TimePassed, e.FlushStarted, e.CopyDone, e.WorkResumed]


def test_what_waits_when_the_driver_leaves_is_done_and_what_comes_later_as_well() -> None:
    background, planner, _ = made()
    background.drive(lambda: None)
    background.post(e.TimePassed())
    background.leave()
    background.post(e.FlushStarted())
    assert seen(planner) == [e.TimePassed, e.FlushStarted]


def test_nothing_is_decided_after_a_planner_failed() -> None:
    background, planner, _ = made(KeyError("a bug"))
    background.drive(lambda: None)
    background.post(e.TimePassed())
    background.post(e.FlushStarted())
    with pytest.raises(KeyError):
        background.step()
    assert background.step()
    assert not background.step()
    assert seen(planner) == [e.TimePassed]
