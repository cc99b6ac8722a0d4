"""vLLM's form of our counters: in its log lines, and on its metrics page.

What belongs here: vLLM's classes. Which numbers there are is in counting.

Rules:
1. Names on the metrics page begin with `vllm:prefixcache_`: an engine made anew in one process drops what has vllm in
   its name from the registry first, and anything else would be there twice, which is an error.
2. A number that is not known is left out: an exception here would end the server.
"""

from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1 import metrics

from prefixcache_vllm.counting import LOAD_SECONDS, REASONED, TOTALS, added, for_a_log_line

_PREFIX: Final = "vllm:prefixcache_"
_BUCKETS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_PAGE: Any = getattr(metrics, "KVConnectorPromMetrics", None)


class PrefixCacheStats(metrics.KVConnectorStats):  # type: ignore[misc] # vLLM is not installed where types are checked
    """`data`: numbers by name, since the last time they were taken."""

    data: dict[str, Any]

    def reset(self) -> None:
        """Forget them."""
        self.data = {}

    def aggregate(self, other: metrics.KVConnectorStats) -> "PrefixCacheStats":
        """These and another rank's, or another step's."""
        return PrefixCacheStats(data=added(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        """For a log line."""
        return for_a_log_line(self.data)

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class PrefixCacheMetrics(_PAGE or object):  # type: ignore[misc] # a base that some versions may lack
    """The same numbers as Prometheus counters, and a histogram of how long loads took, by engine."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labels: list[str], engines: dict[int, list[object]]
    ) -> None:
        """`engines`: the values of `labels`, by the engine's number."""
        super().__init__(vllm_config, metric_types, labels, engines)
        self._engines = engines
        totals = {name: self._counter_cls(_PREFIX + name, text, labels) for name, text in TOTALS.items()}
        self._reasoned = {
            name: self._counter_cls(_PREFIX + name, f"{text}, by reason", [*labels, "reason"])
            for name, text in REASONED.items()
        }
        text = "From the order to load blocks until they were there, seconds"
        seconds = self._histogram_cls(_PREFIX + LOAD_SECONDS, text, labels, buckets=_BUCKETS_S)
        self._seconds = {number: seconds.labels(*values) for number, values in engines.items()}
        # Named now rather than at the first count, so that a counter at zero is on the page.
        self._totals = {
            number: {name: counter.labels(*values) for name, counter in totals.items()}
            for number, values in engines.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """See the base class."""
        totals = self._totals[engine_idx]
        for name, value in transfer_stats_data.items():
            kind, _, reason = name.partition(".")
            if name == LOAD_SECONDS:
                for each in value:
                    self._seconds[engine_idx].observe(each)
            elif name in totals:
                totals[name].inc(value)
            elif kind in self._reasoned:
                self._reasoned[kind].labels(*self._engines[engine_idx], reason).inc(value)


def stats_of(data: dict[str, Any] | None) -> PrefixCacheStats:
    """Stats that came from another process."""
    return PrefixCacheStats(data=dict(data or {}))


def metrics_page(
    vllm_config: Any, metric_types: Any, labels: list[str], engines: dict[int, list[object]]
) -> PrefixCacheMetrics | None:
    """What vLLM shows on its metrics page; None in versions that show nothing of connectors."""
    return None if _PAGE is None else PrefixCacheMetrics(vllm_config, metric_types, labels, engines)
