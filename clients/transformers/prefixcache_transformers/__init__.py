"""Prefix reuse for Hugging Face Transformers, 4.57 and 5.x.

    from prefixcache_transformers import Daemon, PrefixCache

    cache = PrefixCache(model, Daemon())
    output = cache.generate(input_ids, attention_mask, max_new_tokens=64)

Names are imported when they are first used: `prefixcache_transformers.smollm2` must not cost an import of torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefixcache_transformers.block_store import BlockLease, BlockStore, MemoryBlockStore, PartBlocks, StoreOpener
    from prefixcache_transformers.daemon import Daemon
    from prefixcache_transformers.prefix_cache import CachedPrefix, CacheOptions, PrefixCache
    from prefixcache_transformers.probe import UnsupportedModelError
    from prefixcache_transformers.storing import Stats

__all__ = [
    "BlockLease",
    "BlockStore",
    "CacheOptions",
    "CachedPrefix",
    "Daemon",
    "MemoryBlockStore",
    "PartBlocks",
    "PrefixCache",
    "Stats",
    "StoreOpener",
    "UnsupportedModelError",
]

_HOMES = {
    "Daemon": "daemon",
    "CacheOptions": "prefix_cache",
    "CachedPrefix": "prefix_cache",
    "PrefixCache": "prefix_cache",
    "UnsupportedModelError": "probe",
    "Stats": "storing",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'block_store')}"), name)
