"""Servers that are missing, slow, frozen, lying or restarted: every one is a miss with a reason, in time."""

import time
from pathlib import Path

import numpy as np
import pytest

from prefixcache.v1 import common_pb2, local_pb2
from prefixcache_client import Client, ClientOptions, Namespace
from tests.unit.client.conftest import BLOCKS, TOKENS, MakeClient, block_data, stored
from tests.unit.client.fake_daemon import FakeDaemon, wait_until


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_no_server_at_all(kind: str, tmp_path: Path, ns: Namespace) -> None:
    client = Client(f"unix://{tmp_path}/none.sock" if kind == "unix" else "127.0.0.1:1")
    began = time.monotonic()
    assert client.acquire(ns, TOKENS).reason == "server_unavailable"
    assert client.store(ns, TOKENS, block_data(ns)).reason == "server_unavailable"
    assert client.lookup(ns, TOKENS).reason == "server_unavailable"
    assert client.acquire(ns, TOKENS).reason == "circuit_open"
    assert time.monotonic() - began < 3
    stats = client.stats()
    assert (stats.breaker, stats.breaker_opened, stats.transport) == ("open", 1, "")
    assert stats.missed == {"server_unavailable": 96, "circuit_open": 96, "partial_block": 8}
    client.close()


def test_a_server_that_comes_later_is_found(tmp_path: Path, ns: Namespace) -> None:
    path = str(tmp_path / "late.sock")
    with Client(f"unix://{path}", ClientOptions(breaker_open_s=0.02, breaker_max_open_s=0.05)) as client:
        for _ in range(5):
            assert client.acquire(ns, TOKENS).tokens == 0
        with FakeDaemon(path):
            wait_until(lambda: client.store(ns, TOKENS, block_data(ns)).stored_blocks == BLOCKS)
            assert client.stats().breaker == "closed"


def test_a_frozen_server_costs_one_deadline_a_call_and_then_nothing(
    make_client: MakeClient, ns: Namespace, daemon: FakeDaemon
) -> None:
    client = make_client(timeout_s=0.2, store_timeout_s=0.2, breaker_open_s=0.3)
    stored(client, ns)
    daemon.faults.thaw.clear()
    began = time.monotonic()
    assert [client.acquire(ns, TOKENS).reason for _ in range(3)] == ["deadline"] * 3
    took = time.monotonic() - began
    assert 0.55 < took < 2
    began = time.monotonic()
    assert [client.acquire(ns, TOKENS).reason for _ in range(100)] == ["circuit_open"] * 100
    assert time.monotonic() - began < 0.25
    daemon.faults.thaw.set()
    wait_until(lambda: client.acquire(ns, TOKENS).tokens == 96)
    assert client.stats().connects == 1, "the session outlived the freeze"


def test_leases_of_late_answers_are_given_back(make_client: MakeClient, ns: Namespace, daemon: FakeDaemon) -> None:
    client = make_client(timeout_s=0.2)
    stored(client, ns)
    daemon.faults.thaw.clear()
    assert client.acquire(ns, TOKENS).reason == "deadline"
    daemon.faults.thaw.set()
    wait_until(lambda: daemon.released)
    assert daemon.leases == {}, "the lease was granted after all, and released unseen"


def test_a_slow_server_is_waited_for_as_long_as_was_said(client: Client, ns: Namespace, daemon: FakeDaemon) -> None:
    stored(client, ns)
    daemon.faults.delay_s = 0.15
    assert client.acquire(ns, TOKENS, timeout_s=0.05).reason == "deadline"
    with client.acquire(ns, TOKENS, timeout_s=5.0) as lease:
        assert lease.tokens == 96


@pytest.mark.parametrize("fault", ["truncate", "garbage", "wrong_method"])
def test_a_lying_server_costs_a_connection(local_client: Client, ns: Namespace, daemon: FakeDaemon, fault: str) -> None:
    data = stored(local_client, ns)
    setattr(daemon.faults, fault, True)
    with local_client.acquire(ns, TOKENS) as lease:
        hit = lease.tokens
    with local_client.acquire(ns, TOKENS) as lease:
        assert lease.copy_to(data).ok
    assert hit in (0, 96), "0, or the answer of a second attempt on a new connection"
    assert local_client.stats().breaker == "closed"


def test_slots_outside_of_the_pool_are_not_read(local_client: Client, ns: Namespace, daemon: FakeDaemon) -> None:
    data = stored(local_client, ns)
    daemon.faults.bad_slots = True
    with local_client.acquire(ns, TOKENS) as lease:
        result = lease.copy_to(np.zeros_like(data))
        assert (result.ok, result.tokens) == (False, 0)
    daemon.faults.odd_runs = True
    with local_client.acquire(ns, TOKENS) as lease:
        assert not lease.copy_to(np.zeros_like(data))
        assert lease.parts() == range(0)
        assert not lease.valid()
        with pytest.raises(IndexError):
            lease.view(0)


def test_a_slot_with_another_owner_is_a_lost_lease(local_client: Client, ns: Namespace, daemon: FakeDaemon) -> None:
    data = stored(local_client, ns)
    daemon.faults.steal = True
    with local_client.acquire(ns, TOKENS) as lease:
        assert lease.tokens == 96
        result = lease.copy_to(np.zeros_like(data))
        assert (result.ok, result.tokens, result.reason) == (False, 0, "lease_lost")
        assert not lease.valid()
    local_client.lookup(ns, TOKENS)
    wait_until(lambda: daemon.released)
    assert daemon.released[-1][1:] == (0, common_pb2.REASON_LEASE_LOST)
    assert local_client.stats().missed == {"lease_lost": 96, "partial_block": 4}


def test_a_reserved_slot_with_another_owner(local_client: Client, ns: Namespace, daemon: FakeDaemon) -> None:
    local_client.lookup(ns, TOKENS)
    daemon.faults.steal = True
    result = local_client.store(ns, TOKENS, block_data(ns))
    assert (result.stored_blocks, result.reason) == (0, "reservation_expired")
    assert result.refused == {"reservation_expired": BLOCKS}
    local_client.lookup(ns, TOKENS)
    assert daemon.calls[local_pb2.METHOD_COMMIT] == 0
    assert len(daemon.aborted) == 1


def test_refusals_are_reasons_and_do_not_open_the_breaker(client: Client, ns: Namespace, daemon: FakeDaemon) -> None:
    client.lookup(ns, TOKENS)
    daemon.faults.refuse = {
        local_pb2.METHOD_ACQUIRE: common_pb2.REASON_DRAINING,
        local_pb2.METHOD_RESERVE: common_pb2.REASON_LIMIT,
        local_pb2.METHOD_LOOKUP: 9999,
    }
    for _ in range(5):
        assert client.acquire(ns, TOKENS).reason == "draining"
    assert client.store(ns, TOKENS, block_data(ns)).reason == "limit"
    assert client.lookup(ns, TOKENS).reason == "reason_9999"
    assert client.stats().breaker == "closed"


def test_what_a_person_should_know_is_logged_once(
    local_client: Client, ns: Namespace, daemon: FakeDaemon, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    daemon.faults.refuse = {local_pb2.METHOD_OPEN_NAMESPACE: common_pb2.REASON_BAD_LAYOUT}
    for _ in range(3):
        assert local_client.acquire(ns, TOKENS).reason == "bad_layout"
    assert [record.message for record in caplog.records if "bad_layout" in record.message] == [
        f"unix:{daemon.path} refuses (bad_layout, told once): refused by the fake"
    ]
    caplog.clear()
    with Client(f"unix://{tmp_path}/none", ClientOptions(breaker_open_s=0.001, breaker_max_open_s=0.002)) as lonely:
        wait_until(lambda: not lonely.acquire(ns, TOKENS) and lonely.stats().breaker_opened > 3)
    assert len([record for record in caplog.records if "left alone" in record.message]) == 1


def test_a_commit_that_is_refused(client: Client, ns: Namespace, daemon: FakeDaemon) -> None:
    daemon.faults.refuse = {local_pb2.METHOD_COMMIT: common_pb2.REASON_RESERVATION_EXPIRED}
    result = client.store(ns, TOKENS, block_data(ns))
    assert (result.stored_blocks, result.reason) == (0, "reservation_expired")
    wait_until(lambda: daemon.aborted)


def test_another_idea_of_a_block_is_a_mismatch(client: Client, ns: Namespace, daemon: FakeDaemon) -> None:
    daemon.faults.wrong_bytes = True
    assert client.acquire(ns, TOKENS).reason == "namespace_mismatch"


def test_a_restarted_server_is_a_miss_and_then_as_before(client: Client, ns: Namespace, daemon: FakeDaemon) -> None:
    data = stored(client, ns)
    lease = client.acquire(ns, TOKENS)
    daemon.restart()
    assert lease.copy_to(np.zeros_like(data)).reason in ("lease_lost", "lease_unknown")
    lease.release()
    wait_until(lambda: client.acquire(ns, TOKENS).reason == "not_cached")
    stored(client, ns)
    with client.acquire(ns, TOKENS) as again:
        assert again.copy_to(np.zeros_like(data)).ok
    assert client.stats().connects == 2


def test_mappings_go_with_the_connection(local_client: Client, ns: Namespace, daemon: FakeDaemon) -> None:
    stored(local_client, ns)

    def mapped() -> bool:
        return "prefixcache-pool" in Path("/proc/self/maps").read_text()

    with local_client.acquire(ns, TOKENS) as lease, lease.view(0) as array:
        first = bytes(array)
    daemon.stop()
    wait_until(lambda: local_client.stats().transport == "", 5.0)
    assert bytes(array) == first
    del array, lease
    wait_until(lambda: not mapped(), 5.0)
    daemon.start()


def test_a_server_that_forgot_the_session(make_client: MakeClient, ns: Namespace, daemon: FakeDaemon) -> None:
    client = make_client(local_channel=False)
    stored(client, ns)
    daemon.faults.lose_session = True
    with client.acquire(ns, TOKENS) as lease:
        assert lease.tokens == 96, "a new session was opened and the call made again"
    assert client.stats().connects == 2


def test_a_server_that_forgot_the_namespace(client: Client, ns: Namespace, daemon: FakeDaemon) -> None:
    stored(client, ns)
    daemon.specs = {7: next(iter(daemon.specs.values()))}
    with client.acquire(ns, TOKENS) as lease:
        assert lease.tokens == 96
    assert client.stats().connects == 1


def test_a_lease_that_ran_out_is_lost_even_if_the_bytes_are_still_there(client: Client, ns: Namespace) -> None:
    data = stored(client, ns)
    with client.acquire(ns, TOKENS, ttl_s=0.05) as lease:
        wait_until(lambda: not lease.valid())
        assert lease.copy_to(data).reason == "lease_lost"
        with pytest.raises(RuntimeError, match="lease_lost"):
            lease.view(0).__enter__()
