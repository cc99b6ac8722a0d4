"""WatchEvents on a real daemon: who sees what, slow ones, places, signs of life, the end."""

from __future__ import annotations

import json
import queue
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest

from prefixcache.server.app import Daemon
from prefixcache.v1 import admin_pb2 as pb
from prefixcache.v1 import admin_pb2_grpc
from prefixcache.v1 import common_pb2 as common
from tests.contract.conftest import Worker, namespace_spec, new_id, new_keys, start_daemon, stop_daemon
from tests.contract.drivers import GrpcDriver, LocalDriver, grpc_failure
from tests.e2e.processes import wait_until

DEADLINE_S = 20.0
END = object()


class Watching:
    """One stream, read by a thread, so that a test can wait for what it expects."""

    def __init__(self, daemon: Daemon, **wish: Any) -> None:
        self.channel = grpc.insecure_channel(f"unix:{daemon.config.socket}")
        self.call = admin_pb2_grpc.AdminServiceStub(self.channel).WatchEvents(pb.WatchEventsRequest(**wish))
        self.told: queue.Queue[Any] = queue.Queue()
        self.failure: Any = None
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        try:
            for message in self.call:
                self.told.put(message)
        except grpc.RpcError as error:
            self.failure = error
        self.told.put(END)

    def next(self) -> pb.WatchEventsResponse:
        message = self.told.get(timeout=DEADLINE_S)
        assert message is not END, self.failure
        assert isinstance(message, pb.WatchEventsResponse)
        return message

    def until(self, kind: int) -> list[pb.WatchEventsResponse]:
        """Everything up to the first message of a kind."""
        told = [self.next()]
        while told[-1].kind != kind:
            told.append(self.next())
        return told

    def refusal(self) -> Any:
        """How it ended."""
        while self.told.get(timeout=DEADLINE_S) is not END:
            pass
        return grpc_failure(self.failure)

    def close(self) -> None:
        self.call.cancel()
        self.channel.close()
        self.thread.join(DEADLINE_S)


@pytest.fixture
def watch(daemon: Daemon) -> Iterator[Callable[..., Watching]]:
    made: list[Watching] = []

    def make(**wish: Any) -> Watching:
        made.append(Watching(daemon, **wish))
        return made[-1]

    yield make
    for each in made:
        each.close()
    assert wait_until(lambda: counter(daemon, "watchers") == 0)


def counter(daemon: Daemon, name: str) -> int:
    return next(each.value for each in daemon.statistics.snapshot().counters if each.name == name)


def store(daemon: Daemon, spec: common.NamespaceSpec, keys: bytes) -> None:
    driver = LocalDriver(daemon.place.local_path)
    worker, reservation = Worker(driver, spec), new_id()
    worker.reserve(reservation, keys)
    worker.commit(reservation)
    driver.close()


def test_stored_and_evicted_blocks_are_told_with_keys_parents_and_tiers(
    daemon: Daemon, watch: Callable[..., Watching]
) -> None:
    spec, keys = namespace_spec(label="Llama"), new_keys(3)
    watching = watch(fingerprints=[spec.fingerprint])
    first = watching.next()
    assert (first.kind, first.incarnation) == (pb.EVENT_KIND_KEEPALIVE, daemon.shell.incarnation)
    store(daemon, spec, keys)
    name, stored = watching.next(), watching.next()
    assert (name.kind, name.label, name.block_tokens) == (pb.EVENT_KIND_NAMESPACE, "Llama", spec.block_tokens)
    assert (stored.kind, stored.tier) == (pb.EVENT_KIND_STORED, common.TIER_HOST)
    assert (stored.fingerprint, stored.keys, stored.parent, stored.first_block) == (spec.fingerprint, keys, b"", 0)
    with closing(GrpcDriver(f"unix:{daemon.config.socket}")) as admin:
        admin.call("Evict", pb.EvictRequest(fingerprint=spec.fingerprint, keys=keys[:64]))
    gone = watching.next()
    assert (gone.kind, gone.keys, gone.parent, gone.first_block) == (
        pb.EVENT_KIND_REMOVED, keys[32:], keys[:32], 1,
    )  # fmt: skip
    assert first.sequence < stored.sequence < gone.sequence


def test_a_snapshot_tells_what_is_held_and_nothing_of_others(daemon: Daemon, watch: Callable[..., Watching]) -> None:
    mine, other = namespace_spec(), namespace_spec(label="somebody else's")
    keys = new_keys(4)
    store(daemon, mine, keys)
    store(daemon, other, new_keys(4))
    watching = watch(fingerprints=[mine.fingerprint], snapshot=True)
    told = watching.until(pb.EVENT_KIND_SNAPSHOT_END)
    assert [each.kind for each in told] == [
        pb.EVENT_KIND_SNAPSHOT_BEGIN, pb.EVENT_KIND_NAMESPACE, pb.EVENT_KIND_STORED, pb.EVENT_KIND_SNAPSHOT_END,
    ]  # fmt: skip
    assert (told[2].keys, told[2].snapshot) == (keys, True)
    store(daemon, other, new_keys(4))
    more = new_keys(1)
    store(daemon, mine, more)
    assert watching.next().keys == more


def test_who_names_no_namespace_sees_all_with_keys_cut_short(daemon: Daemon, watch: Callable[..., Watching]) -> None:
    spec, keys = namespace_spec(), new_keys(2)
    watching = watch()
    watching.next()
    store(daemon, spec, keys)
    stored = watching.until(pb.EVENT_KIND_STORED)[-1]
    assert (stored.keys, stored.key_bytes) == (keys[:8] + keys[32:40], 8)


def test_a_stream_goes_on_where_it_was(daemon: Daemon, watch: Callable[..., Watching]) -> None:
    spec = namespace_spec()
    before = watch(fingerprints=[spec.fingerprint])
    seen = before.next()
    before.close()
    keys = new_keys(2)
    store(daemon, spec, keys)
    resumed = counter(daemon, "watch_resumed")
    after = watch(
        fingerprints=[spec.fingerprint], incarnation=seen.incarnation, after=seen.sequence, snapshot=True
    )  # fmt: skip
    told = after.until(pb.EVENT_KIND_STORED)
    assert told[0].kind == pb.EVENT_KIND_KEEPALIVE
    assert told[-1].keys == keys
    assert counter(daemon, "watch_resumed") == resumed + 1
    other = watch(fingerprints=[spec.fingerprint], incarnation=new_id(), after=1)
    assert (other.next().kind, other.failure) == (pb.EVENT_KIND_GAP, None)


def test_a_watcher_that_reads_nothing_costs_only_itself(tmp_path: Path) -> None:
    daemon = start_daemon(tmp_path, event_log_bytes="64KiB", host_bytes="32MiB")
    spec = namespace_spec()
    watching = Watching(daemon, fingerprints=[spec.fingerprint], snapshot=True)
    watching.until(pb.EVENT_KIND_SNAPSHOT_END)
    with daemon.watchers._lock:
        (stream,) = daemon.watchers._streams
    stream.ring, ring = lambda: None, stream.ring  # type: ignore[method-assign]  # it sleeps through all of it
    for _ in range(20):
        store(daemon, spec, new_keys(200))
    last = new_keys(1)
    store(daemon, spec, last)
    stream.ring = ring  # type: ignore[method-assign]  # and wakes
    ring()
    told = watching.until(pb.EVENT_KIND_SNAPSHOT_END)
    gap = next(each for each in told if each.kind == pb.EVENT_KIND_GAP)
    assert gap.lost > 0
    assert counter(daemon, "watch_events_lost") == gap.lost
    held = {key for each in told if each.snapshot for key in split(each.keys)}
    assert last in held
    with daemon.owner.lock:
        assert len(held) == daemon.planner.state.by_fingerprint[spec.fingerprint].table.used
    watching.close()
    stop_daemon(daemon)


def split(keys: bytes) -> list[bytes]:
    return [keys[at : at + 32] for at in range(0, len(keys), 32)]


def test_a_sign_of_life_comes_in_silence(watch: Callable[..., Watching]) -> None:
    watching = watch(keepalive_ms=100, fingerprints=[bytes(32)])
    assert [watching.next().kind for _ in range(3)] == [pb.EVENT_KIND_KEEPALIVE] * 3


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        ({"fingerprints": [b"short"]}, common.REASON_BAD_ARGUMENT),
        ({"fingerprints": [bytes(32)] * 65}, common.REASON_LIMIT),
        ({"incarnation": b"x"}, common.REASON_BAD_ARGUMENT),
        ({"keepalive_ms": 5}, common.REASON_BAD_ARGUMENT),
    ],
)
def test_bad_wishes_are_refused(watch: Callable[..., Watching], wish: dict[str, Any], reason: int) -> None:
    failure = watch(**wish).refusal()
    assert failure.reason == reason
    assert failure.message


def test_places_are_bounded_and_come_back(tmp_path: Path) -> None:
    daemon = start_daemon(tmp_path, max_watchers=1)
    first = Watching(daemon)
    first.next()
    refused = Watching(daemon)
    failure = refused.refusal()
    assert (failure.code, failure.reason) == (8, common.REASON_LIMIT)
    assert "max_watchers" in failure.message
    refused.close()
    first.close()
    assert wait_until(lambda: counter(daemon, "watchers") == 0)
    second = Watching(daemon)
    second.next()
    second.close()
    stop_daemon(daemon)


def test_all_streams_end_with_the_server_and_are_told_why(tmp_path: Path) -> None:
    daemon = start_daemon(tmp_path)
    watching = Watching(daemon)
    watching.next()
    stop_daemon(daemon)
    failure = watching.refusal()
    assert (failure.code, failure.reason) == (14, common.REASON_DRAINING)
    watching.close()


def test_metrics_tell_of_watchers_and_of_what_they_lost(daemon: Daemon, watch: Callable[..., Watching]) -> None:
    watch().next()
    store(daemon, namespace_spec(), new_keys(1))
    address = next(each for each in daemon.addresses if each.startswith("http://"))
    text = urllib.request.urlopen(f"{address}/metrics", timeout=DEADLINE_S).read().decode()
    values = {line.split()[0]: line.split()[-1] for line in text.splitlines() if not line.startswith("#")}
    assert float(values["prefixcache_watchers"]) == 1
    assert float(values["prefixcache_events_total"]) >= 1
    assert float(values["prefixcache_watch_events_lost_total"]) >= 0
    assert float(values["prefixcache_watch_gaps_total"]) >= 0
    shown = json.loads(urllib.request.urlopen(f"{address}/stats.json", timeout=DEADLINE_S).read())
    assert "watchers" in json.dumps(shown)
