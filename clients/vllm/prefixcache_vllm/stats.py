"""vLLM's form of our counters: in its log lines, and on its metrics page.

What belongs here: vLLM's classes. Which numbers there are is in counting.
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from prefixcache_vllm.counting import added


class PrefixCacheStats(KVConnectorStats):  # type: ignore[misc] # vLLM is not installed where types are checked
    """`data`: numbers by name, since the last time they were taken."""

    data: dict[str, Any]

    def reset(self) -> None:
        """Forget them."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "PrefixCacheStats":
        """These and another rank's, or another step's."""
        return PrefixCacheStats(data=added(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        """For a log line."""
        return dict(sorted(self.data.items()))

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


def stats_of(data: dict[str, Any] | None) -> PrefixCacheStats:
    """Stats that came from another process."""
    return PrefixCacheStats(data=dict(data or {}))
