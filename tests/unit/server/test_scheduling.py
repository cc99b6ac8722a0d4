"""Short turns are asked for where that is offered, and leave priority and policy as they were."""

import os
import platform
import threading

import pytest

from prefixcache.server import scheduling


def in_a_thread() -> tuple[bool, int, int]:
    """(taken, policy, niceness) of a thread that is nicer than the others and asks for short turns."""
    found: list[tuple[bool, int, int]] = []

    def work() -> None:
        me = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, me, 7)
        taken = scheduling.take_short_turns()
        found.append((taken, os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, me)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found[0]


def test_priority_and_policy_stay_as_they_were() -> None:
    _, policy, nice = in_a_thread()
    assert (policy, nice) == (os.SCHED_OTHER, 7)


def test_an_unknown_machine_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "pdp11")
    assert not scheduling.take_short_turns()


def test_a_policy_that_somebody_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getscheduler", lambda _: os.SCHED_BATCH)
    assert not scheduling.take_short_turns()
