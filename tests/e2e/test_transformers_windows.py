"""Sliding-window models and batches of prompts through a real daemon, two clients beside each other in one process."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from prefixcache_client import Client
from prefixcache_transformers import CacheOptions, Daemon, PrefixCache
from tests.unit.transformers_adapter.tiny_models import left_padded, plain, prompt, tiny_model

from .transformers_setup import DaemonProcess

pytestmark = pytest.mark.slow

BLOCK = 64


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    daemon = DaemonProcess(tmp_path_factory.mktemp("daemon"), 256 << 20)
    daemon.start()
    yield daemon
    daemon.end()


@pytest.fixture(scope="module", params=["gemma3", "mistral", "qwen2"])
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_model(request.param)


@pytest.fixture
def pair(daemon: DaemonProcess, model: Any, request: pytest.FixtureRequest) -> Iterator[list[PrefixCache]]:
    """Two caches over one model, each with a client of its own, in a namespace of this test's own."""
    clients = [Client(daemon.address) for _ in range(2)]
    salt = request.node.name.encode()
    caches = [PrefixCache(model, Daemon(client, cache_salt=salt), CacheOptions(BLOCK)) for client in clients]
    yield caches
    for cache, client in zip(caches, clients, strict=True):
        cache.close()
        client.close()


def generate(cache: PrefixCache, ids: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
    output = cache.generate(ids, mask, max_new_tokens=12, do_sample=False)
    cache.flush()
    return output


def test_sharing_2000_of_2100_tokens(model: Any, pair: list[PrefixCache]) -> None:
    """Also where a window has long moved past the shared tokens."""
    first, second = pair
    shared = prompt(2000, 1)
    generate(first, torch.cat([shared, prompt(100, 2)], dim=1))
    ids = torch.cat([shared, prompt(100, 3)], dim=1)
    assert torch.equal(generate(second, ids), plain(model, ids))
    assert second.stats.reused == 1984
    assert torch.equal(generate(first, ids), plain(model, ids))
    assert first.stats.reused == 2100 // BLOCK * BLOCK


def test_exactly_whole_blocks(model: Any, pair: list[PrefixCache]) -> None:
    ids = prompt(4 * BLOCK, 4)
    expected = plain(model, ids)
    for cache in pair:
        assert torch.equal(generate(cache, ids), expected)
    assert pair[1].stats.reused == 4 * BLOCK - 1


def test_left_padded_batch(model: Any, pair: list[PrefixCache]) -> None:
    first, second = pair
    shared = prompt(6 * BLOCK, 5)
    generate(first, torch.cat([shared, prompt(200, 6)], dim=1))
    rows = [torch.cat([shared, prompt(own, 10 + own)], dim=1) for own in (7, 90, 41)]
    ids, mask = left_padded(rows)
    expected = plain(model, ids, mask)
    for cache in (second, first, second):
        assert torch.equal(generate(cache, ids, mask), expected)
    # Cut where the row that begins last has its shared prefix behind it, less its padding for the others; then all
    # rows are stored, and the second time only their tails are computed.
    assert second.stats.reused >= 3 * 6 * BLOCK - 2 * 90
    assert not second.stats.reasons


def test_conversation_goes_on_from_generated_tokens(model: Any, pair: list[PrefixCache]) -> None:
    first, second = pair
    said = first.generate(prompt(100, 7), max_new_tokens=100, do_sample=False)
    first.flush()
    ids = torch.cat([said, prompt(20, 8)], dim=1)
    assert torch.equal(generate(second, ids), plain(model, ids))
    assert second.stats.reused == (said.shape[1] - 1) // BLOCK * BLOCK
