"""Opaque keys on the disk of a real daemon: more than memory holds comes back, one by one, after kill -9 as well."""

import random
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import numpy.typing as npt
import pytest

from prefixcache.v1 import admin_pb2, admin_pb2_grpc
from prefixcache_client import Client, ClientOptions, ForeignCache, Rows
from tests.e2e.processes import DaemonProcess, wait_until
from tests.e2e.test_daemon_process import stats_of
from tests.e2e.test_disk import OPTIONS, Daemons, address, counter, flush, tier

BLOCK_BYTES, BLOCK_TOKENS = 256 * 1024 - 10, 64
KEYS = [b"page %d" % number for number in range(128)]  # 32 MiB: twice what memory holds
PAGE = 4096
AT_ONCE = 16
CHAIN = 32  # keys that follow each other, where they do
pytestmark = pytest.mark.slow

Bytes = npt.NDArray[np.uint8]


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Daemons]:
    made = Daemons(tmp_path / "run", tmp_path / "data")
    yield made
    made.kill()


def cache_of(client: Client) -> ForeignCache:
    ns = client.foreign_namespace("test", b"w" * 32, (BLOCK_BYTES, BLOCK_TOKENS), form={"dtype": "bfloat16"})
    return client.foreign(ns)


def content(number: int) -> Bytes:
    return np.random.default_rng(number).integers(0, 256, BLOCK_BYTES, np.uint8)


def store_all(daemon: DaemonProcess, cache: ForeignCache, *, chained: bool) -> None:
    for first in range(0, len(KEYS), AT_ONCE):
        numbers = range(first, first + AT_ONCE)
        parents = [KEYS[number - 1] if number % CHAIN else b"" for number in numbers] if chained else ()
        keys = [KEYS[number] for number in numbers]
        rows = np.stack([content(number) for number in numbers])
        stored = cache.store(keys, Rows(rows, np.arange(AT_ONCE)), parents=parents)
        assert stored.stored.all(), stored
        flush(daemon)


def load(cache: ForeignCache, numbers: list[int]) -> list[int]:
    """Which of them came back; the bytes of those are right, those of the others were left alone."""
    target = np.zeros((len(numbers), BLOCK_BYTES), np.uint8)
    with cache.acquire([KEYS[number] for number in numbers]) as lease:
        result = lease.copy_to(Rows(target, np.arange(len(numbers))))
        assert result.ok == bool((lease and lease.copied.all()) or ((lease.copied == lease.present).all() and lease))
        came = lease.copied.copy()
    for place, number in enumerate(numbers):
        assert np.array_equal(target[place], content(number) if came[place] else np.zeros(BLOCK_BYTES, np.uint8))
    return [number for number, here in zip(numbers, came.tolist(), strict=True) if here]


def clear_one(daemon: DaemonProcess, cache: ForeignCache, key: bytes) -> int:
    """Blocks that left with it."""
    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        request = admin_pb2.EvictRequest(fingerprint=cache.ns.epoch.fingerprint, keys=cache.pack([key]))
        return int(admin_pb2_grpc.AdminServiceStub(channel).Evict(request, timeout=40).blocks)


@pytest.mark.parametrize(("local", "chained"), [(True, False), (False, False), (True, True)])
def test_what_memory_cannot_hold_comes_back_from_disk(daemons: Daemons, *, local: bool, chained: bool) -> None:
    daemon = daemons.start()
    options = ClientOptions(timeout_s=10, store_timeout_s=20, load_timeout_s=20, local_channel=local)
    with Client(address(daemon), options) as client:
        cache = cache_of(client)
        store_all(daemon, cache, chained=chained)
        assert cache.lookup(KEYS).present.all()
        # What is asked for keeps in memory what stands in front of it there, so chains are asked for from the front.
        order = list(range(len(KEYS))) if chained else np.random.default_rng(1).permutation(len(KEYS)).tolist()
        for first in range(0, len(order), AT_ONCE):
            assert load(cache, order[first : first + AT_ONCE]) == order[first : first + AT_ONCE]
        stats = stats_of(daemon)
        assert tier(stats).blocks == len(KEYS)
        assert not any(each.value for each in stats.counters if each.name == "disk_drops")
        assert counter(stats, "disk_drops", "opaque_keys") == 0
        with cache.acquire(KEYS, load_timeout_s=0.0) as lease:
            assert 0 < lease.present.sum() <= 64  # what is in memory
            assert lease.reason == "deadline"
        cleared = clear_one(daemon, cache, KEYS[5])
        assert cleared == (CHAIN - 5 if chained else 1)
        assert cache.lookup(KEYS).present.sum() == len(KEYS) - cleared


def test_a_killed_daemon_finds_its_keys_again(daemons: Daemons) -> None:
    daemon = daemons.start()
    with Client(address(daemon), OPTIONS) as client:
        cache = cache_of(client)
        store_all(daemon, cache, chained=True)
        assert clear_one(daemon, cache, KEYS[100]) == 28
        before = list(range(100))
        assert np.flatnonzero(cache.lookup(KEYS).present).tolist() == before
    daemon.kill()
    daemon = daemons.start()
    with Client(address(daemon), OPTIONS) as client:
        cache = cache_of(client)
        assert wait_until(lambda: np.flatnonzero(cache.lookup(KEYS).present).tolist() == before)
        assert load(cache, before[:AT_ONCE]) == before[:AT_ONCE]


@pytest.mark.parametrize("damage", ["bits", "cut", "zeros", "swapped"])
def test_a_damaged_log_costs_keys_and_never_gives_wrong_bytes(daemons: Daemons, damage: str) -> None:
    daemon = daemons.start()
    with Client(address(daemon), OPTIONS) as client:
        store_all(daemon, cache_of(client), chained=False)
    daemon.kill()
    chance = random.Random(damage)
    segments = sorted(daemons.data.glob("segment-*"))
    for path in segments[:3]:
        data = bytearray(path.read_bytes())
        page = chance.randrange(1, len(data) // PAGE) * PAGE
        if damage == "bits":
            for _ in range(8):
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        elif damage == "cut":
            del data[page:]
        elif damage == "zeros":
            data[page : page + PAGE] = bytes(PAGE)
        else:
            other = chance.randrange(1, len(data) // PAGE) * PAGE
            data[page : page + PAGE], data[other : other + PAGE] = (
                data[other : other + PAGE],
                data[page : page + PAGE],
            )
        path.write_bytes(data)
    daemon = daemons.start()
    with Client(address(daemon), OPTIONS) as client:
        cache = cache_of(client)
        assert wait_until(lambda: counter(stats_of(daemon), "disk_recovery_us", "took") > 0)
        came: list[int] = []
        for first in range(0, len(KEYS), AT_ONCE):
            came += load(cache, list(range(first, first + AT_ONCE)))
        assert len(came) >= len(KEYS) // 3, "the segments that are whole are all there"
        assert np.flatnonzero(cache.lookup(KEYS).present).tolist() == came, "what was lost is not promised again"
        assert stats_of(daemon).health == "serving"
