"""From prompts to a filled cache: leases, the common cut, the windows of sliding layers.

Rules:
1. Every lease is released, also when something fails.
2. Nothing is put into the cache unless everything that the cut needs has arrived.

What belongs here: the order of calls on a BlockStore. Tensors are cache_io's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import DynamicCache

from prefixcache.identity.keychain import KeyChain
from prefixcache.identity.keys import KEY_BYTES
from prefixcache_transformers.batch import Prompt, common_column
from prefixcache_transformers.block_store import STORE_FAILURES, BlockLease, BlockStore
from prefixcache_transformers.cache_io import RestoredRow, needed_from, restore
from prefixcache_transformers.probe import CacheShape

__all__ = ["Restored", "restore_prompts"]


@dataclass(frozen=True, slots=True)
class Restored:
    """What is in the cache: `columns` of the batch, `tokens` of each row. `reason`: what failed, or ""."""

    columns: int
    tokens: tuple[int, ...]
    reason: str = ""


def restore_prompts(
    store: BlockStore, shape: CacheShape, cache: DynamicCache, prompts: Sequence[Prompt], chains: Sequence[KeyChain]
) -> Restored:
    """Fill an empty `cache` with the longest prefix that all rows can share; on any failure it stays empty."""
    leases: list[list[BlockLease]] = []
    restored = Restored(0, (0,) * len(prompts))
    try:
        for prompt, chain in zip(prompts, chains, strict=True):
            leases.append([store.acquire(chain.keys, len(prompt.tokens))])
        restored = _fill(store, shape, cache, list(zip(prompts, chains, leases, strict=True)))
    except STORE_FAILURES:
        restored = Restored(0, restored.tokens, "store_failed")
    failed = False
    for row, tokens in zip(leases, restored.tokens, strict=False):
        failed |= not _release(row, -(-tokens // chains[0].block_tokens))
    return Restored(restored.columns, restored.tokens, "release_failed") if failed else restored


_Row = tuple[Prompt, KeyChain, list[BlockLease]]


def _fill(store: BlockStore, shape: CacheShape, cache: DynamicCache, rows: Sequence[_Row]) -> Restored:
    prompts = [prompt for prompt, _, _ in rows]
    size = rows[0][1].block_tokens
    column = common_column(prompts, [leases[0].blocks * size for _, _, leases in rows])
    tokens = tuple(max(0, column - prompt.pad) for prompt in prompts)
    nothing = (0,) * len(rows)
    if not column:
        return Restored(0, nothing)
    for (_, chain, leases), count in zip(rows, tokens, strict=True):
        if not _cover_windows(store, shape, chain, leases, count):
            return Restored(0, nothing, "window_missing")
    wanted = [
        RestoredRow(prompt.pad, count, tuple(leases))
        for (prompt, _, leases), count in zip(rows, tokens, strict=True)
    ]  # fmt: skip
    if not restore(cache, shape, size, wanted, column):
        return Restored(0, nothing, "lease_lost")
    return Restored(column, tokens)


def _cover_windows(
    store: BlockStore, shape: CacheShape, chain: KeyChain, leases: list[BlockLease], tokens: int
) -> bool:
    """Make sure that a row's leases hold the windows before `tokens`, where it is cut; adds leases where they do not.

    A lease holds the window before its own end only. The two whole-block lengths around the cut cover it together.
    """
    if _covered(shape, leases, tokens, chain.block_tokens):
        return True
    for blocks in (-(-tokens // chain.block_tokens), tokens // chain.block_tokens):
        leases.append(store.acquire(chain.keys[: blocks * KEY_BYTES], tokens))
        if leases[-1].blocks != blocks:
            return False
        if _covered(shape, leases, tokens, chain.block_tokens):
            return True
    return False


def _covered(shape: CacheShape, leases: Sequence[BlockLease], tokens: int, block_tokens: int) -> bool:
    for part, group in enumerate(shape.layout.groups):
        uncovered = -(-tokens // block_tokens)
        for lease in leases:
            if lease.blocks >= uncovered:
                uncovered = min(uncovered, lease.first_block(part))
        if uncovered > needed_from(group, tokens) // block_tokens:
            return False
    return True


def _release(leases: Sequence[BlockLease], used_blocks: int) -> bool:
    released = True
    for lease in leases:
        try:
            lease.release(min(lease.blocks, used_blocks))
        except STORE_FAILURES:
            released = False
    return released
