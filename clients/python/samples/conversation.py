"""A conversation of several turns: keys are hashed once, each turn finds all turns before it."""

import numpy as np

from prefixcache.identity.layout import GroupKind, LayerGroup, Layout
from prefixcache_client import Blocks, Client

TURNS, TURN_TOKENS, BLOCK_TOKENS = 4, 200, 64


def main() -> None:
    """Four turns."""
    layout = Layout.of(LayerGroup(GroupKind.FULL, (0, 1), 2, 16, 16, "float16"))
    with Client() as client:
        ns = client.namespace(layout, weights_digest=b"conversation weights".ljust(32, b"."), block_tokens=BLOCK_TOKENS)
        chain = ns.chain()
        for turn in range(TURNS):
            chain.append(range(turn * TURN_TOKENS, (turn + 1) * TURN_TOKENS))
            with client.acquire(ns, chain) as lease:
                print(f"turn {turn + 1}: {lease.tokens} of {chain.token_count} tokens are cached")
                # What another engine stored can be looked at in place, without a copy.
                if lease:
                    with lease.view(lease.blocks - 1) as array:
                        begins_with = int(array.view(np.float16)[0])
                        # The bytes count only if the lease was still good after they were read.
                        print(f"  the last cached block: {begins_with if lease.valid() else 'lost'}")
            # Stored on a thread behind the request: a full queue drops it and says so.
            first = lease.blocks
            fresh = np.empty((chain.block_count - first, ns.block_bytes // 2), np.float16)
            fresh[:] = np.arange(first, chain.block_count)[:, None]
            later = client.store_later(ns, chain, Blocks(fresh, first_block=first))
            print(f"  stored {later.result().stored_blocks} blocks")


if __name__ == "__main__":
    main()
