"""Where in the model a rank's pages are from: what of it is in every key, and how pages are cut so that ranks of other
numbers can read them.

Rules:
1. Heads that are cut over ranks have names by their number in the model, so a page written by TP=1 is read by TP=2,
   where both store pieces that small (SGLang's own `tp_lcm_size`).
2. What every rank has alike (MLA, and what belongs to it) is written by one of them and read by all, under one name.
3. All other bytes belong to one rank of one number of ranks. Context and pipeline ranks are in every name.

`config` is SGLang's HiCacheStorageConfig, read by name. It must not know tensors.
"""

from collections.abc import Sequence
from typing import Any, Final

from prefixcache_sglang.facts import CannotShareError

_RANK_OWNED: Final = "mamba"
"""The one pool of a model with replicated KV that every rank keeps its own of."""


def check(config: Any) -> None:
    """Raise CannotShareError for parallel forms that are not understood."""
    if int(getattr(config, "dcp_size", 1) or 1) > 1:
        raise CannotShareError("decode_context_parallel", "decode context parallelism is not supported yet")


def pieces_of(config: Any) -> int:
    """How many pieces a page of heads is stored as: what the largest number of ranks that shares would have."""
    together = int(getattr(config, "tp_lcm_size", None) or 0)
    ranks = int(config.tp_size)
    if together % ranks:
        raise CannotShareError("tp_lcm_size", f"tp_lcm_size {together} is no multiple of {ranks} ranks")
    return max(1, together // ranks)


def heads_are_cut(config: Any, heads: int, v_dim: int) -> bool:
    """Whether a pool of this shape holds one rank's heads. MLA has one head that all ranks hold alike."""
    return not (bool(config.is_mla_model) and heads == 1 and v_dim == 0)


def is_replicated(config: Any, pool: str) -> bool:
    """Whether pools whose heads are not known are alike on all ranks."""
    return bool(config.is_mla_model) and pool != _RANK_OWNED


def suffixes(config: Any, *, cut: bool, heads_each: int, pieces: int) -> list[bytes]:
    """What is added to SGLang's keys, by piece. `heads_each`: of a piece, 0 for bytes of one rank alone."""
    common = _ranks("cp", config.attn_cp_rank, config.attn_cp_size) + _ranks("pp", config.pp_rank, config.pp_size)
    if not cut:
        return [common]
    if not heads_each:
        return [_ranks("tp", config.tp_rank, config.tp_size, always=True) + common]
    first = int(config.tp_rank) * pieces
    return [f"/h{(first + piece) * heads_each}".encode() + common for piece in range(pieces)]


def is_writer(config: Any, *, cut: bool) -> bool:
    """Whether this rank stores what it has."""
    return cut or bool(getattr(config, "is_storage_writer", int(config.tp_rank) == 0))


def _ranks(name: str, rank: int, size: int, *, always: bool = False) -> bytes:
    return f"/{name}{int(rank)}.{int(size)}".encode() if int(size) > 1 or always else b""


def parents_of(keys: Sequence[str], before: Sequence[str] | None) -> list[str | None]:
    """The key in front of each of a chain of keys; `before`: the chain up to them, where it is known."""
    return [before[-1] if before else None, *keys[:-1]] if keys else []
