"""What users of the SDK write, under `mypy --strict`; every line marked as an error must be one."""

import asyncio
from concurrent.futures import Future
from typing import assert_type

import numpy as np
import numpy.typing as npt

from prefixcache.identity.layout import GroupKind, LayerGroup, Layout
from prefixcache_client import (
    AsyncClient,
    AsyncLease,
    Blocks,
    Client,
    ClientOptions,
    ClientStats,
    CopyResult,
    Layers,
    Lease,
    LookupResult,
    Namespace,
    Pages,
    PromptKeys,
    StoreResult,
)

layout = Layout.of(LayerGroup(GroupKind.FULL, (0,), 1, 8, 8, "float32"))
array = np.zeros((4, 100), np.uint8)


def blocking(client: Client) -> None:
    """The blocking surface."""
    ns = client.namespace(layout, b"w" * 32, block_tokens=64, tenant_key=None, lora=b"", k_scales="dynamic")
    assert_type(ns, Namespace)
    assert_type(client.namespace_from_hf({}, b"w" * 32, "bfloat16", block_tokens=32, mla="expanded"), Namespace)
    for prompt in ([1, 2], b"\0\0\0\0", np.zeros(3, np.int64), ns.chain(), PromptKeys(b"", 0)):
        with client.acquire(ns, prompt, max_tokens=10, from_token=0, ttl_s=None, timeout_s=0.1) as lease:
            assert_type(lease, Lease)
            assert_type(lease.tokens, int)
            assert_type(lease.reason, str)
            assert_type(lease.copy_to(array), CopyResult)
            with lease.view(0, part=0) as block:
                assert_type(block, npt.NDArray[np.uint8])
    assert_type(client.store(ns, [1], Blocks(array, part=0, first_block=2), from_token=3), StoreResult)
    assert_type(client.store(ns, [1], [(array, array)]), StoreResult)
    assert_type(client.store(ns, [1], Layers([(array, None)], axes="td", row=None)), StoreResult)
    assert_type(client.store(ns, [1], Pages([array], [0, 1], axes="btd")), StoreResult)
    assert_type(client.store_later(ns, [1], array), Future[StoreResult])
    assert_type(client.lookup(ns, [1]), LookupResult)
    assert_type(client.stats(), ClientStats)
    assert_type(ns.invalidate(), int)


async def awaited(client: AsyncClient) -> None:
    """The same with await."""
    ns = client.namespace(layout, b"w" * 32)
    assert_type(ns, Namespace)
    async with await client.acquire(ns, [1], max_tokens=5) as lease:
        assert_type(lease, AsyncLease)
        assert_type(await lease.copy_to(array), CopyResult)
        async with lease.view(0) as block:
            assert_type(block, npt.NDArray[np.uint8])
    assert_type(await client.store(ns, [1], array), StoreResult)
    assert_type(await client.lookup(ns, [1]), LookupResult)
    assert_type(await asyncio.wrap_future(client.store_later(ns, [1], array)), StoreResult)
    assert_type(client.stats(), ClientStats)


def wrong(client: Client, ns: Namespace) -> None:
    """Mistakes that a type checker finds."""
    client.acquire(ns, "a prompt")  # type: ignore[arg-type] # text is not tokens
    client.acquire(ns, [1], 5)  # type: ignore[call-arg] # options are keyword-only
    client.acquire(ns, [1], max_token=5)  # type: ignore[call-arg] # no such option
    client.namespace(layout, b"w" * 32, block_size=16)  # type: ignore[call-arg] # no such field of the identity
    ClientOptions(timeout=1)  # type: ignore[call-arg] # it is timeout_s
    client.store(ns, [1], array).stored_blocks = 3  # type: ignore[misc] # results are frozen
