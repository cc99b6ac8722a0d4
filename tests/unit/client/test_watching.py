"""A watch over connections that break, fall silent, refuse: what it asks for each time, and what it tells."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator

import pytest

from prefixcache.v1 import admin_pb2 as pb
from prefixcache_client import Client
from prefixcache_client.errors import Failure, Refused, Unreachable, WatchRefusedError
from prefixcache_client.events import EventKind
from prefixcache_client.watching import Watch
from tests.e2e.processes import wait_until

NS = b"n" * 32
INCARNATION = b"i" * 16
WAIT_S = 20.0


class Connection:
    """Tells what a test puts into it."""

    def __init__(self) -> None:
        self.request = pb.WatchEventsRequest()
        self.told: queue.Queue[bytes | Failure | None] = queue.Queue()
        self.closed = threading.Event()

    def watch_events(self, payload: bytes) -> Iterator[bytes]:
        self.request = pb.WatchEventsRequest.FromString(payload)
        while (item := self.told.get()) is not None:
            if isinstance(item, Failure):
                raise item
            yield item

    def close(self) -> None:
        self.closed.set()
        self.told.put(None)

    def say(self, kind: pb.EventKind.ValueType, sequence: int = 0) -> None:
        message = pb.WatchEventsResponse(kind=kind, sequence=sequence, incarnation=INCARNATION)
        self.told.put(message.SerializeToString())


class Daemon:
    """Connections in the order in which they will be made; more are made when these are used up."""

    def __init__(self, *connections: Connection) -> None:
        self.made: list[Connection] = []
        self.next = list(connections)

    def connect(self) -> Connection:
        self.made.append(self.next.pop(0) if self.next else Connection())
        return self.made[-1]


def watching(daemon: Daemon, *, snapshot: bool = True, keepalive_s: float = 5.0) -> Watch:
    return Watch(daemon.connect, lambda: [NS], snapshot=snapshot, keepalive_s=keepalive_s)


def test_events_come_and_signs_of_life_do_not() -> None:
    first = Connection()
    daemon = Daemon(first)
    with watching(daemon) as watch:
        first.say(pb.EVENT_KIND_SNAPSHOT_BEGIN, 4)
        first.say(pb.EVENT_KIND_SNAPSHOT_END, 4)
        first.say(pb.EVENT_KIND_KEEPALIVE, 5)
        first.say(pb.EVENT_KIND_STORED, 6)
        kinds = [next(watch).kind for _ in range(3)]
        assert kinds == [EventKind.SNAPSHOT_BEGIN, EventKind.SNAPSHOT_END, EventKind.STORED]
        assert (watch.connected, watch.connections) == (True, 1)
        assert watch.next(0.01) is None
    request = first.request
    assert (request.snapshot, list(request.fingerprints), request.keepalive_ms) == (True, [NS], 5000)
    assert (request.incarnation, request.after) == (b"", 0)
    assert first.closed.is_set()
    assert list(watch) == []


def test_a_broken_connection_goes_on_where_it_was() -> None:
    first, second = Connection(), Connection()
    daemon = Daemon(first, second)
    with watching(daemon) as watch:
        first.say(pb.EVENT_KIND_SNAPSHOT_BEGIN, 4)
        first.say(pb.EVENT_KIND_SNAPSHOT_END, 5)
        first.say(pb.EVENT_KIND_STORED, 6)
        for _ in range(3):
            next(watch)
        first.told.put(Unreachable("broken", lost=True))
        second.say(pb.EVENT_KIND_KEEPALIVE, 6)
        second.say(pb.EVENT_KIND_REMOVED, 7)
        assert next(watch).kind is EventKind.REMOVED
        assert (second.request.incarnation, second.request.after) == (INCARNATION, 6)
        assert watch.connections == 2


def test_a_snapshot_that_was_cut_begins_anew() -> None:
    first, second = Connection(), Connection()
    with watching(Daemon(first, second)) as watch:
        first.say(pb.EVENT_KIND_SNAPSHOT_BEGIN, 4)
        next(watch)
        first.told.put(None)  # the stream ends
        second.say(pb.EVENT_KIND_SNAPSHOT_BEGIN, 9)
        assert next(watch).sequence == 9
        assert second.request.incarnation == b""


def test_without_snapshots_a_gap_is_gone_on_from() -> None:
    first, second = Connection(), Connection()
    with watching(Daemon(first, second), snapshot=False) as watch:
        first.say(pb.EVENT_KIND_KEEPALIVE, 3)
        first.say(pb.EVENT_KIND_GAP, 8)
        assert next(watch).kind is EventKind.GAP
        first.told.put(Unreachable("broken", lost=True))
        second.say(pb.EVENT_KIND_STORED, 9)
        assert next(watch).sequence == 9
        assert second.request.after == 8


def test_a_silent_daemon_is_left() -> None:
    first, second = Connection(), Connection()
    second.say(pb.EVENT_KIND_STORED, 1)
    with watching(Daemon(first, second), keepalive_s=0.1) as watch:
        assert next(watch).kind is EventKind.STORED
    assert first.closed.is_set()


def test_it_waits_longer_and_longer_for_a_daemon_that_is_not_there() -> None:
    broken = [Connection() for _ in range(30)]
    for each in broken:
        each.told.put(Unreachable("nobody listens", lost=True))
    daemon = Daemon(*broken)
    with watching(daemon) as watch:
        began = time.monotonic()
        assert watch.next(1.0) is None
        assert time.monotonic() - began < WAIT_S
        assert 2 <= len(daemon.made) <= 5
        assert not watch.connected


def test_a_full_daemon_is_asked_again_and_one_that_never_will_is_not() -> None:
    full, denied = Connection(), Connection()
    full.told.put(Refused("limit", "8 watchers are there", 8))
    denied.told.put(Refused("bad_argument", "a fingerprint has 32 bytes", 3))
    watch = watching(Daemon(full, denied))
    with pytest.raises(WatchRefusedError, match="32 bytes") as raised:
        next(watch)
    assert raised.value.reason == "bad_argument"
    assert list(watch) == []


def test_garbage_is_a_broken_connection() -> None:
    first, second = Connection(), Connection()
    first.told.put(b"\xff\xff\xff")
    second.say(pb.EVENT_KIND_STORED, 1)
    with watching(Daemon(first, second)) as watch:
        assert next(watch).kind is EventKind.STORED


def test_another_thread_may_close_it() -> None:
    daemon = Daemon(Connection())
    watch = watching(daemon)
    seen: list[object] = []
    thread = threading.Thread(target=lambda: seen.extend(watch))
    thread.start()
    assert wait_until(lambda: bool(daemon.made))
    watch.close()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert seen == []


def test_renewing_asks_for_the_namespaces_of_now() -> None:
    names = [NS]
    first, second = Connection(), Connection()
    daemon = Daemon(first, second)
    watch = Watch(daemon.connect, lambda: list(names), snapshot=True, keepalive_s=5.0)
    with watch:
        first.say(pb.EVENT_KIND_SNAPSHOT_END, 3)
        next(watch)
        names.append(b"m" * 32)
        watch.renew()
        second.say(pb.EVENT_KIND_STORED, 4)
        next(watch)
    assert list(second.request.fingerprints) == names
    assert second.request.incarnation == b""


@pytest.mark.parametrize("keepalive_s", [0.0, 1e9])
def test_a_client_refuses_silence_of_no_use(keepalive_s: float) -> None:
    with Client("unix:///nowhere") as client, pytest.raises(ValueError, match="keepalive_s"):
        client.watch(keepalive_s=keepalive_s)
