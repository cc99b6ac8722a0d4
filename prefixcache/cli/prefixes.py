"""`prefixcache prefixes` and `evict`: which prefixes are worth most, and dropping one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prefixcache.cli import namespaces
from prefixcache.cli.daemon import connect
from prefixcache.cli.errors import bad_usage
from prefixcache.cli.output import Settings, count, size, span, table
from prefixcache.cli.prompts import Prompt
from prefixcache.server.report import tier_tokens
from prefixcache.v1 import admin_pb2

if TYPE_CHECKING:
    from rich.console import RenderableType


def prefixes(settings: Settings, namespace: str | None, page: range, *, largest: bool) -> None:
    """List a page of them."""
    order = admin_pb2.PREFIX_ORDER_LARGEST if largest else admin_pb2.PREFIX_ORDER_HOTTEST
    with connect(settings.address) as daemon:
        chosen = b"" if namespace is None else namespaces.choose(daemon.stats(), namespace).fingerprint
        answer = daemon.list_prefixes(
            admin_pb2.ListPrefixesRequest(limit=len(page), offset=page.start, fingerprint=chosen, order=order)
        )
    told = {
        "prefixes": [_describe(each) for each in answer.prefixes],
        "next_offset": answer.next_offset or None,
        "truncated": answer.truncated,
    }
    settings.emit(told, lambda: _draw(told))


def evict(settings: Settings, prompt: Prompt, from_token: int | None, *, subtree: bool, force: bool) -> None:
    """Drop a prompt's own tail, or with `subtree` everything that begins with it (up to `from_token`)."""
    if from_token is not None and not subtree:
        raise bad_usage("--from-token says where a subtree begins", "add --subtree")
    with connect(settings.address) as daemon:
        keys = prompt.keys_at(daemon)
        packed = keys.packed if from_token is None else keys.up_to(from_token)
        request = admin_pb2.EvictRequest(
            fingerprint=keys.fingerprint, keys=packed, own_tail=not subtree, gently=not force
        )
        answer = daemon.evict(request)
    told = {"namespace": keys.named(), "evicted_blocks": answer.blocks, "kept_blocks": answer.kept}
    kept = f"; {answer.kept:,} stay until their leases end" if answer.kept else ""
    settings.emit(told, lambda: [f"evicted {answer.blocks:,} blocks of {namespaces.name(keys.namespace)}{kept}"])


def _describe(prefix: admin_pb2.PrefixDescription) -> dict[str, Any]:
    return {
        "label": prefix.label,
        "fingerprint": prefix.fingerprint.hex(),
        "short_key": prefix.short_key,
        "tokens": prefix.tokens,
        "blocks": prefix.blocks,
        "size_bytes": prefix.size_bytes,
        "tiers": tier_tokens(prefix.tiers),
        "hits": prefix.hits,
        "hit_tokens": prefix.hit_tokens,
        "idle_s": prefix.idle_s,
        "pins": list(prefix.pins),
    }


def _draw(told: dict[str, Any]) -> list[RenderableType]:
    from rich.markup import escape

    drawn = table("namespace", "prefix", "tokens", "bytes", "hits", "served", "idle")
    notes: list[RenderableType] = []
    for each in told["prefixes"]:
        name, prefix = escape(each["label"]) or each["fingerprint"][:8], each["short_key"][:8]
        counts = [count(each["tokens"]), size(each["size_bytes"]), count(each["hits"]), count(each["hit_tokens"])]
        drawn.add_row(name, prefix, *counts, span(each["idle_s"]))
        about = [f"{count(each['tiers']['disk'])} tokens are on disk only"] if each["tiers"]["disk"] else []
        about += [f"pinned as {pin!r}" for pin in each["pins"]]
        if about:
            notes.append(escape(f"  {prefix}: {', '.join(about)}"))
    items: list[RenderableType] = [drawn, *notes]
    if told["next_offset"]:
        items.append(f"more: --offset {told['next_offset']}")
    if told["truncated"]:
        items.append("there are more prefixes than are looked at; those left out were used less than all of these")
    return items
