"""The whole life of one request: look for the prompt's prefix, copy what is cached, compute the rest, store it.

Run a daemon (`prefixcache serve`) and this file twice: the second run finds what the first stored. Set
PREFIXCACHE_ADDRESS for a daemon elsewhere. Without any daemon it runs as well, with nothing cached.
"""

import numpy as np
import numpy.typing as npt

from prefixcache.identity.layout import GroupKind, LayerGroup, Layout
from prefixcache_client import Client

LAYERS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS = 4, 2, 16, 64

KvCache = list[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]]


def compute(cache: KvCache, tokens: list[int], start: int) -> None:
    """Stands in for a model: K and V of the tokens from `start` on."""
    for layer, (k, v) in enumerate(cache):
        for position in range(start, len(tokens)):
            k[0, :, position] = tokens[position] + layer
            v[0, :, position] = tokens[position] - layer


def main() -> None:
    """One request."""
    tokens = list(range(1000, 1500))
    cache: KvCache = [
        (np.zeros((1, KV_HEADS, len(tokens), HEAD_DIM), np.float32), np.zeros((1, KV_HEADS, len(tokens), HEAD_DIM),
        np.float32)) for _ in range(LAYERS)
    ]  # fmt: skip

    with Client() as client:
        layout = Layout.of(LayerGroup(GroupKind.FULL, tuple(range(LAYERS)), KV_HEADS, HEAD_DIM, HEAD_DIM, "float32"))
        # Normally prefixcache.identity.weights.weights_digest(folder), or client.namespace_from_hf(config, ...).
        ns = client.namespace(layout, weights_digest=b"quickstart weights".ljust(32, b"."), block_tokens=BLOCK_TOKENS)

        # A model computes at least the last token itself, to have something to sample from.
        with client.acquire(ns, tokens, max_tokens=len(tokens) - 1) as lease:
            copied = lease.copy_to(cache)
        # On a miss, or when the lease was lost while copying, the cache holds anything: compute all of it.
        start = copied.tokens if copied.ok else 0
        print(f"cached: {start} of {len(tokens)} tokens {copied.reason or lease.reason}".rstrip())

        compute(cache, tokens, start)
        stored = client.store(ns, tokens, cache)
        print(f"stored: {stored.stored_tokens} tokens {stored.reason}".rstrip())


if __name__ == "__main__":
    main()
