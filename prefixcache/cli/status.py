"""`prefixcache status`: what the daemon holds and serves, as fixed JSON names (server/report.py) or as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prefixcache.cli.daemon import connect
from prefixcache.cli.output import Settings, count, share, size, span, table
from prefixcache.server.report import describe_stats

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

AMOUNTS = ("leased", "filling", "quarantined")


def run(settings: Settings) -> None:
    """Ask once and print."""
    with connect(settings.address) as daemon:
        told = {"address": daemon.address, **describe_stats(daemon.stats())}
    settings.emit(told, lambda: draw(told))


def draw(told: dict[str, Any]) -> list[RenderableType]:
    """The same for people."""
    from rich.text import Text

    healthy = told["health"] == "serving"
    head = Text.assemble(
        ("● " + told["health"].replace("_", " "), "green" if healthy else "red"),
        f"  {told['health_detail']}" if told["health_detail"] else "",
        f"  prefixcache {told['version']}, up {span(told['uptime_s'])}, at " + ", ".join(told["addresses"]),
    )
    dead = [part["part"] for part in told["parts"] if not part["alive"]]
    items: list[RenderableType] = [head]
    if dead:
        items.append(Text(f"no sign of life from: {', '.join(dead)}", style="red"))
    items += [_tier_table(told["tiers"]), *_tier_notes(told["tiers"]), _token_line(told)]
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
    drawn = table("tier", "state", "used", "of", "full", "blocks", "evicted")
    for tier in tiers:
        held, capacity = tier["used_bytes"], tier["capacity_bytes"]
        sizes = [size(held), size(capacity), share(held, capacity)]
        drawn.add_row(tier["tier"], tier["state"], *sizes, count(tier["blocks"]), count(tier["evicted_blocks"]))
    return drawn


def _tier_notes(tiers: list[dict[str, Any]]) -> list[RenderableType]:
    """What is mostly nothing, where it is something."""
    from rich.markup import escape

    notes: list[RenderableType] = []
    for tier in tiers:
        amounts = [f"{name} {size(tier[f'{name}_bytes'])}" for name in AMOUNTS if tier[f"{name}_bytes"]]
        if tier["pinned_bytes"]:
            amounts.append(f"pinned {size(tier['pinned_bytes'])} of {size(tier['pin_budget_bytes'])}")
        told = [*amounts, tier["detail"]] if tier["detail"] else amounts
        if told:
            notes.append(escape(f"  {tier['tier']}: {', '.join(told)}"))
    return notes


def _namespace_table(namespaces: list[dict[str, Any]]) -> Table:
    from rich.markup import escape

    drawn = table("namespace", "fingerprint", "blocks", "bytes", "tokens", "block", "hit rate")
    for namespace in namespaces:
        rate = "-" if namespace["hit_rate"] is None else f"{100 * namespace['hit_rate']:.1f}%"
        held = size(namespace["blocks"] * namespace["block_bytes"])
        block = [str(namespace["block_tokens"]), size(namespace["block_bytes"])]
        label, fingerprint = escape(namespace["label"]) or "-", namespace["fingerprint"][:12]
        drawn.add_row(label, fingerprint, count(namespace["blocks"]), held, *block, rate)
    return drawn


def _session_table(sessions: list[dict[str, Any]]) -> Table:
    from rich.markup import escape

    drawn = table("session", "transport", "pid", "leases", "reservations", "age")
    for session in sessions:
        counts = [str(session["pid"] or "-"), str(session["leases"]), str(session["reservations"])]
        drawn.add_row(escape(session["client_name"]) or "-", session["transport"], *counts, span(session["age_s"]))
    return drawn
