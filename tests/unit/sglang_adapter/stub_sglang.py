"""Stand-ins for what the backend derives from and is handed by SGLang: its base class, its few words, and host pools
with the buffers that each of its layouts means. Enough to move pages, no more."""

import enum
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch

_BASE = "sglang.srt.mem_cache.hicache_storage"


class PoolName(enum.StrEnum):
    KV = "kv"
    SWA = "swa"
    MAMBA = "mamba"
    DRAFT = "draft"


class PoolHitPolicy(enum.StrEnum):
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclass
class PoolTransfer:
    name: Any
    host_indices: Any = None
    keys: list[str] | None = None
    hit_policy: Any = PoolHitPolicy.ALL_PAGES


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[Any, int]
    restorable_prefix_pages: list[int] | None = None


@dataclass
class ExtraInfo:
    prefix_keys: list[str] | None = None


class HiCacheStorage:
    """What ours overrides, as far as it calls it."""

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        self.registered_pools = {**getattr(self, "registered_pools", {}), host_pool_name: host_pool}


@dataclass
class Config:
    """HiCacheStorageConfig."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    is_mla_model: bool = False
    enable_storage_metrics: bool = False
    model_name: str | None = "served"
    tp_lcm_size: int | None = None
    dcp_size: int = 1
    extra_config: dict[str, Any] = field(default_factory=dict)

    @property
    def is_storage_writer(self) -> bool:
        return not self.is_mla_model or self.tp_rank == 0


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the modules in place of SGLang's, and have ours imported anew."""
    names = _BASE.split(".")
    modules = {".".join(names[: i + 1]): ModuleType(".".join(names[: i + 1])) for i in range(len(names))}
    base: Any = modules[_BASE]
    for each in (HiCacheStorage, PoolName, PoolHitPolicy, PoolTransferResult):
        setattr(base, each.__name__, each)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(modules[parent], own, module)
    monkeypatch.delitem(sys.modules, "prefixcache_sglang.storage", raising=False)


@dataclass
class Shape:
    """Of one rank's pool. `groups`: of heads, page_unified only."""

    layers: int = 3
    heads: int = 4
    dim: int = 8
    page: int = 4
    pages: int = 16
    first_layer: int = 0
    v_dim: int = 8
    dtype: torch.dtype = torch.bfloat16
    groups: int = 1


class Pool:
    """A host pool of K and V by heads."""

    def __init__(self, layout: str, shape: Shape) -> None:
        s, self.shape, self.layout, self.dtype = shape, shape, layout, shape.dtype
        self.page_num, self.page_size, self.layer_num, self.target_layer_num = s.pages, s.page, s.layers, s.layers
        self.head_num, self.head_dim, self.v_head_dim = s.heads, s.dim, s.v_dim
        self.start_layer, self.end_layer = s.first_layer, s.first_layer + s.layers
        self.size_per_token = s.heads * s.layers * (s.dim + s.v_dim) * s.dtype.itemsize
        sizes = {
            "layer_first": (2, s.layers, s.pages * s.page, s.heads, s.dim),
            "page_first": (2, s.pages * s.page, s.layers, s.heads, s.dim),
            "page_first_direct": (2, s.pages, s.layers, s.page, s.heads, s.dim),
            "page_head": (2, s.pages, s.heads, s.page, s.layers, s.dim),
            "page_unified": (s.pages, s.groups, s.layers, 2, s.page, s.heads // s.groups, s.dim),
        }
        self.kv_buffer: Any
        if s.dim == s.v_dim:
            self.kv_buffer = torch.zeros(sizes[layout], dtype=s.dtype)
        else:
            self.kv_buffer = tuple(torch.zeros((*sizes[layout][1:-1], dim), dtype=s.dtype) for dim in (s.dim, s.v_dim))

    def page(self, number: int) -> torch.Tensor:
        """A view of one page as [K or V, layer, token, head group, head in it, value], in whatever layout."""
        buffer, size = self.kv_buffer, self.page_size
        tokens = slice(number * size, number * size + size)
        if self.layout == "layer_first":
            return buffer[:, :, tokens].unsqueeze(3)
        if self.layout == "page_first":
            return buffer[:, tokens].permute(0, 2, 1, 3, 4).unsqueeze(3)
        if self.layout == "page_first_direct":
            return buffer[:, number].unsqueeze(3)
        if self.layout == "page_head":
            return buffer[:, number].permute(0, 3, 2, 1, 4).unsqueeze(3)
        return buffer[number].permute(2, 1, 3, 0, 4, 5)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        if self.layout == "page_unified":
            raise ValueError("unsupported")
        size, number = self.page_size, index // self.page_size
        if self.layout == "layer_first":
            return self.kv_buffer[:, :, index : index + size].flatten()
        if self.layout == "page_first":
            return self.kv_buffer[:, index : index + size].flatten()
        return self.kv_buffer[:, number].flatten()

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(self.size_per_token * self.page_size // self.dtype.itemsize, dtype=self.dtype)


class MlaPool:
    """A host pool of a latent."""

    def __init__(self, layout: str, shape: Shape) -> None:
        s, self.shape, self.layout, self.dtype = shape, shape, layout, shape.dtype
        self.page_num, self.page_size, self.layer_num, self.target_layer_num = s.pages, s.page, s.layers, s.layers
        self.start_layer, self.end_layer = s.first_layer, s.first_layer + s.layers
        self.size_per_token = s.layers * s.dim * s.dtype.itemsize
        sizes = {
            "layer_first": (s.layers, s.pages * s.page, 1, s.dim),
            "page_first": (s.pages * s.page, s.layers, 1, s.dim),
            "page_first_direct": (s.pages, s.layers, s.page, 1, s.dim),
            "page_unified": (s.pages, s.layers, s.page, s.dim),
        }
        self.kv_buffer = torch.zeros(sizes[layout], dtype=s.dtype)

    def page(self, number: int) -> torch.Tensor:
        """A view of one page as [layer, token, value]."""
        buffer, size = self.kv_buffer, self.page_size
        if self.layout == "layer_first":
            return buffer[:, number * size : number * size + size, 0]
        if self.layout == "page_first":
            return buffer[number * size : number * size + size, :, 0].transpose(0, 1)
        return buffer[number].reshape(self.shape.layers, size, self.shape.dim)


class RunsPool:
    """A host pool of bytes that mean nothing here: two buffers, a run of each a page."""

    def __init__(self, sizes: Sequence[int] = (48, 20), pages: int = 16, layout: str = "page_first") -> None:
        self.layout, self.dtype, self.page_size, self.page_num = layout, torch.uint8, 1, pages
        self.size_per_token = sum(sizes)
        self.parts = [torch.zeros(pages, size, dtype=torch.uint8) for size in sizes]
        self.kv_buffer = self.parts

    def page(self, number: int) -> torch.Tensor:
        return torch.cat([part[number] for part in self.parts])

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        rows = [(part[int(i)].data_ptr(), part.shape[1]) for i in indices for part in self.parts]
        return [address for address, _ in rows], [size for _, size in rows]


class FlatPool(RunsPool):
    """One that tells no runs."""

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        raise NotImplementedError("side states")

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return self.page(index)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(self.size_per_token, dtype=torch.uint8)

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        at = 0
        for part in self.parts:
            part[index] = data_page[at : at + part.shape[1]]
            at += part.shape[1]


class LogicalPool:
    """Page numbers without bytes."""

    layout, page_size, page_num, layer_num, size_per_token = "layer_first", 4, 16, 0, 0
    dtype, kv_buffer = torch.uint8, None

    def get_page_buffer_meta(self, indices: torch.Tensor) -> None:
        return None

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(0, dtype=torch.uint8)


def fill(pool: Any, seed: int) -> None:
    """Random bytes everywhere."""
    generator = torch.Generator().manual_seed(seed)
    kept = pool.kv_buffer if isinstance(pool.kv_buffer, list | tuple) else [pool.kv_buffer]
    for buffer in kept:
        flat = buffer.view(torch.uint8).reshape(-1)
        flat.copy_(torch.randint(0, 256, (math.prod(flat.shape),), generator=generator, dtype=torch.uint8))


def indices(pool: Any, pages: Sequence[int]) -> torch.Tensor:
    """Every token's place of these pages."""
    size = pool.page_size
    return torch.cat([torch.arange(page * size, (page + 1) * size) for page in pages])


def keys(count: int, name: str = "") -> list[str]:
    """Page hashes."""
    return [f"{name}{number:060x}" for number in range(count)]


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor in its logical order, so that NaN equals NaN."""
    return bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())
