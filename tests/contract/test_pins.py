"""Pin, Unpin and Prefetch on every transport; what only the operator's service has: lists, gentle eviction."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from prefixcache.server.app import Daemon
from prefixcache.v1 import admin_pb2 as pb
from prefixcache.v1 import cache_pb2
from prefixcache.v1 import common_pb2 as common
from tests.contract.conftest import BLOCK_TOKENS, Worker, new_id, new_keys, start_daemon, stop_daemon
from tests.contract.drivers import Driver, Failure, GrpcDriver, LocalDriver

BLOCK_BYTES = 4096
Store = Callable[[Worker, bytes], None]


@pytest.fixture
def operator(daemon: Daemon) -> Iterator[Driver]:
    driver = GrpcDriver(f"unix:{daemon.config.socket}")
    yield driver
    driver.close()


@pytest.fixture
def writer(daemon: Daemon) -> Iterator[Store]:
    """Stores keys in a worker's namespace, through the local channel: there nobody must have sent the bytes."""
    drivers: list[Driver] = []

    def store(worker: Worker, keys: bytes) -> None:
        drivers.append(LocalDriver(daemon.place.local_path))
        local, reservation = Worker(drivers[-1], worker.spec), new_id()
        local.reserve(reservation, keys)
        local.commit(reservation)

    yield store
    for driver in drivers:
        driver.close()


def pin(worker: Worker, keys: bytes, **fields: Any) -> pb.PinResponse:
    request = pb.PinRequest(fingerprint=worker.spec.fingerprint, keys=keys, **fields)
    answer: pb.PinResponse = worker.driver.call("Pin", request)
    return answer


def fill_the_pool(worker: Worker, writer: Store) -> None:
    """More than memory holds."""
    for _ in range(3):
        writer(worker, new_keys(1024))


def listed(operator: Driver) -> dict[bytes, pb.PinDescription]:
    return {each.pin: each for each in operator.call("ListPins", pb.ListPinsRequest()).pins}


def test_a_pinned_prefix_stays_and_may_go_when_it_is_unpinned(worker: Worker, writer: Store, operator: Driver) -> None:
    keys = new_keys(4)
    writer(worker, keys)
    pinned = pin(worker, keys, label="system prompt v3", forever=True)
    assert (pinned.tokens, pinned.wanted_tokens) == (4 * BLOCK_TOKENS, 4 * BLOCK_TOKENS)
    assert (pinned.size_bytes, pinned.ttl_ms) == (4 * BLOCK_BYTES, 0)
    fill_the_pool(worker, writer)
    assert worker.acquire(keys).planned_blocks == 4
    shown = listed(operator)[pinned.pin]
    assert (shown.label, shown.fingerprint) == ("system prompt v3", worker.spec.fingerprint)
    assert (shown.tokens, shown.host_tokens, shown.disk_tokens) == (64, 64, 0)
    assert shown.short_key == keys[-32:][:8].hex()
    worker.driver.call("Unpin", pb.UnpinRequest(pin=pinned.pin))
    with pytest.raises(Failure) as refused:
        worker.driver.call("Unpin", pb.UnpinRequest(pin=pinned.pin))
    assert (refused.value.code, refused.value.reason) == (5, common.REASON_PIN_UNKNOWN)


def test_a_prefix_is_pinned_before_it_is_stored(worker: Worker, writer: Store) -> None:
    keys = new_keys(3)
    assert pin(worker, keys).tokens == 0
    writer(worker, keys)
    fill_the_pool(worker, writer)
    assert worker.acquire(keys).planned_blocks == 3


def test_a_pin_takes_the_default_time_and_the_same_prefix_is_the_same_pin(worker: Worker, operator: Driver) -> None:
    keys = new_keys(2)
    first = pin(worker, keys)
    assert first.ttl_ms == 86_400_000
    again = pin(worker, keys, ttl_ms=5_000, label="shorter")
    assert again.pin == first.pin
    shown = listed(operator)[first.pin]
    assert (shown.label, shown.wanted_tokens) == ("shorter", 32)
    assert 0 < shown.ttl_ms <= 5_000


def test_a_pin_that_does_not_fit_says_what_would_do(worker: Worker) -> None:
    with pytest.raises(Failure) as refused:
        pin(worker, new_keys(8 << 20 >> 12), label="all of it")
    assert (refused.value.code, refused.value.reason) == (8, common.REASON_PIN_BUDGET)
    assert "raise pin_bytes" in refused.value.message


def test_bad_pins_are_refused_with_a_reason(worker: Worker) -> None:
    for fields, reason in (
        ({"keys": b""}, common.REASON_BAD_ARGUMENT),
        ({"keys": b"x" * 33}, common.REASON_BAD_KEYS),
        ({"keys": new_keys(1), "label": "x" * 201}, common.REASON_BAD_ARGUMENT),
        ({"keys": new_keys(1), "forever": True, "ttl_ms": 5}, common.REASON_BAD_ARGUMENT),
    ):
        with pytest.raises(Failure) as refused:
            pin(worker, **fields)  # type: ignore[arg-type]  # fields of several types
        assert refused.value.reason == reason
    with pytest.raises(Failure) as refused:
        worker.driver.call("Pin", pb.PinRequest(fingerprint=bytes(32), keys=new_keys(1)))
    assert refused.value.reason == common.REASON_NAMESPACE_UNKNOWN


def test_prefetch_says_what_is_there(worker: Worker, writer: Store) -> None:
    keys = new_keys(3)
    writer(worker, keys)
    by_name = pb.PrefetchRequest(fingerprint=worker.spec.fingerprint, keys=keys + new_keys(1))
    answer = worker.driver.call("Prefetch", by_name)
    assert (answer.tokens, answer.ready_tokens, answer.stop) == (0, 48, common.REASON_UNSPECIFIED)
    by_number = pb.PrefetchRequest(namespace_id=worker.namespace, keys=keys)
    assert worker.driver.call("Prefetch", by_number).ready_tokens == 48
    for request in (pb.PrefetchRequest(keys=keys), pb.PrefetchRequest(namespace_id=worker.namespace)):
        with pytest.raises(Failure) as refused:
            worker.driver.call("Prefetch", request)
        assert refused.value.code == 3


def test_evicting_gently_stops_at_a_pin_and_a_clear_ends_it(worker: Worker, writer: Store, operator: Driver) -> None:
    keys = new_keys(4)
    writer(worker, keys)
    pinned = pin(worker, keys)
    request = pb.EvictRequest(fingerprint=worker.spec.fingerprint, keys=keys, own_tail=True, gently=True)
    with pytest.raises(Failure) as refused:
        operator.call("Evict", request)
    assert (refused.value.code, refused.value.reason) == (9, common.REASON_IN_USE)
    assert pinned.pin in listed(operator)
    assert operator.call("Evict", pb.EvictRequest(fingerprint=worker.spec.fingerprint)).blocks == 4
    assert pinned.pin not in listed(operator)


def test_prefixes_are_listed_by_use_with_where_prompts_part(worker: Worker, writer: Store, operator: Driver) -> None:
    shared, one, two = new_keys(2), new_keys(2), new_keys(3)
    writer(worker, shared + one)
    writer(worker, shared + two)
    for keys, times in ((shared + one, 3), (shared + two, 1)):
        for _ in range(times):
            lease = new_id()
            worker.acquire(keys, lease=lease)
            worker.release(lease, len(keys) // 32)
    pin(worker, shared, label="shared")
    only = pb.ListPrefixesRequest(fingerprint=worker.spec.fingerprint)
    answer = operator.call("ListPrefixes", only)
    told = [(each.short_key, each.hits, each.tokens, each.hit_tokens) for each in answer.prefixes]
    assert told == [
        (one[-32:][:8].hex(), 3, 64, 192),
        (shared[-32:][:8].hex(), 4, 32, 128),
        (two[-32:][:8].hex(), 1, 80, 80),
    ]
    first = answer.prefixes[1]
    assert (first.label, first.blocks, first.size_bytes, list(first.pins)) == ("test", 2, 2 * BLOCK_BYTES, ["shared"])
    assert (first.tiers.host, first.tiers.disk) == (32, 0)
    assert not answer.truncated
    only.limit = 2
    assert operator.call("ListPrefixes", only).next_offset == 2
    only.offset = 2
    only.order = pb.PREFIX_ORDER_LARGEST
    page = operator.call("ListPrefixes", only)
    assert (len(page.prefixes), page.next_offset) == (1, 0)
    assert page.prefixes[0].short_key == shared[-32:][:8].hex()


def test_what_was_stored_with_low_priority_goes_first_and_high_last(tmp_path: Path) -> None:
    daemon = start_daemon(tmp_path)
    with closing(LocalDriver(daemon.place.local_path)) as driver:
        local = Worker(driver)
        keys = {}
        for priority in (cache_pb2.PRIORITY_HIGH, cache_pb2.PRIORITY_NORMAL, cache_pb2.PRIORITY_LOW):
            keys[priority], reservation = new_keys(200), new_id()
            local.reserve(reservation, keys[priority], priority=priority)
            local.commit(reservation)

        def left_after(blocks: int) -> list[int]:
            reservation = new_id()
            local.reserve(reservation, new_keys(blocks), priority=cache_pb2.PRIORITY_HIGH)
            leases = [(new_id(), each) for each in keys.values()]
            found = [local.acquire(each, lease=lease).planned_blocks for lease, each in leases]
            for (lease, _), blocks in zip(leases, found, strict=True):
                if blocks:
                    local.release(lease, 0)
            local.abort(reservation)
            return found

        room = (8 << 20) // BLOCK_BYTES
        assert left_after(room - 500)[:2] == [200, 200]
        assert left_after(room - 300) == [200, 100, 0]
    stop_daemon(daemon)


def test_status_and_metrics_show_what_is_pinned(tmp_path: Path) -> None:
    daemon = start_daemon(tmp_path)
    driver = GrpcDriver(f"unix:{daemon.config.socket}")
    worker = Worker(driver)
    pin(worker, new_keys(3))
    url = next(each for each in daemon.addresses if each.startswith("http"))
    with urllib.request.urlopen(url + "/stats.json", timeout=20) as answer:
        tier = json.load(answer)["tiers"][0]
    assert (tier["pinned_bytes"], tier["pin_budget_bytes"]) == (3 * BLOCK_BYTES, 2 << 20)
    with urllib.request.urlopen(url + "/metrics", timeout=20) as answer:
        text = answer.read().decode()
    assert 'prefixcache_tier_bytes{kind="pinned",tier="host"} 12288.0' in text
    assert "prefixcache_pins 1.0" in text
    driver.close()
    stop_daemon(daemon)
