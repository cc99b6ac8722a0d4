"""Foreign namespaces through the SDK against a real daemon in this process, on every transport."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from prefixcache.server.app import Daemon
from prefixcache_client import Blocks, Client, ForeignCache, LeaseEndedError, Rows
from tests.e2e.transports import KINDS, client_on, digest_of_test, two_daemons

BLOCK_BYTES, BLOCK_TOKENS = 12288 + 10, 16

Bytes = npt.NDArray[np.uint8]


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Daemon]]:
    with two_daemons(tmp_path_factory) as running:
        yield running


@pytest.fixture(params=KINDS)
def client(request: pytest.FixtureRequest, daemons: dict[str, Daemon]) -> Iterator[Client]:
    with client_on(request.param, daemons) as made:
        yield made


@pytest.fixture
def fresh(request: pytest.FixtureRequest) -> bytes:
    return digest_of_test(request)


def cache_of(client: Client, digest: bytes, engine: str = "test", **form: object) -> ForeignCache:
    ns = client.foreign_namespace(engine, digest, (BLOCK_BYTES, BLOCK_TOKENS), form=dict(form))  # type: ignore[arg-type] # plain values
    return client.foreign(ns)


def filled(rows: int, seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, (rows, BLOCK_BYTES), np.uint8)


def test_each_key_is_found_for_itself(client: Client, fresh: bytes) -> None:
    cache = cache_of(client, fresh)
    keys = [b"key %d" % number for number in range(9)]
    buffer = filled(40, 1)
    rows = np.array([30, 2, 17, 5, 39])
    stored = cache.store([keys[i] for i in (8, 1, 6, 3, 2)], Rows(buffer, rows))
    assert (stored.stored_blocks, stored.refused, stored.stored.tolist()) == (5, {}, [True] * 5)
    found = cache.lookup(keys)
    assert np.flatnonzero(found.present).tolist() == [1, 2, 3, 6, 8]
    assert found.reason == "not_cached"
    target, places = np.zeros((20, BLOCK_BYTES), np.uint8), np.array([11, 3, 19, 0, 7, 8, 2, 15, 4])
    with cache.acquire(keys) as lease:
        assert np.flatnonzero(lease.present).tolist() == [1, 2, 3, 6, 8]
        result = lease.copy_to(Rows(target, places))
    assert (result.ok, result.tokens, result.size_bytes) == (True, 5 * BLOCK_TOKENS, 5 * BLOCK_BYTES)
    source = {8: 30, 1: 2, 6: 17, 3: 5, 2: 39}
    for position, place in enumerate(places):
        wanted = buffer[source[position]] if position in source else np.zeros(BLOCK_BYTES, np.uint8)
        assert np.array_equal(target[place], wanted)
    stats = client.stats()
    assert (stats.hit, stats.missed) == (5 * BLOCK_TOKENS, {"not_cached": 4 * BLOCK_TOKENS})


def test_what_is_stored_already_counts_as_stored(client: Client, fresh: bytes) -> None:
    cache = cache_of(client, fresh)
    assert cache.store([b"a", b"b"], filled(2, 1)).stored_blocks == 2
    again = cache.store([b"b", b"c", b"a"], filled(3, 2))
    assert (again.stored_blocks, again.refused) == (1, {"already_stored": 2})
    assert again.stored.tolist() == [True] * 3
    target = np.zeros((1, BLOCK_BYTES), np.uint8)
    with cache.acquire([b"b"]) as lease:
        assert lease.copy_to(Blocks(target)).ok
    assert np.array_equal(target[0], filled(2, 1)[1])


def test_parents_come_first(client: Client, fresh: bytes) -> None:
    cache = cache_of(client, fresh)
    chain = [b"x", b"y", b"z"]
    assert cache.store(chain, filled(3, 3), parents=[b"", b"x", b"y"]).stored_blocks == 3
    orphan = cache.store([b"o", b"x2"], filled(2, 4), parents=[b"nobody", b"x"])
    assert (orphan.stored_blocks, orphan.stored.tolist()) == (1, [False, True])
    assert sum(orphan.refused.values()) == 1


def test_nothing_is_shared_that_differs_in_any_way(client: Client, fresh: bytes) -> None:
    one = cache_of(client, fresh, dtype="bfloat16")
    one.store([b"k"], filled(1, 5))
    others = [
        cache_of(client, fresh, dtype="float16"),
        cache_of(client, fresh, engine="other", dtype="bfloat16"),
        cache_of(client, fresh[::-1], dtype="bfloat16"),
    ]
    wider = client.foreign_namespace("test", fresh, (BLOCK_BYTES + 1, BLOCK_TOKENS), form={"dtype": "bfloat16"})
    others.append(client.foreign(wider))
    assert one.lookup([b"k"]).present.all()
    for other in others:
        assert not other.lookup([b"k"])
        with other.acquire([b"k"]) as lease:
            assert not lease
            assert (lease.copy_to(filled(1, 0)).ok, lease.reason) == (False, "not_cached")


def test_more_than_the_pool_holds(client: Client, fresh: bytes) -> None:
    cache = cache_of(client, fresh)
    count = 700  # 4 granules each, of 8 MiB
    keys = [b"%d" % number for number in range(count)]
    result = cache.store(keys, filled(count, 6))
    assert 0 < result.stored_blocks < count
    assert result.refused == {"pool_full": count - result.stored_blocks}
    found = cache.lookup(keys)
    assert np.array_equal(found.present, result.stored)


def test_mistakes_raise_and_the_end_of_a_lease_is_told(client: Client, fresh: bytes) -> None:
    cache = cache_of(client, fresh)
    with pytest.raises(ValueError, match="rows must be"):
        cache.store([b"far"], Rows(filled(2, 1), [2]))
    with pytest.raises(ValueError, match="one block for each"):
        cache.store([b"a", b"b"], filled(1, 1))
    with pytest.raises(ValueError, match="bytes"):
        cache.store([b"short"], np.zeros((1, 5), np.uint8))
    with pytest.raises(ValueError, match="parents"):
        cache.store([b"a"], filled(1, 1), parents=[b"b", b"c"])
    assert not cache.lookup([])
    assert cache.store([], filled(0, 1)).stored_blocks == 0
    cache.store([b"a"], filled(1, 1))
    lease = cache.acquire([b"a"])
    lease.release()
    lease.release()
    with pytest.raises(LeaseEndedError):
        lease.copy_to(filled(1, 1))
