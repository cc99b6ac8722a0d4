"""Prometheus: what GetStats tells, as metrics. Nothing is counted here, so nothing can be counted twice.

Names are `prefixcache_...`, units at the end; labels have few values (tiers, reasons, methods, namespaces by short id).
"""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from prefixcache.server.dispatch import CallCounters
from prefixcache.server.errors import reason_name
from prefixcache.server.stats import Statistics
from prefixcache.v1 import admin_pb2 as pb
from prefixcache.v1 import common_pb2 as common

_GAUGES = frozenset(
    {
        "disk_write_amplification_permille", "disk_probed_bytes_per_s", "disk_load_bytes_per_s", "disk_loading_bytes",
        "slots_quarantined", "sessions_open", "background_orders", "pins", "watchers",
    }
)  # fmt: skip
_TIERS = ("gpu", "host", "disk", "peer")
_KINDS = ("capacity", "ready", "used", "filling", "quarantined", "leased", "pinned")


class Metrics(Collector):
    """Collects at each scrape."""

    def __init__(self, statistics: Statistics, counters: CallCounters) -> None:
        self._statistics = statistics
        self._counters = counters
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        """Nothing ahead of time: that would need a snapshot before the server is up."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics of this moment."""
        stats = self._statistics.snapshot()
        yield from _tokens(stats.tokens)
        yield from _tiers(stats.tiers)
        yield from _namespaces(stats.namespaces)
        yield from _health(stats)
        yield from self._calls()
        for counter in stats.counters:
            if counter.name in _GAUGES:
                yield GaugeMetricFamily(f"prefixcache_{counter.name}", f"{counter.name} now", counter.value)
            elif not counter.label:
                yield CounterMetricFamily(f"prefixcache_{counter.name}", f"{counter.name} since start", counter.value)
        yield _labelled(stats.counters, "blocks_skipped", ["reason"])
        yield _labelled(stats.counters, "prefetch_stops", ["reason"])
        yield _labelled(stats.counters, "pins_ended", ["reason"])
        yield _labelled(stats.counters, "refused_calls", ["method", "reason"])
        if any(tier.tier == common.TIER_GPU for tier in stats.tiers):
            for name in ("gpu_drops", "promotions_skipped"):
                yield _labelled(stats.counters, name, ["reason"])
        if any(tier.tier == common.TIER_DISK for tier in stats.tiers):
            yield _labelled(stats.counters, "disk_drops", ["reason"])
            yield _labelled(stats.counters, "disk_recovery", ["finding"])
            yield _labelled(stats.counters, "disk_kept_raw", ["reason"])
            yield _labelled(stats.counters, "disk_packed_bytes", ["form"])
            for name in ("disk_writes", "disk_reads"):
                yield _labelled(stats.counters, name, ["outcome"])
            counters = {(each.name, each.label): each.value for each in stats.counters}
            text = "How long it took to read what is on disk; 0 until that is over"
            yield GaugeMetricFamily(
                "prefixcache_disk_recovery_seconds", text, counters["disk_recovery_us", "took"] / 1e6
            )

    def _calls(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(
            "prefixcache_call_seconds", "Time inside the server of answered calls", labels=["transport", "method"]
        )
        for (transport, method), latency in sorted(self._counters.latency.items()):
            pairs = latency.cumulative()
            buckets = [(str(bound), float(count)) for bound, count in pairs[:24]]
            buckets.append(("+Inf", float(pairs[-1][1])))
            family.add_metric([transport, method], buckets, latency.sum_s)
        yield family


def _tokens(tokens: pb.TokenSums) -> Iterator[Metric]:
    """The closed sum: looked_up = sum of hit + sum of miss + pending."""
    looked_up = CounterMetricFamily("prefixcache_tokens_looked_up", "Tokens asked for by Acquire")
    looked_up.add_metric([], tokens.looked_up)
    hit = CounterMetricFamily("prefixcache_tokens_hit", "Tokens used, by tier", labels=["tier"])
    for tier in _TIERS:
        hit.add_metric([tier], getattr(tokens.hit, tier))
    miss = CounterMetricFamily("prefixcache_tokens_miss", "Tokens not served, by reason", labels=["reason"])
    for item in tokens.miss:
        miss.add_metric([reason_name(item.reason)], item.count)
    yield looked_up
    yield hit
    yield miss
    yield GaugeMetricFamily("prefixcache_tokens_pending", "Tokens under leases that have not ended", tokens.pending)


def _tiers(tiers: Iterable[pb.TierStats]) -> Iterator[Metric]:
    by_kind = GaugeMetricFamily("prefixcache_tier_bytes", "Bytes of a tier, by what they are", labels=["tier", "kind"])
    blocks = GaugeMetricFamily("prefixcache_tier_blocks", "Visible blocks", labels=["tier"])
    evicted = CounterMetricFamily("prefixcache_tier_evicted_blocks", "Blocks evicted", labels=["tier"])
    works = GaugeMetricFamily("prefixcache_tier_on", "1 while the tier works as it should", labels=["tier"])
    why = GaugeMetricFamily("prefixcache_tier_trouble", "1 for why a tier is not on", labels=["tier", "reason"])
    for tier in _by_tier(tiers):
        name = common.Tier.Name(tier.tier).removeprefix("TIER_").lower()
        for kind in _KINDS:
            by_kind.add_metric([name, kind], getattr(tier, f"{kind}_bytes"))
        blocks.add_metric([name], tier.blocks)
        evicted.add_metric([name], tier.evicted_blocks)
        works.add_metric([name], float(tier.state == "on"))
        if tier.state != "on":
            why.add_metric([name, tier.detail], 1.0)
    yield from (by_kind, blocks, evicted, works, why)


def _by_tier(rows: Iterable[pb.TierStats]) -> Iterable[pb.TierStats]:
    """One row a tier: GPU pools are added up, and the tier is on when all of them are."""
    sums: dict[int, pb.TierStats] = {}
    for row in rows:
        known = sums.setdefault(row.tier, pb.TierStats(tier=row.tier, state=row.state, detail=row.detail))
        if row.state != "on":
            known.state, known.detail = row.state, row.detail
        for field in (*(f"{kind}_bytes" for kind in _KINDS), "blocks", "evicted_blocks"):
            setattr(known, field, getattr(known, field) + getattr(row, field))
    return sums.values()


def _namespaces(namespaces: Iterable[pb.NamespaceStats]) -> Iterator[Metric]:
    """By short id, which a restart gives anew; the fingerprint is in `status`."""
    blocks = GaugeMetricFamily("prefixcache_namespace_blocks", "Visible blocks", labels=["namespace"])
    looked_up = CounterMetricFamily("prefixcache_namespace_tokens_looked_up", "Tokens asked for", labels=["namespace"])
    hit = CounterMetricFamily("prefixcache_namespace_tokens_hit", "Tokens used, any tier", labels=["namespace"])
    for space in namespaces:
        name = str(space.namespace_id)
        blocks.add_metric([name], space.blocks)
        looked_up.add_metric([name], space.tokens.looked_up)
        hit.add_metric([name], sum(getattr(space.tokens.hit, tier) for tier in _TIERS))
    yield from (blocks, looked_up, hit)


def _health(stats: pb.GetStatsResponse) -> Iterator[Metric]:
    yield GaugeMetricFamily("prefixcache_serving", "1 while calls are answered", float(stats.health != "not_serving"))
    yield GaugeMetricFamily("prefixcache_uptime_seconds", "Time since start", stats.uptime_s)
    age = GaugeMetricFamily("prefixcache_part_age_seconds", "Time since a part's last sign of life", labels=["part"])
    for part in stats.parts:
        age.add_metric([part.part], part.age_s)
    yield age


def _labelled(counters: Iterable[pb.Counter], name: str, labels: list[str]) -> Metric:
    family = CounterMetricFamily(f"prefixcache_{name}", f"{name} since start", labels=labels)
    for counter in counters:
        if counter.name == name:
            family.add_metric(counter.label.split(":") if len(labels) > 1 else [counter.label], counter.value)
    return family
