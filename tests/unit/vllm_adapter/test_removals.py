"""Which blocks are gone, by the daemon's events: one by one, whole namespaces, over gaps, and more than can be told."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator

import pytest

from prefixcache_client import WatchEvent, WatchRefusedError
from prefixcache_client.events import EventKind
from prefixcache_vllm import removals
from prefixcache_vllm.removals import Differences, Removals
from tests.e2e.processes import wait_until

NS = b"n" * 32
A, B, C = (bytes([letter]) * 32 for letter in b"abc")


def event(kind: EventKind, *keys: bytes, tier: str = "host") -> WatchEvent:
    return WatchEvent(kind, 1, NS, keys, tier=tier if keys else "")


def test_blocks_one_by_one() -> None:
    found = Differences()
    assert found.apply(event(EventKind.STORED, A, B)) == ((A, B), ())
    assert found.apply(event(EventKind.MOVED, A, tier="disk")) == ((), ())
    assert found.apply(event(EventKind.STORED, A, tier="gpu")) == ((), ())
    assert found.apply(event(EventKind.REMOVED, A, tier="gpu")) == ((), ())
    assert found.apply(event(EventKind.REMOVED, A, tier="disk")) == ((), (A,))


def test_a_namespace_that_is_cleared() -> None:
    found = Differences()
    found.apply(event(EventKind.STORED, A, B))
    came, went = found.apply(event(EventKind.CLEARED))
    assert (came, set(went)) == ((), {A, B})


def test_what_is_missing_after_a_gap() -> None:
    found = Differences()
    found.apply(event(EventKind.STORED, A, B))
    assert found.apply(event(EventKind.GAP)) == ((), ())
    assert found.apply(event(EventKind.SNAPSHOT_BEGIN)) == ((), ())
    assert found.apply(event(EventKind.STORED, B, C)) == ((B, C), ())
    found.apply(event(EventKind.SNAPSHOT_BEGIN))  # cut, and begun anew
    found.apply(event(EventKind.STORED, B))
    came, went = found.apply(event(EventKind.SNAPSHOT_END))
    assert (came, set(went)) == ((), {A, C})


class FakeWatch:
    """Tells what a test puts into it."""

    def __init__(self, fingerprints: list[bytes]) -> None:
        self.fingerprints = fingerprints
        self.events: queue.Queue[WatchEvent | WatchRefusedError] = queue.Queue()
        self.renewed: list[list[bytes]] = []
        self.closed = threading.Event()

    def next(self, timeout_s: float) -> WatchEvent | None:
        try:
            found = self.events.get(timeout=0.02)
        except queue.Empty:
            return None
        if isinstance(found, WatchRefusedError):
            raise found
        return found

    def renew(self) -> None:
        self.renewed.append(list(self.fingerprints))

    def close(self) -> None:
        self.closed.set()


class Heard:
    def __init__(self) -> None:
        self.gone: list[bytes] = []
        self.there: list[bytes] = []
        self.losses = 0

    def removed(self, keys: Iterable[bytes]) -> None:
        self.gone += keys

    def stored(self, keys: Iterable[bytes]) -> None:
        self.there += keys

    def lost(self) -> None:
        self.losses += 1


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Removals, FakeWatch]]:
    monkeypatch.setattr(removals, "_LOOK_S", 0.02)
    made: list[FakeWatch] = []

    def begin(fingerprints: list[bytes]) -> FakeWatch:
        made.append(FakeWatch(fingerprints))
        return made[-1]

    following = Removals(begin)  # type: ignore[arg-type]  # as much of a watch as it uses
    yield following, made[0]
    following.close()
    assert made[0].closed.is_set()


def test_it_follows_the_namespaces_of_the_engine(watch: tuple[Removals, FakeWatch]) -> None:
    following, told = watch
    following.follow([NS])
    assert wait_until(lambda: told.renewed == [[NS]])
    following.follow([NS, b"m" * 32])
    assert wait_until(lambda: len(told.renewed) == 2)
    assert told.renewed[1] == [NS, b"m" * 32]


def test_the_last_word_on_a_block_counts(watch: tuple[Removals, FakeWatch]) -> None:
    following, told = watch
    following.follow([NS])
    for each in (event(EventKind.STORED, A, B), event(EventKind.REMOVED, A), event(EventKind.REMOVED, B)):
        told.events.put(each)
    told.events.put(event(EventKind.STORED, B))
    told.events.put(event(EventKind.REMOVED, C))
    heard = Heard()

    def all_told() -> bool:
        following.tell(heard)
        return C in heard.gone

    assert wait_until(all_told)
    assert heard.gone[-1] == C
    assert heard.gone.count(A) == 1
    assert B not in heard.gone or heard.there[-1] == B
    following.tell(heard)
    assert heard.gone.count(C) == 1


def test_too_much_is_told_as_such(watch: tuple[Removals, FakeWatch], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removals, "MAX_WAITING", 2)
    following, told = watch
    following.follow([NS])
    told.events.put(event(EventKind.REMOVED, A, B, C))
    heard = Heard()

    def is_told() -> bool:
        following.tell(heard)
        return heard.losses == 1

    assert wait_until(is_told)
    assert heard.gone == []


def test_an_older_daemon_is_left_alone(watch: tuple[Removals, FakeWatch]) -> None:
    following, told = watch
    following.follow([NS])
    told.events.put(WatchRefusedError("unimplemented", "not yet"))
    assert wait_until(lambda: not following._thread.is_alive())
    following.tell(Heard())
