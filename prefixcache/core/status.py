"""State as plain numbers, for `status`, metrics and tests.

Rules: reads only; cost grows with namespaces and classes, not with blocks. Names follow the wire.
"""

from __future__ import annotations

from typing import Any

from prefixcache.core.ids import Tier
from prefixcache.core.planner import Planner


def status(planner: Planner) -> dict[str, Any]:
    """tokens (the closed sum), tiers, namespaces, sessions, leases, reservations, counters; msgpack- and JSON-able."""
    state = planner.state
    stats = state.stats
    return {
        "tokens": token_sum(planner),
        "tiers": {tier.name.lower(): _tier(planner, tier) for tier in Tier},
        "namespaces": [
            {
                "namespace": space.number,
                "fingerprint": space.fingerprint.hex(),
                "kind": space.spec.kind.value,
                "block_tokens": space.block_tokens,
                "blocks": space.table.used,
                "unverified_parts": space.table.unverified,
            }
            for space in state.namespaces.values()
        ],
        "sessions": sum(not session.ended for session in state.sessions.values()),
        "leases": len(state.leases),
        "reservations": sum(not each.expired for each in state.reservations.values()),
        "draining": state.draining,
        "counters": {
            "acquires": stats.acquires,
            "lookups": stats.lookups,
            "blocks_stored": stats.blocks_stored,
            "blocks_evicted": stats.blocks_evicted,
            "blocks_cleared": stats.blocks_cleared,
            "leases_expired": stats.leases_expired,
            "reservations_expired": stats.reservations_expired,
            "parts_failed_verification": stats.parts_failed_verification,
            "slots_moved": stats.slots_moved,
        },
        "blocks_skipped": {reason.value: count for reason, count in stats.blocks_skipped.items()},
        "refused": dict(stats.refused),
    }


def token_sum(planner: Planner) -> dict[str, Any]:
    """The closed sum of design rule 6."""
    tokens = planner.state.stats.tokens
    return {
        "looked_up": tokens.looked_up,
        "hit": {tier.name.lower(): tokens.hit[tier] for tier in Tier},
        "miss": {reason.value: count for reason, count in tokens.miss.items() if count},
        "pending": tokens.pending,
    }


def _tier(planner: Planner, tier: Tier) -> dict[str, Any]:
    pools = [pool for pool in planner.state.pools.values() if pool.spec.tier is tier]
    if not pools:
        return {"enabled": False, "size_bytes": 0, "ready_bytes": 0, "used_bytes": 0, "quarantined_slots": 0}
    return {
        "enabled": True,
        "size_bytes": sum(pool.spec.size_bytes for pool in pools),
        "ready_bytes": sum(pool.ready_bytes for pool in pools),
        "used_bytes": sum(pool.used_bytes for pool in pools),
        "quarantined_slots": planner.state.stats.slots_quarantined if tier is Tier.HOST else 0,
    }
