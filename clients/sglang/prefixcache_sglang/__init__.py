"""prefixcache for SGLang: pages of the host's HiCache, kept over restarts and shared by all workers of a host.

    python -m sglang.launch_server --model-path MODEL --page-size 64 --enable-hierarchical-cache
        --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "prefixcache",
        "module_path": "prefixcache_sglang", "class_name": "PrefixCacheStorage", "interface_v1": 1,
        "prefixcache.address": "unix:///run/prefixcache/daemon.sock"}'

SGLang is imported when the backend is asked for: the rest of the package needs none.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefixcache_sglang.storage import PrefixCacheStorage

__all__ = ["PrefixCacheStorage"]


def __getattr__(name: str) -> Any:
    if name == "PrefixCacheStorage":
        from prefixcache_sglang.storage import PrefixCacheStorage

        return PrefixCacheStorage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
