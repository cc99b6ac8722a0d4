"""A pool full of leased blocks, and a namespace whose blocks are larger than the pool: refusals with a reason."""

import contextlib

import numpy as np

from prefixcache.identity.layout import GroupKind, LayerGroup, Layout
from prefixcache_client import Client, Namespace
from tests.e2e.processes import DaemonProcess
from tests.issues.conftest import POOL_BLOCKS, store_soon
from tests.issues.workers import BLOCK_TOKENS, TOKENS, bytes_of


def test_a_pool_full_of_leased_blocks(daemon: DaemonProcess, client: Client, ns: Namespace) -> None:
    prompts = [[number, *TOKENS[1:]] for number in range(POOL_BLOCKS // 8)]
    with contextlib.ExitStack() as stack:
        leases = []
        for number, prompt in enumerate(prompts):
            assert store_soon(client, ns, prompt, number)
            leases.append(stack.enter_context(client.acquire(ns, prompt, ttl_s=60)))
        assert [lease.tokens for lease in leases] == [len(TOKENS)] * len(prompts)
        refused = client.store(ns, [99, *TOKENS[1:]], bytes_of(9))
        assert (refused.stored_blocks, refused.refused) == (0, {"pool_full": 8})
        for number, lease in enumerate(leases):
            target = np.zeros_like(bytes_of(0))
            assert lease.copy_to(target).ok
            assert np.array_equal(target, bytes_of(number))
    assert store_soon(client, ns, [99, *TOKENS[1:]], 9)


def test_a_namespace_bigger_than_the_pool(daemon: DaemonProcess, client: Client) -> None:
    layout = Layout.of(LayerGroup(GroupKind.FULL, tuple(range(64)), 8, 128, 128, "float32"))
    ns = client.namespace(layout, b"b" * 32, block_tokens=BLOCK_TOKENS)
    data = np.zeros((2, ns.block_bytes), np.uint8)
    tokens = list(range(2 * BLOCK_TOKENS))
    assert not client.acquire(ns, tokens)
    result = client.store(ns, tokens, data)
    assert result.stored_blocks == 0
    assert result.refused == {"too_large": 2}
    assert client.stats().breaker == "closed"
