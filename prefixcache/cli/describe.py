"""`prefixcache describe`: how much of a prompt is cached, and where.

Keys are computed here, as every client does: the daemon never sees the prompt. It pins nothing and counts as no lookup.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefixcache.cli import namespaces, token_files
from prefixcache.cli.daemon import connect, reason_name
from prefixcache.cli.errors import CliError, bad_usage
from prefixcache.cli.output import Settings, share
from prefixcache.identity import KEY_BYTES, block_keys, root_key
from prefixcache.server.report import tier_name, tier_tokens
from prefixcache.v1 import admin_pb2

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class Prompt:
    """What the user named: a file, how to read it, and what else went into its keys."""

    file: str
    tokenizer: Path | None = None
    cache_salt: str = ""
    tenant_key_file: Path | None = None

    def tokens(self) -> bytes:
        """Token ids, packed. Raises CliError."""
        content = token_files.read_bytes(self.file)
        if self.tokenizer is not None:
            return token_files.tokenize(content, self.file, self.tokenizer)
        return token_files.parse_tokens(content, self.file)

    def root(self, fingerprint: bytes) -> bytes:
        """Root of the key chain in a namespace. Raises CliError for a tenant key that cannot be one."""
        secret = None if self.tenant_key_file is None else _read_secret(self.tenant_key_file)
        try:
            return root_key(fingerprint, tenant_key=secret, cache_salt=self.cache_salt.encode())
        except ValueError as error:
            raise bad_usage(str(error), "a tenant key file holds exactly 32 secret bytes") from error


def run(settings: Settings, prompt: Prompt, namespace: str | None) -> None:
    """Find the prompt's longest cached prefix and print it."""
    tokens = prompt.tokens()
    with connect(settings.address) as daemon:
        chosen = namespaces.choose(daemon.stats(), namespace)
        keys = block_keys(prompt.root(chosen.fingerprint), tokens, chosen.block_tokens)
        if not keys:
            what = f"{len(tokens) // 4} tokens are less than one block of {chosen.block_tokens}"
            raise CliError(f"{what}: nothing of it can be cached", reason="partial_block")
        answer = daemon.describe(chosen.fingerprint, keys)
    told = describe_answer(answer, chosen, len(tokens) // 4)
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


def _read_secret(path: Path) -> bytes:
    """The tenant key; refused when others may read it, as ssh refuses such keys."""
    try:
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise bad_usage(f"{path} can be read by others", f"chmod 600 {path}")
        secret = path.read_bytes()
    except OSError as error:
        raise CliError(f"cannot read {path}: {os.strerror(error.errno or 0)}", reason="bad_file") from error
    return secret if len(secret) == KEY_BYTES else secret.strip()
