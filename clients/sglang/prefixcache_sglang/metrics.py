"""SGLang's own numbers about storage, made of ours. What this version has for it is found by looking."""

import sys
from collections.abc import Sequence
from typing import Any, Final

from prefixcache_sglang.counting import Transferred

_MODULES: Final = ("sglang.srt.observability.metrics_collector", "sglang.srt.metrics.collector")


def storage_metrics(loads: Sequence[Transferred], stores: Sequence[Transferred]) -> Any:
    """A StorageMetrics of these transfers; None where SGLang has no such thing."""
    kind = next((found for name in _MODULES if (found := getattr(sys.modules.get(name), "StorageMetrics", None))), None)
    if kind is None:
        return None
    made = kind()
    for pages, bandwidth, transfers in (
        ("prefetch_pgs", "prefetch_bandwidth", loads),
        ("backup_pgs", "backup_bandwidth", stores),
    ):
        for name, values in (
            (pages, [each.pages for each in transfers]),
            (bandwidth, [each.gb_per_s for each in transfers]),
        ):
            if hasattr(made, name):
                getattr(made, name).extend(values)
    return made
