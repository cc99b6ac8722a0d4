"""Prompts that the benchmark's daemon holds: a namespace of a made-up model, and storing into it. No timing here."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from prefixcache.cli.errors import CliError
from prefixcache.identity import GroupKind, LayerGroup, Layout
from prefixcache_client import Client, Namespace

BLOCK_TOKENS: Final = 64
_WEIGHTS: Final = b"prefixcache bench".ljust(32, b".")

Words = npt.NDArray[np.uint32]


def namespace(client: Client, layers: int, kv_heads: int, head_dim: int, codec: str = "raw") -> Namespace:
    """One full-attention group in bfloat16: a block has layers x kv_heads x 64 tokens x 2 x head_dim x 2 bytes, raw."""
    group = LayerGroup(GroupKind.FULL, tuple(range(layers)), kv_heads, head_dim, head_dim, "bfloat16")
    return client.namespace(Layout((group,)), _WEIGHTS, codec=codec, label="bench")


def tokens_of(number: int, count: int) -> Words:
    """Token ids of prompt `number`, u32[count]; no two prompts share a block."""
    tokens = np.random.default_rng(number).integers(49_152, size=count, dtype=np.uint32)
    tokens[0] = number
    return tokens


def store(client: Client, ns: Namespace, tokens: Words, blocks: object) -> None:
    """Store a whole prompt. Raises CliError when any of it was refused."""
    result = client.store(ns, tokens, blocks)
    if result.stored_blocks != len(tokens) // BLOCK_TOKENS:
        raise CliError(f"only {result.stored_blocks} blocks could be stored: {result.reason or result.refused}")
