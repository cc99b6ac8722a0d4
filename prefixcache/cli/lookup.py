"""`prefixcache lookup`: what a router would be told of a prompt: tokens by node and tier, and how long they would take.

It pins nothing and counts as no lookup of a worker's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prefixcache.cli.daemon import connect, reason_name
from prefixcache.cli.output import Settings, count, share, table
from prefixcache.cli.prompts import Keys, Prompt
from prefixcache.server.report import tier_tokens
from prefixcache.v1 import cache_pb2

if TYPE_CHECKING:
    from rich.console import RenderableType


def run(settings: Settings, prompt: Prompt) -> None:
    """Ask, and print what each node holds."""
    with connect(settings.address) as daemon:
        keys = prompt.keys_at(daemon)
        told = describe_answer(daemon.lookup(keys.fingerprint, keys.packed), keys)
    settings.emit(told, lambda: draw(told))


def describe_answer(answer: cache_pb2.LookupResponse, keys: Keys) -> dict[str, Any]:
    """The answer as JSON-ready values. `node` is "" for the daemon that was asked."""
    return {
        "namespace": keys.named(),
        "prompt_tokens": keys.prompt_tokens,
        "block_tokens": keys.namespace.block_tokens,
        "nodes": [
            {
                "node": node.node,
                "tokens": node.tokens,
                "tiers": tier_tokens(node.tiers),
                "load_s": node.load_ms / 1000,
            }
            for node in answer.nodes
        ],
        "stop": reason_name(answer.stop) if answer.stop else None,
    }


def draw(told: dict[str, Any]) -> list[RenderableType]:
    """The same as a table."""
    drawn = table("node", "cached", "tokens", "gpu", "host", "disk", "to load")
    for node in told["nodes"]:
        tiers = node["tiers"]
        drawn.add_row(
            node["node"] or "here",
            share(node["tokens"], told["prompt_tokens"]),
            count(node["tokens"]),
            *(count(tiers.get(tier, 0)) for tier in ("gpu", "host", "disk")),
            f"{node['load_s'] * 1000:.0f} ms",
        )
    return [drawn]
