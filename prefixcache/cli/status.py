"""`prefixcache status`: what the daemon holds and serves, as fixed JSON names (server/report.py) or as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prefixcache.cli.daemon import connect
from prefixcache.cli.output import Settings, share, size
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
