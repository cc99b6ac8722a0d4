"""`prefixcache watch`: what comes and goes in the daemon, a line each, and what it was all together.

It goes on over a restart of the daemon; Ctrl-C, --count or --for end it.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

import typer

from prefixcache.cli import namespaces
from prefixcache.cli.daemon import connect
from prefixcache.cli.errors import CliError, bad_usage
from prefixcache.cli.output import Settings, span
from prefixcache.server.units import parse_duration
from prefixcache_client.address import parse_address
from prefixcache_client.errors import WatchRefusedError
from prefixcache_client.events import EventKind, WatchEvent
from prefixcache_client.session import grpc_alone
from prefixcache_client.watching import Watch

BLOCKS: Final = frozenset({EventKind.STORED, EventKind.REMOVED, EventKind.MOVED, EventKind.CLEARED})
TIERS: Final = frozenset({"host", "disk", "gpu"})
_LOOK_S: Final = 0.5
_SHORT_KEY: Final = 8


@dataclass(frozen=True)
class Wish:
    """What the user wants to see. kinds, tiers: empty for all. count: events after which it ends, 0 for never."""

    namespace: str | None = None
    kinds: frozenset[str] = frozenset()
    tiers: frozenset[str] = frozenset()
    count: int = 0
    lasts_s: float = float("inf")
    snapshot: bool = False

    def wants(self, event: WatchEvent) -> bool:
        """Whether it is shown. A gap always is: what was seen may be wrong."""
        if event.kind not in BLOCKS:
            return event.kind in (EventKind.GAP, EventKind.SNAPSHOT_END)
        return (not self.kinds or event.kind in self.kinds) and (not self.tiers or event.tier in self.tiers)


@dataclass
class Seen:
    """What was seen so far. `names`: labels and block sizes by fingerprint."""

    names: dict[bytes, tuple[str, int]] = field(default_factory=dict)
    shown: int = 0
    gaps: int = 0
    lost: int = 0
    held: Counter[str] = field(default_factory=Counter)  # blocks of the snapshot, by tier
    blocks: Counter[tuple[str, str]] = field(default_factory=Counter)  # of news, by kind and tier
    tokens: Counter[tuple[str, str]] = field(default_factory=Counter)

    def count(self, event: WatchEvent) -> None:
        """One more."""
        if event.kind is EventKind.GAP:
            self.gaps += 1
            self.lost += event.lost
        elif event.snapshot:
            self.held[event.tier] += len(event.keys)
        elif event.kind in BLOCKS:
            what = (str(event.kind), event.tier)
            self.blocks[what] += len(event.keys)
            self.tokens[what] += len(event.keys) * self.names.get(event.fingerprint, ("", 0))[1]

    def summary(self, seconds: float) -> dict[str, Any]:
        """As JSON-ready values."""
        return {
            "seconds": round(seconds, 3),
            "events": self.shown,
            "held_blocks": dict(self.held),
            "news": [
                {"kind": kind, "tier": tier, "blocks": blocks, "tokens": self.tokens[kind, tier]}
                for (kind, tier), blocks in sorted(self.blocks.items())
            ],
            "gaps": self.gaps,
            "lost_events": self.lost,
        }


def wish_of(
    namespace: str | None, kinds: str, tiers: str, ends: tuple[int, str | None], *, snapshot: bool
) -> Wish:  # fmt: skip
    """The options, checked. `ends`: (count, how long). Raises CliError."""
    wanted = frozenset(each.strip() for each in kinds.split(",") if each.strip())
    places = frozenset(each.strip() for each in tiers.split(",") if each.strip())
    for given, known, option in ((wanted, BLOCKS, "--kind"), (places, TIERS, "--tier")):
        if odd := sorted(given - known):
            raise bad_usage(f"{option} does not know {', '.join(odd)}", f"there are: {', '.join(sorted(known))}")
    count, lasts = ends
    try:
        lasts_s = float("inf") if lasts is None else parse_duration(lasts)
    except ValueError as error:
        raise bad_usage(f"--for: {error}", "e.g. --for 30s") from error
    return Wish(namespace, wanted, places, count, lasts_s, snapshot)


def run(settings: Settings, wish: Wish) -> None:
    """Watch until somebody ends it; then the summary. Raises CliError."""
    with connect(settings.address) as daemon:
        stats = daemon.stats()
        named = [] if wish.namespace is None else [namespaces.choose(stats, wish.namespace).fingerprint]
        address = parse_address(daemon.address)
    seen = Seen()
    began = time.monotonic()
    watch = Watch(lambda: grpc_alone(address), lambda: named, snapshot=wish.snapshot, keepalive_s=_LOOK_S * 4)
    try:
        with watch:
            _follow(settings, wish, watch, seen)
    except KeyboardInterrupt:
        pass
    except WatchRefusedError as error:
        raise CliError(str(error), "compare `prefixcache --version` on both sides", reason=error.reason) from error
    told = seen.summary(time.monotonic() - began)
    typer.echo(json.dumps({"summary": told}) if settings.as_json else draw_summary(told))


def _follow(settings: Settings, wish: Wish, watch: Watch, seen: Seen) -> None:
    ends_at = time.monotonic() + wish.lasts_s
    while time.monotonic() < ends_at and (not wish.count or seen.shown < wish.count):
        event = watch.next(min(_LOOK_S, max(ends_at - time.monotonic(), 0.0)))
        if event is None:
            continue
        if event.kind is EventKind.NAMESPACE:
            seen.names[event.fingerprint] = (event.label, event.block_tokens)
        if wish.wants(event):
            seen.count(event)
            seen.shown += event.kind in BLOCKS
            told = as_json(event, seen)
            typer.echo(json.dumps(told) if settings.as_json else draw(told))


def as_json(event: WatchEvent, seen: Seen) -> dict[str, Any]:
    """An event as JSON-ready values."""
    told: dict[str, Any] = {"kind": str(event.kind), "sequence": event.sequence}
    if event.kind is EventKind.GAP:
        return told | {"lost_events": event.lost}
    if event.kind is EventKind.SNAPSHOT_END:
        return told
    label, block_tokens = seen.names.get(event.fingerprint, ("", 0))
    return told | {
        "namespace": {"label": label, "fingerprint": event.fingerprint.hex()},
        "tier": event.tier,
        "pool": event.pool,
        "first_block": event.first_block,
        "blocks": len(event.keys),
        "tokens": len(event.keys) * block_tokens,
        "keys": [key.hex() for key in event.keys],
        "parent": event.parent.hex(),
        "snapshot": event.snapshot,
    }


def draw(told: dict[str, Any]) -> str:
    """The same as a line for people."""
    clock = time.strftime("%H:%M:%S")
    if told["kind"] == EventKind.GAP:
        lost = f"{told['lost_events']:,} events" if told["lost_events"] else "events"
        return f"{clock}  gap       {lost} were lost: the daemon restarted, or this was too slow"
    if told["kind"] == EventKind.SNAPSHOT_END:
        return f"{clock}  that is all there is at event {told['sequence']:,}; what follows is news"
    name = told["namespace"]["label"] or told["namespace"]["fingerprint"][:8]
    kind = "held" if told["snapshot"] else told["kind"]
    if told["kind"] == EventKind.CLEARED:
        return f"{clock}  {kind:<8}  all of {name}"
    first, last = told["first_block"], told["first_block"] + told["blocks"] - 1
    span_of = f"block {first}" if first == last else f"blocks {first}-{last}"
    key = told["keys"][-1][: _SHORT_KEY * 2] if told["keys"] else ""
    tier = told["tier"] + (f" {told['pool']}" if told["tier"] == "gpu" else "")
    return f"{clock}  {kind:<8}  {tier:<5}  {told['tokens']:>7,} tokens  {key}  {span_of} of {name}"


def draw_summary(told: dict[str, Any]) -> str:
    """What it was all together, for people."""
    parts = [f"{each['kind']} {each['blocks']:,} blocks ({each['tier'] or 'all'})" for each in told["news"]]
    held = [f"held {blocks:,} blocks ({tier})" for tier, blocks in told["held_blocks"].items()]
    gaps = [f"{told['gaps']:,} gaps, {told['lost_events']:,} events lost"] if told["gaps"] else []
    what = ", ".join([*held, *parts, *gaps]) or "nothing happened"
    return f"\n{told['events']:,} events in {span(told['seconds'])}: {what}"
