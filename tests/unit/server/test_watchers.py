"""All watchers: places, bells, and who is cut off."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from prefixcache.core.commands import Change, Published
from prefixcache.core.ids import Tier
from prefixcache.core.planner import Planner
from prefixcache.core.spec import PlannerConfig, PoolSpec
from prefixcache.server.config import load
from prefixcache.server.errors import CallError
from prefixcache.server.loop import Owner
from prefixcache.server.service import Shell
from prefixcache.server.watch import Source, Watch, Wish
from prefixcache.server.watchers import Watchers, WatchStream
from prefixcache.v1 import admin_pb2 as pb
from prefixcache.v1 import common_pb2 as common

EVENT = Published(Change.STORED, 1, bytes(32), bytes(32), b"", 0, Tier.HOST)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def made(clock: Clock, **flags: Any) -> Watchers:
    config = load({"socket": "/tmp/none.sock", "host_bytes": "1MiB", **flags}, environ={}).config
    planner = Planner(PlannerConfig((PoolSpec(1 << 20, 1 << 16),)))
    shell = Shell(config, "test", Owner(planner, {}, clock), {})
    return Watchers(shell, planner.state)


def counters(watchers: Watchers) -> dict[str, int]:
    return {each.name: each.value for each in watchers.counters()}


def opened(watchers: Watchers, **wish: Any) -> WatchStream:
    stream = watchers.watch(None, pb.WatchEventsRequest(**wish))
    assert isinstance(stream, WatchStream)
    return stream


def test_a_place_is_taken_until_the_stream_ends() -> None:
    watchers = made(Clock(), max_watchers=1)
    stream = opened(watchers)
    with pytest.raises(CallError, match="max_watchers") as refused:
        opened(watchers)
    assert refused.value.reason == common.REASON_LIMIT
    watchers.left(stream)
    watchers.left(stream)
    opened(watchers)
    assert counters(watchers)["watchers"] == 1


def test_every_event_is_logged_and_rings() -> None:
    watchers = made(Clock())
    stream = opened(watchers)
    iterator = iter(stream)
    assert next(iterator).kind == pb.EVENT_KIND_KEEPALIVE
    watchers.orders[Published](EVENT)
    watchers.orders[Published](EVENT)
    assert [next(iterator).kind for _ in range(3)] == [
        pb.EVENT_KIND_NAMESPACE, pb.EVENT_KIND_STORED, pb.EVENT_KIND_STORED,
    ]  # fmt: skip
    assert counters(watchers)["events"] == 2
    iterator.close()  # type: ignore[attr-defined]  # it is a generator


def test_who_takes_nothing_for_a_minute_is_cut_off() -> None:
    clock = Clock()
    watchers = made(clock)
    stream, other = opened(watchers), opened(watchers)
    cut = threading.Event()
    stream.cut_off = cut.set
    iterator = iter(stream)
    next(iterator)  # it is on its way until the next is asked for
    clock.now += 59.0
    watchers.look()
    assert not cut.is_set()
    clock.now += 2.0
    watchers.look()
    assert cut.is_set()
    assert list(iterator) == []
    assert (counters(watchers)["watchers"], counters(watchers)["watchers_stalled"]) == (1, 1)
    assert not other.is_stalled()


def test_a_watcher_that_left_ends() -> None:
    watchers = made(Clock())
    stream = opened(watchers)
    iterator = iter(stream)
    next(iterator)
    stream.cancel()
    assert list(iterator) == []


def test_the_end_of_the_server_ends_all() -> None:
    watchers = made(Clock())
    iterator = iter(opened(watchers))
    next(iterator)
    watchers.close()
    with pytest.raises(CallError) as ended:
        next(iterator)
    assert ended.value.reason == common.REASON_DRAINING
    with pytest.raises(CallError) as refused:
        opened(watchers)
    assert refused.value.reason == common.REASON_DRAINING


@pytest.mark.parametrize(("full", "size"), [(True, 32), (False, 8)])
def test_whole_keys_are_a_setting(*, full: bool, size: int) -> None:
    watchers = made(Clock(), watch_full_keys=full)
    iterator = iter(opened(watchers, fingerprints=[bytes(32)]))
    next(iterator)
    watchers.orders[Published](EVENT)
    assert [next(iterator) for _ in range(2)][-1].key_bytes == size
    iterator.close()  # type: ignore[attr-defined]  # it is a generator


def test_silence_is_broken_at_its_time() -> None:
    clock = Clock()
    watchers = made(clock)
    source = Source(watchers.log, watchers._source.state, threading.RLock(), b"i" * 16)
    stream = WatchStream(Watch(source, Wish()), 0.0, clock, threading.Event())
    iterator = iter(stream)
    assert [next(iterator).kind for _ in range(3)] == [pb.EVENT_KIND_KEEPALIVE] * 3
    iterator.close()  # type: ignore[attr-defined]  # it is a generator
