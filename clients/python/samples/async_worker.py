"""An asyncio server that handles several requests at once; the loop never waits for a copy or for a slow daemon."""

import asyncio

import numpy as np

from prefixcache.identity.layout import GroupKind, LayerGroup, Layout
from prefixcache_client import AsyncClient, ClientOptions, Namespace

SYSTEM_PROMPT = list(range(256))


async def handle(client: AsyncClient, ns: Namespace, number: int) -> int:
    """One request; the tokens that need not be computed."""
    tokens = [*SYSTEM_PROMPT, *range(10_000 * number, 10_000 * number + 100)]
    kv = np.zeros((len(tokens) // ns.block_tokens, ns.block_bytes), np.uint8)
    async with await client.acquire(ns, tokens, max_tokens=len(tokens) - 1) as lease:
        copied = await lease.copy_to(kv)
    await client.store(ns, tokens, kv)
    return copied.tokens


async def main() -> None:
    """One request first, then several that share its system prompt."""
    layout = Layout.of(LayerGroup(GroupKind.FULL, (0, 1), 2, 16, 16, "bfloat16"))
    # A request's path waits for the cache 200 ms at most, whatever happens to the daemon.
    async with AsyncClient(options=ClientOptions(timeout_s=0.2, client_name="async sample")) as client:
        ns = client.namespace(layout, weights_digest=b"async weights".ljust(32, b"."))
        await handle(client, ns, 1)
        reused = await asyncio.gather(*(handle(client, ns, number) for number in range(2, 6)))
        print(f"tokens reused by 4 requests: {sum(reused)}")
        stats = client.stats()
        print(f"hit {stats.hit} of {stats.looked_up} tokens, missed {stats.missed}")


if __name__ == "__main__":
    asyncio.run(main())
