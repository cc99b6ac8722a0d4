"""prefixcache for vLLM: prefixes shared by all workers of a host, over restarts and between engines.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "PrefixCacheConnector",
        "kv_connector_module_path": "prefixcache_vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"prefixcache.address": "unix:///run/prefixcache/daemon.sock"}}'

vLLM is imported when the connector is asked for: the rest of the package is bookkeeping that needs none.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefixcache_vllm.connector import PrefixCacheConnector

__all__ = ["PrefixCacheConnector"]


def __getattr__(name: str) -> Any:
    if name == "PrefixCacheConnector":
        from prefixcache_vllm.connector import PrefixCacheConnector

        return PrefixCacheConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
