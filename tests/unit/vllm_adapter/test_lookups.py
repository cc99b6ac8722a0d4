"""Lookups never make the scheduler wait: not known yet, yes, no; and no at the latest after the time."""

import threading
from collections.abc import Iterator

import pytest

from prefixcache_vllm.lookups import Answers, Lookups
from tests.e2e.processes import wait_until


class Daemon:
    """Answers as told. `open`: whether it answers at all."""

    def __init__(self) -> None:
        self.there: set[bytes] = set()
        self.asked: list[list[bytes]] = []
        self.open = threading.Event()
        self.open.set()
        self.now = 0.0

    def ask(self, keys: list[bytes]) -> Answers:
        self.asked.append(keys)
        self.open.wait(20)
        if b"bad" in keys:
            raise ValueError("a mistake of ours")
        return Answers([key in self.there for key in keys], "not_cached")


@pytest.fixture
def daemon() -> Daemon:
    return Daemon()


@pytest.fixture
def lookups(daemon: Daemon) -> Iterator[Lookups]:
    made = Lookups(daemon.ask, 0.5, lambda: None, lambda: daemon.now)
    yield made
    daemon.open.set()
    made.close(5.0)


def settled(lookups: Lookups, keys: list[bytes], request: str = "r") -> list[bool | None]:
    """The answers, as soon as all are there."""
    lookups.flush()
    assert wait_until(lambda: None not in [lookups.lookup(key, request) for key in keys])
    return [lookups.lookup(key, request) for key in keys]


def test_one_question_for_all_keys_of_a_step(lookups: Lookups, daemon: Daemon) -> None:
    daemon.there = {b"a", b"c"}
    keys = [b"a", b"b", b"c"]
    assert [lookups.lookup(key, "r") for key in keys + keys] == [None] * 6
    assert settled(lookups, keys) == [True, False, True]
    assert daemon.asked == [keys]
    assert lookups.reasons == {"not_cached": 1}
    assert [lookups.lookup(key, "other") for key in keys] == [True, False, True], "known without asking"
    assert len(daemon.asked) == 1


def test_no_answer_is_a_no_in_time_and_may_come_later(lookups: Lookups, daemon: Daemon) -> None:
    daemon.there = {b"a"}
    daemon.open.clear()
    assert lookups.lookup(b"a", "r") is None
    lookups.flush()
    daemon.now = 0.49
    assert lookups.lookup(b"a", "r") is None
    daemon.now = 0.5
    assert lookups.lookup(b"a", "r") is False
    assert lookups.reasons == {"deadline": 1}
    daemon.open.set()
    assert wait_until(lambda: lookups.lookup(b"a", "r") is True), "a late answer is good for who asks later"
    assert lookups.reasons == {"deadline": 1}


def test_steps_that_pass_meanwhile_are_one_question(lookups: Lookups, daemon: Daemon) -> None:
    daemon.open.clear()
    lookups.lookup(b"0", "r")
    lookups.flush()
    assert wait_until(lambda: len(daemon.asked) == 1)
    for number in range(1, 5):
        lookups.lookup(b"%d" % number, "r")
        lookups.flush()
    daemon.open.set()
    settled(lookups, [b"%d" % number for number in range(5)])
    assert daemon.asked == [[b"0"], [b"1", b"2", b"3", b"4"]]


def test_answers_live_as_long_as_who_asked(lookups: Lookups) -> None:
    lookups.lookup(b"a", "r")
    lookups.lookup(b"a", "s")
    settled(lookups, [b"a"])
    lookups.finished("r")
    assert len(lookups) == 1
    lookups.finished("s")
    lookups.finished("s")
    lookups.finished("never asked")
    assert len(lookups) == 0


def test_what_turned_out_otherwise(lookups: Lookups, daemon: Daemon) -> None:
    daemon.there = {b"a"}
    lookups.lookup(b"a", "r")
    assert settled(lookups, [b"a"]) == [True]
    lookups.missed([b"a", b"unknown"])
    assert lookups.lookup(b"a", "r") is False, "or the same load would be tried for ever"
    lookups.forget([b"a", b"unknown"])
    assert lookups.lookup(b"a", "r") is None
    assert settled(lookups, [b"a"]) == [True]
    lookups.forget([b"a"])
    assert lookups.lookup(b"a", "r") is True, "what is known to be there needs no asking"
    lookups.finished("r")
    assert len(lookups) == 0


def test_an_answer_from_before_counts_no_more(lookups: Lookups, daemon: Daemon) -> None:
    daemon.there = {b"a", b"b"}
    daemon.open.clear()
    for key in (b"a", b"b"):
        lookups.lookup(key, "r")
    lookups.flush()
    assert wait_until(lambda: len(daemon.asked) == 1)
    lookups.missed([b"b"])
    lookups.reset()
    assert lookups.lookup(b"a", "r") is None
    daemon.there = set()
    daemon.open.set()
    assert settled(lookups, [b"a"]) == [False]
    assert daemon.asked == [[b"a", b"b"], [b"a"]]


def test_a_mistake_is_a_no(lookups: Lookups) -> None:
    lookups.lookup(b"bad", "r")
    assert settled(lookups, [b"bad"]) == [False]
    assert lookups.reasons == {"internal": 1}
    lookups.lookup(b"good", "r")
    assert settled(lookups, [b"good"]) == [False], "the thread goes on"
