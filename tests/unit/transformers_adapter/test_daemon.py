"""Through the real SDK to a daemon in miniature that misbehaves: the output never changes, and nothing is raised."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from prefixcache.v1 import common_pb2
from prefixcache_client import Client, ClientOptions
from prefixcache_transformers import CacheOptions, Daemon, PrefixCache
from tests.unit.client.fake_daemon import FakeDaemon

from .tiny_models import BLOCK, plain, prompt, tiny_model

ACQUIRE, RESERVE, COMMIT = 3, 6, 7
LENGTH = 5 * BLOCK + 3
PATIENT = ClientOptions(timeout_s=5.0, store_timeout_s=5.0)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(str(tmp_path / "d.sock")) as running:
        yield running


@pytest.fixture
def make_cache(daemon: FakeDaemon, model: Any) -> Iterator[Callable[..., PrefixCache]]:
    made: list[tuple[PrefixCache, Client]] = []

    def make(options: ClientOptions = PATIENT, **of_daemon: Any) -> PrefixCache:
        client = Client(f"unix://{daemon.path}", options)
        made.append((PrefixCache(model, Daemon(client, **of_daemon), CacheOptions(BLOCK)), client))
        return made[-1][0]

    yield make
    for cache, client in made:
        cache.close()
        client.close()


def generate(cache: PrefixCache, ids: torch.Tensor) -> Any:
    output = cache.generate(ids, max_new_tokens=6, do_sample=False)
    cache.flush()
    return output


@pytest.mark.parametrize("local_channel", [True, False], ids=["local", "grpc"])
def test_two_clients_share(make_cache: Callable[..., PrefixCache], model: Any, *, local_channel: bool) -> None:
    options = ClientOptions(timeout_s=5.0, store_timeout_s=5.0, local_channel=local_channel)
    first, second = make_cache(options), make_cache(options)
    ids = prompt(LENGTH, 1)
    expected = plain(model, ids, tokens=6)
    assert torch.equal(generate(first, ids), expected)
    assert torch.equal(generate(second, ids), expected)
    assert (first.stats.blocks_stored, second.stats.blocks_stored) == (5, 0)
    assert second.stats.reused == 5 * BLOCK


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {"cache_salt": b"x"}),
        ({"tenant_key": b"k" * 32}, {"tenant_key": b"l" * 32}),
        ({}, {"tenant_key": b"k" * 32}),
    ],
    ids=["salt", "two tenants", "tenant and public"],
)
def test_tenants_and_salts_separate(
    make_cache: Callable[..., PrefixCache], model: Any, first: dict[str, bytes], second: dict[str, bytes]
) -> None:
    ids = prompt(LENGTH, 2)
    for options in (first, second):
        cache = make_cache(**options)
        assert torch.equal(generate(cache, ids), plain(model, ids, tokens=6))
        assert cache.stats.reused == 0
    again = make_cache(**second)
    generate(again, ids)
    assert again.stats.reused == 5 * BLOCK


FAULTS: dict[str, dict[str, Any]] = {
    "garbage": {"garbage": True},
    "truncated": {"truncate": True},
    "another method": {"wrong_method": True},
    "slots outside of the pool": {"bad_slots": True},
    "one generation too few": {"odd_runs": True},
    "slots taken while copying": {"steal": True},
    "other sizes": {"wrong_bytes": True},
    "acquire refused": {"refuse": {ACQUIRE: common_pb2.REASON_NOT_CACHED}},
    "reserve refused": {"refuse": {RESERVE: common_pb2.REASON_POOL_FULL}},
    "commit refused": {"refuse": {COMMIT: common_pb2.REASON_POOL_FULL}},
    "slow": {"delay_s": 0.3},
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_faults_change_no_output(
    daemon: FakeDaemon, make_cache: Callable[..., PrefixCache], model: Any, fault: dict[str, Any]
) -> None:
    ids = prompt(LENGTH, 3)
    expected = plain(model, ids, tokens=6)
    assert torch.equal(generate(make_cache(), ids), expected)
    cache = make_cache(ClientOptions(timeout_s=0.2, store_timeout_s=0.2))
    for name, value in fault.items():
        setattr(daemon.faults, name, value)
    longer = torch.cat([ids, prompt(2 * BLOCK, 4)], dim=1)
    assert torch.equal(generate(cache, ids), expected)
    assert torch.equal(generate(cache, longer), plain(model, longer, tokens=6))


def test_frozen_daemon_costs_one_deadline(
    daemon: FakeDaemon, make_cache: Callable[..., PrefixCache], model: Any
) -> None:
    ids = prompt(LENGTH, 5)
    cache = make_cache(ClientOptions(timeout_s=0.1, store_timeout_s=0.1))
    daemon.faults.thaw.clear()
    try:
        assert torch.equal(generate(cache, ids), plain(model, ids, tokens=6))
    finally:
        daemon.faults.thaw.set()
    assert cache.stats.reused == 0


def test_no_daemon_at_all(tmp_path: Path, model: Any) -> None:
    client = Client(f"unix://{tmp_path}/nobody.sock", ClientOptions(timeout_s=0.5))
    cache = PrefixCache(model, Daemon(client), CacheOptions(BLOCK))
    ids = prompt(LENGTH, 6)
    assert torch.equal(generate(cache, ids), plain(model, ids, tokens=6))
    assert cache.stats.reused == cache.stats.blocks_stored == 0
    cache.close()
    client.close()


def test_the_daemon_is_told_the_priority(make_cache: Callable[..., PrefixCache], daemon: FakeDaemon) -> None:
    generate(make_cache(priority="low"), prompt(LENGTH, 9))
    assert set(daemon.priorities) == {1}


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_a_codec_is_asked_for_and_shared_with_its_like_only(daemon: FakeDaemon, model: Any, codec: str) -> None:
    """Restored states differ from computed ones by no more than the codec loses; raw caches do not see them."""
    ids = prompt(LENGTH, 7)
    with Client(f"unix://{daemon.path}", PATIENT) as client:
        caches = [PrefixCache(model, Daemon(client), CacheOptions(BLOCK, codec=name)) for name in (codec, codec, "raw")]
        first, second, raw = caches
        generate(first, ids)
        found, untouched = second.lookup(ids), raw.lookup(ids)
        assert found.columns == 5 * BLOCK
        assert not untouched.columns
        computed = model(ids[:, : 5 * BLOCK], use_cache=True).past_key_values
        for mine, theirs in zip(found.cache.layers, computed.layers, strict=True):
            for was, now in ((theirs.keys, mine.keys), (theirs.values, mine.values)):
                step = (was.amax() - was.amin()) / (255 if codec == "int8" else 15)
                assert 0 < (was - now).abs().max() <= step
        for cache in caches:
            cache.close()
