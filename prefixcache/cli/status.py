"""`prefixcache status`: what the daemon holds and serves, as fixed JSON names or as tables.

The names of `describe_stats` are a promise to scripts: they may gain keys, never change meaning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prefixcache.cli.daemon import connect, reason_name
from prefixcache.cli.output import Settings, share, size
from prefixcache.v1 import admin_pb2, common_pb2

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

TIERS = ("gpu", "host", "disk", "peer")
AMOUNTS = ("leased", "filling", "quarantined")


def run(settings: Settings) -> None:
    """Ask once and print."""
    with connect(settings.address) as daemon:
        told = describe_stats(daemon.stats(), daemon.address)
    settings.emit(told, lambda: draw(told))


def describe_stats(stats: admin_pb2.GetStatsResponse, address: str) -> dict[str, Any]:
    """The answer as JSON-ready values. Sizes in bytes, times in seconds, hits and misses in tokens."""
    return {
        "address": address,
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
        "blocks": tier.blocks,
        "evicted_blocks": tier.evicted_blocks,
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


def draw(told: dict[str, Any]) -> list[RenderableType]:
    """The same for people."""
    from rich.text import Text

    healthy = told["health"] == "serving"
    head = Text.assemble(
        ("● " + told["health"].replace("_", " "), "green" if healthy else "red"),
        f"  {told['health_detail']}" if told["health_detail"] else "",
        f"  prefixcache {told['version']}, up {told['uptime_s']:.0f} s, at " + ", ".join(told["addresses"]),
    )
    dead = [part["part"] for part in told["parts"] if not part["alive"]]
    items: list[RenderableType] = [head]
    if dead:
        items.append(Text(f"no sign of life from: {', '.join(dead)}", style="red"))
    items += [_tier_table(told["tiers"]), _token_line(told)]
    items += [_namespace_table(told["namespaces"])] if told["namespaces"] else []
    items += [_session_table(told["sessions"])] if told["sessions"] else []
    return items


def _token_line(told: dict[str, Any]) -> RenderableType:
    tokens = told["tokens"]
    looked_up = tokens["looked_up"]
    hits = ", ".join(f"{tier} {n:,}" for tier, n in tokens["hit"].items() if n) or "none"
    misses = ", ".join(f"{reason} {n:,}" for reason, n in tokens["miss"].items() if n) or "none"
    rate = "-" if told["hit_rate"] is None else f"{100 * told['hit_rate']:.1f}%"
    return (
        f"hit rate [bold]{rate}[/] of {looked_up:,} tokens looked up\n"
        f"  hit: {hits}\n  miss: {misses}\n  pending: {tokens['pending']:,}"
    )


def _tier_table(tiers: list[dict[str, Any]]) -> Table:
    from rich.markup import escape

    # What is mostly zero takes a column only when it is not.
    amounts = [name for name in AMOUNTS if name == "leased" or any(tier[f"{name}_bytes"] for tier in tiers)]
    table = _table("tier", "state", "used", *amounts, "blocks", "evicted")
    for tier in tiers:
        state = escape(tier["state"] + (f" ({tier['detail']})" if tier["detail"] else ""))
        held, capacity = tier["used_bytes"], tier["capacity_bytes"]
        used = f"{size(held)} of {size(capacity)} ({share(held, capacity)})"
        sizes = [size(tier[f"{name}_bytes"]) for name in amounts]
        table.add_row(tier["tier"], state, used, *sizes, f"{tier['blocks']:,}", f"{tier['evicted_blocks']:,}")
    return table


def _namespace_table(namespaces: list[dict[str, Any]]) -> Table:
    from rich.markup import escape

    table = _table("namespace", "fingerprint", "blocks", "bytes", "block", "hit rate")
    for namespace in namespaces:
        rate = "-" if namespace["hit_rate"] is None else f"{100 * namespace['hit_rate']:.1f}%"
        held = size(namespace["blocks"] * namespace["block_bytes"])
        block = f"{namespace['block_tokens']} tokens, {size(namespace['block_bytes'])}"
        label, fingerprint = escape(namespace["label"]) or "-", namespace["fingerprint"][:12]
        table.add_row(label, fingerprint, f"{namespace['blocks']:,}", held, block, rate)
    return table


def _session_table(sessions: list[dict[str, Any]]) -> Table:
    from rich.markup import escape

    table = _table("session", "transport", "pid", "leases", "reservations", "age")
    for session in sessions:
        counts = [str(session["pid"] or "-"), str(session["leases"]), str(session["reservations"])]
        table.add_row(escape(session["client_name"]) or "-", session["transport"], *counts, f"{session['age_s']:.0f} s")
    return table


def _table(*columns: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < 2 else "right")
    return table
