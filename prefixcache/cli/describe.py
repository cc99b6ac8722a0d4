"""`prefixcache describe`: how much of a prompt is cached, and where.

It pins nothing and counts as no lookup.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prefixcache.cli.daemon import connect, reason_name
from prefixcache.cli.output import Settings, share
from prefixcache.cli.prompts import Prompt
from prefixcache.server.report import tier_name, tier_tokens
from prefixcache.v1 import admin_pb2

if TYPE_CHECKING:
    from rich.console import RenderableType


def run(settings: Settings, prompt: Prompt) -> None:
    """Find the prompt's longest cached prefix and print it."""
    with connect(settings.address) as daemon:
        keys = prompt.keys_at(daemon)
        answer = daemon.describe(keys.fingerprint, keys.packed)
    told = describe_answer(answer, keys.namespace, keys.prompt_tokens)
    settings.emit(told, lambda: draw(told))


def describe_answer(
    answer: admin_pb2.DescribePrefixResponse, namespace: admin_pb2.NamespaceStats, prompt_tokens: int
) -> dict[str, Any]:
    """The answer as JSON-ready values; tokens by the first tier that has them, blocks in the prompt's order."""
    by_tier = tier_tokens(answer.tiers)
    return {
        "namespace": {"label": namespace.label, "fingerprint": namespace.fingerprint.hex()},
        "block_tokens": answer.block_tokens,
        "prompt_tokens": prompt_tokens,
        "whole_block_tokens": answer.tokens,
        "cached_tokens": sum(by_tier.values()),
        "tokens": by_tier,
        "stop": reason_name(answer.stop) if answer.stop else None,
        "blocks": [
            {"block": b.block, "tiers": [tier_name(t) for t in b.tiers], "leases": b.leases, "idle_s": b.idle_s}
            for b in answer.blocks
        ],
    }


def draw(told: dict[str, Any]) -> list[RenderableType]:
    """The same for people: one row per run of blocks that lie in the same tiers."""
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    label = escape(told["namespace"]["label"] or told["namespace"]["fingerprint"][:12])
    cached, asked = told["cached_tokens"], told["prompt_tokens"]
    why = f", then: {told['stop']}" if told["stop"] else ""
    head = f"[bold]{cached:,}[/] of {asked:,} tokens cached ({share(cached, asked)}) in {label}{why}"
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("tokens", "blocks", "tiers", "leases", "idle"):
        table.add_column(column)
    for run_of in _runs(told["blocks"]):
        first, last, size = run_of[0]["block"], run_of[-1]["block"], told["block_tokens"]
        idle = f"{min(b['idle_s'] for b in run_of):.0f} s"
        leases = str(max(b["leases"] for b in run_of))
        tiers = ", ".join(run_of[0]["tiers"])
        table.add_row(f"{first * size:,} - {(last + 1) * size - 1:,}", f"{first} - {last}", tiers, leases, idle)
    return [head, table] if told["blocks"] else [head]


def _runs(blocks: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    runs: list[list[dict[str, Any]]] = []
    for block in blocks:
        if runs and runs[-1][-1]["tiers"] == block["tiers"]:
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs
