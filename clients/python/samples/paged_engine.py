"""An engine with a paged KV cache: blocks go straight between its pages and the daemon, in the canonical order.

The engine's pages here are vLLM's form [k|v, page, token, head, dim], 16 tokens each; the blocks are 64 tokens. What
one engine stores, another with other pages reads.
"""

import numpy as np

from prefixcache.identity.layout import GroupKind, LayerGroup, Layout
from prefixcache_client import Client, Pages

LAYERS, KV_HEADS, HEAD_DIM, PAGES = 3, 2, 16, 64
TOKENS = list(range(5000, 5256))


def main() -> None:
    """Two engines, one prompt."""
    layout = Layout.of(LayerGroup(GroupKind.FULL, tuple(range(LAYERS)), KV_HEADS, HEAD_DIM, HEAD_DIM, "float32"))
    rng = np.random.default_rng(1)
    with Client() as client:
        ns = client.namespace(layout, weights_digest=b"paged weights".ljust(32, b"."), block_tokens=64)

        # The first engine: 16 tokens a page, K and V fused in one tensor a layer.
        first = [rng.random((2, PAGES, 16, KV_HEADS, HEAD_DIM), np.float32) for _ in range(LAYERS)]
        first_pages = rng.permutation(PAGES)[: len(TOKENS) // 16]
        stored = client.store(ns, TOKENS, Pages(first, first_pages, axes="cbthd"))
        print(f"stored {stored.stored_blocks} blocks, {stored.refused}")

        # The second: 32 tokens a page, heads before tokens, K and V apart.
        second = [tuple(np.zeros((PAGES, KV_HEADS, 32, HEAD_DIM), np.float32) for _ in range(2)) for _ in range(LAYERS)]
        second_pages = rng.permutation(PAGES)[: len(TOKENS) // 32]
        with client.acquire(ns, TOKENS) as lease:
            copied = lease.copy_to(Pages(second, second_pages, axes="bhtd"))
        print(f"loaded {copied.tokens} tokens {copied.reason}".rstrip())

        if copied.ok:
            # Token 100 of the prompt: page 6 of the first engine, page 3 of the second.
            same = np.array_equal(first[1][0, first_pages[6], 4], second[1][0][second_pages[3], :, 4])
            print(f"the same bytes: {'yes' if same or stored.stored_blocks == 0 else 'no'}")


if __name__ == "__main__":
    main()
