"""GetStats as plain values: the one form that `prefixcache status --json` and /stats.json share.

The names are a promise to scripts: they may gain keys, never change meaning. Messages in, values out; nothing is asked.
"""

from __future__ import annotations

from typing import Any

from prefixcache.server.errors import reason_name
from prefixcache.v1 import admin_pb2, common_pb2

TIERS = ("gpu", "host", "disk", "peer")


def describe_stats(stats: admin_pb2.GetStatsResponse) -> dict[str, Any]:
    """The answer as JSON-ready values. Sizes in bytes, times in seconds, hits and misses in tokens."""
    return {
        "addresses": list(stats.addresses),
        "version": stats.version,
        "incarnation": stats.incarnation.hex(),
        "uptime_s": stats.uptime_s,
        "health": stats.health,
        "health_detail": stats.health_detail,
        "parts": [{"part": p.part, "age_s": p.age_s, "alive": p.alive} for p in stats.parts],
        "tiers": [_tier(tier) for tier in stats.tiers],
        "namespaces": [_namespace(namespace) for namespace in stats.namespaces],
        "tokens": sums(stats.tokens),
        "hit_rate": hit_rate(sums(stats.tokens)),
        "sessions": [_session(session) for session in stats.sessions],
        "counters": [{"name": c.name, "label": c.label, "value": c.value} for c in stats.counters],
    }


def sums(tokens: admin_pb2.TokenSums) -> dict[str, Any]:
    """The closed sum: looked_up = all hits + all misses + pending."""
    return {
        "looked_up": tokens.looked_up,
        "hit": tier_tokens(tokens.hit),
        "miss": {reason_name(item.reason): item.count for item in tokens.miss},
        "pending": tokens.pending,
    }


def tier_tokens(tokens: common_pb2.TierTokens) -> dict[str, int]:
    """Tokens by tier, all four always there."""
    return {tier: getattr(tokens, tier) for tier in TIERS}


def hit_rate(tokens: dict[str, Any]) -> float | None:
    """Tokens hit of tokens decided (those under running leases are not); None before the first."""
    hit = sum(tokens["hit"].values())
    decided = hit + sum(tokens["miss"].values())
    return hit / decided if decided else None


def tier_name(tier: int) -> str:
    """`host` of TIER_HOST; the number of one that this build does not know."""
    names: dict[int, str] = {value: name for name, value in common_pb2.Tier.items()}
    return names[tier].removeprefix("TIER_").lower() if tier in names else str(tier)


def _tier(tier: admin_pb2.TierStats) -> dict[str, Any]:
    return {
        "tier": tier_name(tier.tier),
        "state": tier.state,
        "detail": tier.detail,
        "capacity_bytes": tier.capacity_bytes,
        "ready_bytes": tier.ready_bytes,
        "used_bytes": tier.used_bytes,
        "filling_bytes": tier.filling_bytes,
        "leased_bytes": tier.leased_bytes,
        "quarantined_bytes": tier.quarantined_bytes,
        "pinned_bytes": tier.pinned_bytes,
        "pin_budget_bytes": tier.pin_budget_bytes,
        "blocks": tier.blocks,
        "evicted_blocks": tier.evicted_blocks,
        "device": tier.device,
    }


def _namespace(namespace: admin_pb2.NamespaceStats) -> dict[str, Any]:
    tokens = sums(namespace.tokens)
    return {
        "namespace_id": namespace.namespace_id,
        "fingerprint": namespace.fingerprint.hex(),
        "label": namespace.label,
        "block_tokens": namespace.block_tokens,
        "block_bytes": namespace.block_bytes,
        "blocks": namespace.blocks,
        "tokens": tokens,
        "hit_rate": hit_rate(tokens),
    }


def _session(session: admin_pb2.SessionStats) -> dict[str, Any]:
    return {
        "client_name": session.client_name,
        "transport": session.transport,
        "pid": session.pid,
        "leases": session.leases,
        "reservations": session.reservations,
        "age_s": session.age_s,
    }
