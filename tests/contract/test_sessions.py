"""How sessions, leases and reservations end: by word, by time, by hanging up."""

from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from prefixcache.server.app import Daemon
from prefixcache.v1 import cache_pb2 as pb
from prefixcache.v1 import common_pb2 as common
from tests.contract.conftest import Worker, namespace_spec, new_id, new_keys, start_daemon, stop_daemon
from tests.contract.drivers import Failure, GrpcDriver, LocalDriver, raw
from tests.e2e.processes import wait_until

EXHAUSTED = 8


@pytest.fixture
def short(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon that does not wait long and does not take many."""
    daemon = start_daemon(
        tmp_path, session_ttl="300ms", max_sessions=3, max_leases=2, max_reservations=2, max_keys=64,
        max_namespaces=2,
    )  # fmt: skip
    yield daemon
    stop_daemon(daemon)


@pytest.fixture
def driver(short: Daemon) -> Iterator[GrpcDriver]:
    driver = GrpcDriver(f"unix:{short.config.socket}")
    yield driver
    driver.close()


@pytest.fixture
def local(short: Daemon) -> Iterator[LocalDriver]:
    driver = LocalDriver(short.place.local_path)
    yield driver
    driver.close()


def commit_some(worker: Worker, keys: bytes) -> None:
    """Make blocks visible from a session that could map the pool."""
    reservation = new_id()
    assert worker.reserve(reservation, keys).grants
    worker.commit(reservation)


def test_a_silent_grpc_session_ends_and_its_slots_are_free(short: Daemon, driver: GrpcDriver) -> None:
    worker = Worker(driver)
    reservation, keys = new_id(), new_keys(2)
    assert worker.reserve(reservation, keys).grants
    assert short.statistics.snapshot().tiers[0].filling_bytes > 0
    assert wait_until(lambda: not len(short.shell.sessions))
    with pytest.raises(Failure) as refused:
        worker.commit(reservation)
    assert refused.value.reason == common.REASON_SESSION_UNKNOWN
    tier = short.statistics.snapshot().tiers[0]
    assert (tier.filling_bytes, tier.quarantined_bytes, tier.used_bytes) == (0, 0, 0)


def test_keep_alive_keeps_it(short: Daemon, driver: GrpcDriver) -> None:
    worker = Worker(driver)
    session = next(iter(short.shell.sessions))
    until = short.owner.clock() + 2 * short.config.session_ttl

    def is_over() -> bool:
        driver.call("KeepAlive", pb.KeepAliveRequest(session=worker.session))
        return short.owner.clock() > until

    assert wait_until(is_over)
    assert not session.ended


def test_close_session_ends_it_at_once(short: Daemon, driver: GrpcDriver) -> None:
    worker = Worker(driver)
    worker.reserve(new_id(), new_keys(1))
    driver.call("CloseSession", pb.CloseSessionRequest(session=worker.session))
    assert short.statistics.snapshot().tiers[0].filling_bytes == 0
    with pytest.raises(Failure):
        driver.call("KeepAlive", pb.KeepAliveRequest(session=worker.session))


def test_sessions_are_bounded_on_both_transports(short: Daemon, driver: GrpcDriver) -> None:
    hello = pb.OpenSessionRequest(protocol_min=1, protocol_max=1, ttl_ms=60_000)
    for _ in range(3):
        driver.call("OpenSession", hello)
    extra = LocalDriver(short.place.local_path)
    for client in (driver, extra):
        with pytest.raises(Failure) as refused:
            client.call("OpenSession", hello)
        assert (refused.value.code, refused.value.reason) == (EXHAUSTED, common.REASON_LIMIT)
    extra.close()
    counted = {item.label: item.value for item in short.statistics.snapshot().counters if item.name == "refused_calls"}
    assert counted["OpenSession:limit"] == 2


def test_leases_reservations_namespaces_and_keys_are_bounded(local: LocalDriver) -> None:
    worker = Worker(local)
    keys = new_keys(2)
    commit_some(worker, keys)
    reservations = [new_id(), new_id()]
    for reservation in reservations:
        worker.acquire(keys)
        worker.reserve(reservation, new_keys(1))
    attempts: list[Callable[[], object]] = [
        lambda: worker.acquire(keys),
        lambda: worker.reserve(new_id(), new_keys(1)),
        lambda: open_namespaces(worker, reservations[0]),
    ]
    for attempt in attempts:
        with pytest.raises(Failure) as refused:
            attempt()
        assert (refused.value.code, refused.value.reason) == (EXHAUSTED, common.REASON_LIMIT)
    with pytest.raises(Failure) as refused:
        worker.acquire(new_keys(65))
    assert refused.value.reason in (common.REASON_LIMIT, common.REASON_BAD_KEYS)


def open_namespaces(worker: Worker, in_the_way: bytes) -> None:
    """More namespaces than the bound, each with a block: an empty one would make room."""
    worker.abort(in_the_way)
    for _ in range(3):
        opening = pb.OpenNamespaceRequest(session=worker.session, spec=namespace_spec())
        opened = worker.driver.call("OpenNamespace", opening)
        reservation = new_id()
        worker.reserve(reservation, new_keys(1), namespace_id=opened.namespace_id)
        worker.commit(reservation)


def test_a_lease_runs_out_and_its_tokens_are_missed(short: Daemon, local: LocalDriver) -> None:
    worker = Worker(local)
    keys, lease = new_keys(2), new_id()
    commit_some(worker, keys)
    assert worker.acquire(keys, lease=lease, ttl_ms=50).ttl_ms <= 50
    assert wait_until(lambda: short.statistics.snapshot().tokens.pending == 0)
    with pytest.raises(Failure) as refused:
        worker.release(lease, 2)
    assert refused.value.reason == common.REASON_LEASE_UNKNOWN
    missed = {item.reason: item.count for item in short.statistics.snapshot().tokens.miss}
    assert missed[common.REASON_LEASE_LOST] == 32


def test_a_reservation_runs_out_and_is_quarantined_until_its_writer_says_so(short: Daemon, local: LocalDriver) -> None:
    worker = Worker(local)
    keys, reservation = new_keys(2), new_id()
    granted = worker.reserve(reservation, keys, ttl_ms=50)
    slots = np.frombuffer(granted.grants[0].slots, "<u4")
    assert wait_until(lambda: short.statistics.snapshot().tiers[0].quarantined_bytes > 0)
    again = worker.reserve(new_id(), keys)
    assert not set(slots.tolist()) & set(np.frombuffer(again.grants[0].slots, "<u4").tolist())
    with pytest.raises(Failure) as refused:
        worker.commit(reservation)
    assert refused.value.reason == common.REASON_RESERVATION_EXPIRED
    assert short.statistics.snapshot().tiers[0].quarantined_bytes == 0


def test_a_closed_connection_ends_its_session(short: Daemon, local: LocalDriver) -> None:
    worker = Worker(local)
    keys = new_keys(2)
    commit_some(worker, keys)
    worker.acquire(keys)
    local.close()
    assert wait_until(lambda: short.statistics.snapshot().tokens.pending == 0)
    assert not len(short.shell.sessions)


def test_a_pool_full_of_leased_blocks_grants_nothing_and_says_why(tmp_path: Path) -> None:
    daemon = start_daemon(tmp_path, host_bytes="1MiB")
    driver = LocalDriver(daemon.place.local_path)
    try:
        worker = Worker(driver)
        keys, lease = new_keys(256), new_id()
        commit_some(worker, keys)
        assert worker.acquire(keys, lease=lease).planned_blocks == 256
        refused = worker.reserve(new_id(), new_keys(3))
        assert not refused.grants
        assert [(item.reason, item.count) for item in refused.refused] == [(common.REASON_POOL_FULL, 3)]
        worker.release(lease, 256)
        assert worker.reserve(new_id(), new_keys(3)).grants
        assert worker.acquire(keys).planned_blocks == 253, "a prefix loses its tail first"
    finally:
        driver.close()
        stop_daemon(daemon)


def test_a_grpc_call_with_garbage_is_a_bad_argument(driver: GrpcDriver) -> None:
    method = raw(driver.channel).unary_unary("/prefixcache.v1.CacheService/Acquire")
    with pytest.raises(grpc.RpcError) as refused:
        method(b"\xff\xff\xff garbage", timeout=20)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
