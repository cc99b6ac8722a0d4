"""What a caller sees, on each transport against the fake daemon."""

import gc
import logging
from concurrent.futures import Future

import numpy as np
import pytest

from prefixcache.v1 import common_pb2
from prefixcache_client import Blocks, Client, ClientOptions, LeaseEndedError, Namespace, PromptKeys
from tests.unit.client.conftest import BLOCK_TOKENS, BLOCKS, TOKENS, MakeClient, block_data, stored
from tests.unit.client.fake_daemon import FakeDaemon, wait_until


def test_a_miss_is_a_lease_of_nothing(client: Client, ns: Namespace, daemon: FakeDaemon) -> None:
    with client.acquire(ns, TOKENS) as lease:
        assert (lease.tokens, lease.blocks, lease.reason, bool(lease)) == (0, 0, "not_cached", False)
        result = lease.copy_to(block_data(ns))
        assert (result.ok, result.reason) == (False, "not_cached")
        assert lease.parts() == range(0)
        assert not lease.valid()
    assert daemon.released == [], "a miss has nothing to give back"


def test_what_was_stored_comes_back(client: Client, ns: Namespace, daemon: FakeDaemon) -> None:
    data = stored(client, ns)
    target = np.zeros_like(data)
    with client.acquire(ns, TOKENS) as lease:
        assert (lease.tokens, lease.blocks, lease.reason) == (96, BLOCKS, "")
        result = lease.copy_to(target)
        assert result
        assert (result.tokens, result.size_bytes) == (96, data.nbytes)
        assert lease.valid()
    assert np.array_equal(target, data)
    wait_until(lambda: daemon.released)
    assert [used for _, used, _ in daemon.released] == [BLOCKS]


def test_storing_again_stores_nothing(client: Client, ns: Namespace) -> None:
    data = stored(client, ns)
    again = client.store(ns, TOKENS, data)
    assert (again.stored_blocks, again.refused, again.reason, bool(again)) == (0, {"already_stored": BLOCKS}, "", False)


def test_a_longer_prompt_hits_its_prefix(client: Client, ns: Namespace) -> None:
    data = stored(client, ns)
    with client.acquire(ns, TOKENS[:96] + [7] * 40) as lease:
        assert (lease.tokens, lease.reason) == (96, "not_cached")
        assert lease.copy_to(np.zeros_like(data)).tokens == 96
    with client.acquire(ns, [5, *TOKENS]) as other:
        assert other.tokens == 0


def test_max_tokens_leaves_something_to_compute(client: Client, ns: Namespace) -> None:
    stored(client, ns)
    for max_tokens, tokens in [(96, 96), (95, 80), (16, 16), (15, 0), (0, 0), (1000, 96)]:
        with client.acquire(ns, TOKENS, max_tokens=max_tokens) as lease:
            assert lease.tokens == tokens


def test_from_token_asks_for_the_rest_only(client: Client, ns: Namespace) -> None:
    data = stored(client, ns)
    target = np.zeros_like(data)
    with client.acquire(ns, TOKENS, from_token=40) as lease:
        assert (lease.tokens, lease.from_block, lease.parts()) == (96, 2, range(2, 6))
        assert lease.copy_to(target).tokens == 96
    assert np.array_equal(target[2:], data[2:])
    assert not target[:2].any()


def test_tensors_may_have_room_for_a_part_only(client: Client, ns: Namespace) -> None:
    data = stored(client, ns)
    target = np.zeros_like(data[:2])
    with client.acquire(ns, TOKENS) as lease:
        assert lease.copy_to(Blocks(target, first_block=3)).tokens == 5 * BLOCK_TOKENS
        with pytest.raises(ValueError, match="room"):
            lease.copy_to(Blocks(target, first_block=6))
    assert np.array_equal(target, data[3:5])


def test_a_part_of_a_prompt_is_stored_and_its_end_later(client: Client, ns: Namespace) -> None:
    data = block_data(ns)
    assert client.store(ns, TOKENS, data[:2]).stored_tokens == 32
    assert client.store(ns, TOKENS, Blocks(data[2:], first_block=2)).stored_tokens == 64
    assert client.lookup(ns, TOKENS).tokens == 96


def test_store_from_a_token_on(client: Client, ns: Namespace) -> None:
    data = block_data(ns)
    client.store(ns, TOKENS[:32], data[:2])
    later = client.store(ns, TOKENS, data, from_token=17)
    assert (later.stored_blocks, later.refused) == (4, {})


def test_views_are_read_only_and_outlive_the_lease(client: Client, ns: Namespace) -> None:
    data = stored(client, ns)
    with client.acquire(ns, TOKENS) as lease:
        view = lease.view(1)
        with lease.view(4) as array:
            assert np.array_equal(array, data[4])
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1
            with pytest.raises(ValueError, match=r"WRITEABLE|writeable"):
                array.flags.writeable = True
        with pytest.raises(IndexError):
            lease.view(6)
        with pytest.raises(IndexError):
            lease.view(0, part=1)
    with pytest.raises(LeaseEndedError):
        view.__enter__()
    with pytest.raises(LeaseEndedError):
        lease.view(1)
    client.close()
    gc.collect()
    assert int(array.sum()) == int(data[4].sum()), "an array kept beyond its lease stays readable"


def test_a_released_lease_cannot_be_used(client: Client, ns: Namespace, daemon: FakeDaemon) -> None:
    data = stored(client, ns)
    lease = client.acquire(ns, TOKENS)
    lease.release()
    lease.release()
    with pytest.raises(LeaseEndedError):
        lease.copy_to(data)
    assert not lease.valid()
    client.lookup(ns, TOKENS)
    wait_until(lambda: daemon.released)
    assert len(daemon.released) == 1, "it is given back once"


def test_what_is_told_at_release(client: Client, ns: Namespace, daemon: FakeDaemon) -> None:
    data = stored(client, ns)
    with client.acquire(ns, TOKENS):
        pass
    wait_until(lambda: len(daemon.released) == 1)
    with client.acquire(ns, TOKENS) as lease:
        lease.copy_to(data[:2])
    wait_until(lambda: len(daemon.released) == 2)
    lease = client.acquire(ns, TOKENS)
    lease.copy_to(data)
    lease.release(used_tokens=33)
    wait_until(lambda: len(daemon.released) == 3)
    assert [(used, reason) for _, used, reason in daemon.released] == [
        (0, common_pb2.REASON_UNUSED),
        (2, common_pb2.REASON_UNUSED),
        (2, common_pb2.REASON_UNUSED),
    ]
    assert client.stats().missed == {"partial_block": 12, "unused": 96 + 64 + 64}


def test_a_forgotten_lease_is_given_back_with_a_word(
    client: Client, ns: Namespace, daemon: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    stored(client, ns)
    with caplog.at_level(logging.WARNING, "prefixcache_client"):
        client.acquire(ns, TOKENS)
        gc.collect()
    assert "not released" in caplog.text
    client.lookup(ns, TOKENS)
    wait_until(lambda: daemon.released)
    assert client.stats().leases_left_open == 1


def test_lookup_leases_nothing(client: Client, ns: Namespace, daemon: FakeDaemon) -> None:
    assert client.lookup(ns, TOKENS).reason == "not_cached"
    stored(client, ns)
    found = client.lookup(ns, TOKENS)
    assert (found.tokens, found.tiers, found.nodes, found.reason) == (96, {"host": 96}, {"other": 192}, "")
    assert daemon.leases == {}


def test_prefetch_says_what_is_there_and_what_comes(client: Client, ns: Namespace, daemon: FakeDaemon) -> None:
    stored(client, ns)
    found = client.prefetch(ns, TOKENS)
    assert (found.tokens, found.ready_tokens, found.reason, bool(found)) == (16, 96, "limit", True)
    assert daemon.leases == {}
    assert not client.prefetch(ns, TOKENS[:3])


def test_a_pin_is_asked_for_and_ended(client: Client, ns: Namespace, daemon: FakeDaemon) -> None:
    pin = client.pin(ns, TOKENS, label="system prompt v3", ttl_s=60.0)
    assert (pin.tokens, pin.wanted_tokens, pin.size_bytes, pin.reason) == (16, 96, 1 << 20, "")
    asked = daemon.pinned[-1]
    assert (asked.label, asked.ttl_ms, asked.forever) == ("system prompt v3", 60_000, False)
    assert asked.fingerprint == ns.epoch.fingerprint
    assert client.pin(ns, TOKENS, forever=True)
    assert daemon.pinned[-1].forever
    assert client.unpin(pin) == ""
    assert client.unpin(b"x" * 16) == "pin_unknown"
    for fields in ({"ttl_s": -1.0}, {"ttl_s": 1.0, "forever": True}, {"ttl_s": float("nan")}):
        with pytest.raises(ValueError, match="ttl_s"):
            client.pin(ns, TOKENS, **fields)  # type: ignore[arg-type]  # fields of several types


def test_without_a_daemon_nothing_is_pinned_or_prefetched(make_client: MakeClient, ns: Namespace) -> None:
    with Client("unix:///nowhere/d.sock") as client:
        pin, found = client.pin(ns, TOKENS), client.prefetch(ns, TOKENS)
        assert (bool(pin), pin.reason) == (False, "server_unavailable")
        assert (bool(found), found.reason) == (False, "server_unavailable")
        assert client.unpin(pin) == "server_unavailable"


def test_the_priority_of_a_store_goes_with_it(client: Client, ns: Namespace, daemon: FakeDaemon) -> None:
    data = block_data(ns)
    client.store(ns, TOKENS, data, priority="low")
    client.store(ns, TOKENS, data)
    client.store_later(ns, TOKENS, data, priority="high").result(10)
    assert daemon.priorities == [1, 2, 3]
    with pytest.raises(ValueError, match="low, normal, high"):
        client.store(ns, TOKENS, data, priority="urgent")  # type: ignore[arg-type]  # the mistake that is tested


def test_invalidate_is_a_fresh_start(client: Client, ns: Namespace) -> None:
    stored(client, ns)
    ns.invalidate()
    with client.acquire(ns, TOKENS) as lease:
        assert lease.tokens == 0
    stored(client, ns, seed=1)


def test_a_conversation_is_hashed_as_it_grows(client: Client, ns: Namespace) -> None:
    stored(client, ns)
    chain = ns.chain()
    chain.append(TOKENS[:50])
    with client.acquire(ns, chain) as lease:
        assert lease.tokens == 48
    chain.append(TOKENS[50:])
    with client.acquire(ns, chain) as lease:
        assert lease.tokens == 96
    with client.acquire(ns, PromptKeys(chain.keys, 100)) as lease:
        assert lease.tokens == 96


def test_a_full_pool_is_a_reason(client: Client, ns: Namespace, daemon: FakeDaemon) -> None:
    daemon.next_slot = daemon.pool_bytes // 4096 - 2
    result = client.store(ns, TOKENS, block_data(ns))
    assert (result.stored_blocks, result.refused) == (2, {"pool_full": 4})
    assert client.stats().not_stored_blocks == {"pool_full": 4}


def test_counters_add_up(client: Client, ns: Namespace) -> None:
    stored(client, ns)
    for max_tokens in (None, 50, 10):
        with client.acquire(ns, TOKENS, max_tokens=max_tokens) as lease:
            if lease:
                lease.copy_to(block_data(ns))
    stats = client.stats()
    assert stats.looked_up == 100 + 50 + 10 == stats.hit + sum(stats.missed.values())
    assert (stats.hit, stats.missed) == (96 + 48, {"partial_block": 4 + 2 + 10})
    assert (stats.acquires, stats.connects, stats.breaker, stats.failures) == (3, 1, "closed", {})
    assert stats.bytes_loaded == ns.block_bytes * 9


def test_store_later(client: Client, ns: Namespace) -> None:
    done: Future[object] = client.store_later(ns, TOKENS, block_data(ns))
    assert done.result(10).stored_blocks == BLOCKS  # type: ignore[attr-defined] # StoreResult
    assert client.lookup(ns, TOKENS).tokens == 96


def test_store_later_never_waits(make_client: MakeClient, ns: Namespace, daemon: FakeDaemon) -> None:
    client = make_client(store_queue=2)
    client.lookup(ns, TOKENS)
    daemon.faults.thaw.clear()
    results = [client.store_later(ns, [i, *TOKENS], block_data(ns)) for i in range(6)]
    dropped = [r.result() for r in results if r.done()]
    assert len(dropped) >= 3
    assert {r.reason for r in dropped} == {"queue_full"}
    daemon.faults.thaw.set()
    kept = [r.result(10) for r in results if r.result(10).reason != "queue_full"]
    assert [r.stored_blocks for r in kept] == [BLOCKS] * len(kept)
    assert client.stats().not_stored_blocks == {"queue_full": BLOCKS * len(dropped)}


def test_store_later_keeps_the_epoch_it_was_asked_in(client: Client, ns: Namespace, daemon: FakeDaemon) -> None:
    client.lookup(ns, TOKENS)
    old = ns.epoch.fingerprint
    daemon.faults.thaw.clear()
    done = client.store_later(ns, TOKENS, block_data(ns))
    ns.invalidate()
    daemon.faults.thaw.set()
    assert done.result(10).stored_blocks == BLOCKS
    assert {fingerprint for fingerprint, _, _ in daemon.blocks} == {old}


def test_a_mistake_in_a_later_store_is_told_to_whoever_asks(client: Client, ns: Namespace) -> None:
    bad = client.store_later(ns, TOKENS, np.zeros((6, 3), np.uint8))
    with pytest.raises(ValueError, match="bytes"):
        bad.result(10)
    assert client.store_later(ns, TOKENS, block_data(ns)).result(10).stored_blocks == BLOCKS


def test_mistakes_raise_and_leave_nothing_reserved(client: Client, ns: Namespace, daemon: FakeDaemon) -> None:
    with pytest.raises(ValueError, match="bytes"):
        client.store(ns, TOKENS, np.zeros((6, 3), np.uint8))
    wait_until(lambda: daemon.aborted)
    assert daemon.reservations == {}
    with pytest.raises(TypeError):
        client.store(ns, TOKENS, None)
    with pytest.raises(ValueError, match="multiple of 4"):
        client.acquire(ns, b"abc")
    with pytest.raises(ValueError, match="negative"):
        client.acquire(ns, TOKENS, from_token=-1)
    stored(client, ns)
    with client.acquire(ns, TOKENS) as lease, pytest.raises(ValueError, match="bytes"):
        lease.copy_to(np.zeros((6, 3), np.uint8))


def test_after_close_everything_misses(client: Client, ns: Namespace) -> None:
    stored(client, ns)
    lease = client.acquire(ns, TOKENS)
    client.close()
    client.close()
    lease.release()
    assert client.acquire(ns, TOKENS).reason == "client_closed"
    assert client.store(ns, TOKENS, block_data(ns)).reason == "client_closed"
    assert client.lookup(ns, TOKENS).reason == "client_closed"


@pytest.mark.parametrize("local", [True, False])
def test_a_lease_outlives_a_dropped_client_and_then_the_session_ends(
    ns: Namespace, daemon: FakeDaemon, *, local: bool
) -> None:
    options = ClientOptions(local_channel=local, timeout_s=5.0)
    data = stored(Client(f"unix://{daemon.path}", options), ns)
    with Client(f"unix://{daemon.path}", options).acquire(ns, TOKENS) as lease:
        gc.collect()
        assert lease.copy_to(np.zeros_like(data)).ok
    session = lease._link.session
    del lease
    gc.collect()
    assert session is not None
    wait_until(lambda: not session.alive)
