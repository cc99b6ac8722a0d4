"""The SDK against a real daemon in this process, on every transport: hybrid layouts, many threads, growing prompts."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from prefixcache.identity.layout import GroupKind, LayerGroup, Layout
from prefixcache.server.app import Daemon
from prefixcache_client import Blocks, Client, Layers, Namespace
from tests.e2e.processes import wait_until
from tests.e2e.transports import KINDS, client_on, digest_of_test, two_daemons

HEADS, DIM, SIZE = 2, 16, 16
HYBRID = Layout.of(
    LayerGroup(GroupKind.FULL, (0, 3), HEADS, DIM, DIM, "float32"),
    LayerGroup(GroupKind.SLIDING, (1, 2), HEADS, DIM, DIM, "float32", 50),
)
PLAIN = Layout.of(LayerGroup(GroupKind.FULL, (0, 1), HEADS, DIM, DIM, "float32"))

Kv = list[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]]


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


def kv(tokens: int, layers: int, seed: int) -> Kv:
    rng = np.random.default_rng(seed)
    shape = (1, HEADS, tokens, DIM)
    return [(rng.random(shape, np.float32), rng.random(shape, np.float32)) for _ in range(layers)]


def empty(like: Kv) -> Kv:
    return [(np.zeros_like(k), np.zeros_like(v)) for k, v in like]


def test_a_hybrid_model_restores_windows(client: Client, fresh: bytes) -> None:
    ns = client.namespace(HYBRID, fresh, block_tokens=SIZE)
    tokens = list(range(200))
    cache = kv(200, 4, 1)
    assert client.store(ns, tokens, cache).stored_tokens == 192
    target = empty(cache)
    with client.acquire(ns, tokens) as lease:
        # 50 tokens of window: the query at 192 sees 143 to 191, so blocks 8 to 11 of the sliding layers.
        assert (lease.tokens, lease.parts(0), lease.parts(1)) == (192, range(12), range(8, 12))
        assert lease.copy_to(target).tokens == 192
    for layer in (0, 3):
        assert np.array_equal(target[layer][0][:, :, :192], cache[layer][0][:, :, :192])
    for layer in (1, 2):
        assert np.array_equal(target[layer][1][:, :, 128:192], cache[layer][1][:, :, 128:192])
        assert not target[layer][1][:, :, :128].any(), "what lies before the window is not restored"


def test_a_sliding_layer_that_has_forgotten_the_start(client: Client, fresh: bytes) -> None:
    """The engine kept 100 tokens of the sliding layers: the full ones are stored whole, and the end is restorable."""
    ns = client.namespace(HYBRID, fresh, block_tokens=SIZE)
    tokens = list(range(500, 700))
    cache = kv(200, 4, 2)
    kept: Kv = [pair if n in (0, 3) else (pair[0][:, :, 100:], pair[1][:, :, 100:]) for n, pair in enumerate(cache)]
    client.store(ns, tokens, Layers(kept, first_tokens={1: 100, 2: 100}))
    target = empty(kept)
    with client.acquire(ns, tokens) as lease:
        assert lease.tokens == 192
        assert lease.copy_to(Layers(target, first_tokens={1: 100, 2: 100})).tokens == 192
    assert np.array_equal(target[3][0][:, :, :192], cache[3][0][:, :, :192])
    assert np.array_equal(target[2][0][:, :, 28:92], cache[2][0][:, :, 128:192])
    with client.acquire(ns, tokens[:100]) as lease:
        assert (lease.tokens, lease.reason) == (0, "no_restorable_boundary")


def test_a_conversation_of_many_turns(client: Client, fresh: bytes) -> None:
    ns = client.namespace(PLAIN, fresh, block_tokens=SIZE)
    chain, data = ns.chain(), np.random.default_rng(3).integers(0, 256, (20, ns.block_bytes), dtype=np.uint8)
    for turn in range(10):
        chain.append([turn * 1000 + n for n in range(30)])
        with client.acquire(ns, chain) as lease:
            assert lease.tokens == turn * 30 // SIZE * SIZE
            target = np.zeros_like(data[: max(lease.blocks, 1)])
            if lease:
                assert lease.copy_to(target).ok
                assert np.array_equal(target, data[: lease.blocks])
        first, stop = lease.blocks, chain.block_count
        assert client.store(ns, chain, Blocks(data[first:stop], first_block=first)).stored_blocks == stop - first


def test_threads_share_a_client(client: Client, fresh: bytes) -> None:
    """Eight threads, prompts that share prefixes, a pool that evicts: every byte that is ok is right."""
    ns = client.namespace(PLAIN, fresh, block_tokens=SIZE)

    def content(prompt: list[int]) -> npt.NDArray[np.uint8]:
        """Bytes that follow from the prompt: block i from its tokens up to and with i."""
        rows = [
            random.Random(str(prompt[: (i + 1) * SIZE])).randbytes(ns.block_bytes) for i in range(len(prompt) // SIZE)
        ]
        return np.frombuffer(b"".join(rows), np.uint8).reshape(-1, ns.block_bytes)

    def work(seed: int) -> int:
        rng, hits = random.Random(seed), 0
        for _ in range(25):
            prompt = [rng.randrange(3) for _ in range(4)] * 8 + [rng.randrange(3)] * 40
            expected = content(prompt)
            target = np.zeros_like(expected)
            with client.acquire(ns, prompt) as lease:
                result = lease.copy_to(target)
            blocks = result.tokens // SIZE
            assert np.array_equal(target[:blocks], expected[:blocks])
            hits += blocks
            client.store(ns, prompt, expected)
        return hits

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(work, range(8))) > 100
    stats = client.stats()
    assert stats.looked_up == stats.hit + sum(stats.missed.values()) == 8 * 25 * 72


def test_leases_that_run_out_are_taken_from_a_thief(client: Client, fresh: bytes) -> None:
    ns = client.namespace(PLAIN, fresh, block_tokens=SIZE)
    data = np.ones((4, ns.block_bytes), np.uint8)
    assert client.store(ns, list(range(64)), data).stored_blocks == 4
    with client.acquire(ns, list(range(64)), ttl_s=0.05) as lease:
        while lease.valid():
            continue
        assert lease.copy_to(np.zeros_like(data)).reason in ("lease_lost", "lease_unknown")


def test_a_torch_cache(client: Client, fresh: bytes) -> None:
    torch: Any = pytest.importorskip("torch")
    layout = Layout.of(LayerGroup(GroupKind.FULL, (0, 1), HEADS, DIM, DIM, "bfloat16"))
    ns: Namespace = client.namespace(layout, fresh, block_tokens=SIZE)
    cache = [(torch.randn(2, HEADS, 100, DIM).bfloat16(), torch.randn(2, HEADS, 100, DIM).bfloat16()) for _ in range(2)]
    # Blocks of another size may have to wait until a slab of the pool has been emptied for them.
    assert wait_until(lambda: client.store(ns, list(range(100)), Layers(cache, row=1)).stored_tokens == 96)
    target = [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in cache]
    with client.acquire(ns, list(range(100)), max_tokens=99) as lease:
        assert lease.copy_to(Layers(target, row=1)).tokens == 96
    for (k, v), (k0, v0) in zip(target, cache, strict=True):
        assert torch.equal(k[1, :, :96], k0[1, :, :96])
        assert torch.equal(v[1, :, :96], v0[1, :, :96])
        assert not k[0].any()
