"""Where K and V of a page lie in the tensors vLLM registers: every form it has had, as views with named axes.

Rules:
1. What a tensor's shape does not say is not guessed. A form that is not known is refused with the reason.
2. vLLM's CPU pages are packed for the instruction set. Which packing it is is found by writing random values through
   vLLM's own operation and looking where they are (`cpu_packing`).
3. Views only; no byte is moved here.

Axes as in prefixcache_offload.engine: b page, t token, h KV head, d value, c component.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

Packing = Literal["plain", "k_transposed", "amx"]
"""How vLLM's CPU keeps K and V of a page and head. `k_transposed` (AVX2, AVX-512): K as [value, token], V as [token,
value]. `amx`: K as [token / 16, value / 2, 16, 2], V as [value / 16, token / 2, 16, 2], as matrix units read them."""

View = tuple[torch.Tensor, str, Literal["k", "v", "kv"]]

_PAIR: Final = 2
_TILE: Final = 16
CPU_PACKINGS: Final[tuple[Packing, ...]] = ("k_transposed", "amx", "plain")


class UnknownFormError(ValueError):
    """A KV cache tensor that cannot be read. `reason` is a short, fixed word."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class PageShape:
    """What a page of one layer holds on this rank. `v_dim` 0 for MLA."""

    heads: int
    tokens: int
    k_dim: int
    v_dim: int


def layer_views(tensor: torch.Tensor, shape: PageShape, packing: Packing = "plain") -> list[View]:
    """The K and V of all pages of one layer's tensor. Raises UnknownFormError."""
    heads, tokens, dim = shape.heads, shape.tokens, shape.k_dim
    dims = tuple(tensor.shape)
    if not shape.v_dim:
        for axes, form in (("btd", (tokens, dim)), ("b1td", (1, tokens, dim))):
            if dims[1:] == form:
                return [(tensor, axes, "k")]
    elif dims[1:] == (heads, tokens, dim + shape.v_dim):
        return [(tensor, "bhtd", "kv")] if packing == "plain" else _regions(tensor, shape, packing)
    elif len(dims) == len("cbhtd") and (heads != tokens or tensor.device.type != "cpu"):
        return _pairs(tensor, shape, packing)
    raise _unknown(tensor, shape, packing)


def _pairs(tensor: torch.Tensor, shape: PageShape, packing: Packing) -> list[View]:
    """Forms with an axis for K and V."""
    by_heads, by_tokens = (shape.heads, shape.tokens, shape.k_dim), (shape.tokens, shape.heads, shape.k_dim)
    dims = tuple(tensor.shape)
    alike = by_heads == by_tokens  # then off the CPU, where every backend of vLLM's states tokens first
    if dims[0] == _PAIR and dims[2:] == by_heads and not alike:
        return [_unpacked(tensor[0], packing, "k"), _unpacked(tensor[1], packing, "v")]
    if packing == "plain":
        if dims[0] == _PAIR and dims[2:] == by_tokens:
            return [(tensor, "cbthd", "kv")]
        for axes, form in (("bcthd", by_tokens), ("bchtd", by_heads)):
            if dims[1:] == (_PAIR, *form):
                return [(tensor, axes, "kv")]
    raise _unknown(tensor, shape, packing)


def _unknown(tensor: torch.Tensor, shape: PageShape, packing: Packing) -> UnknownFormError:
    return UnknownFormError("kv_cache_form", f"a KV cache of shape {tuple(tensor.shape)} for {shape} ({packing})")


def _regions(tensor: torch.Tensor, shape: PageShape, packing: Packing) -> list[View]:
    """Pages [2 x tokens, values] of each head: K first, then V."""
    pages, heads = int(tensor.shape[0]), shape.heads
    page_stride, head_stride = tensor.stride(0), tensor.stride(1)
    if tensor.stride(3) != 1 or tensor.stride(2) != shape.k_dim + shape.v_dim or shape.k_dim != shape.v_dim:
        raise UnknownFormError("kv_cache_form", f"pages with strides {tensor.stride()}")
    region = (pages, heads, shape.tokens, shape.k_dim)
    strides = (page_stride, head_stride, shape.k_dim, 1)
    start = tensor.storage_offset()
    k = torch.as_strided(tensor, region, strides, start)
    v = torch.as_strided(tensor, region, strides, start + shape.tokens * shape.k_dim)
    return [_unpacked(k, packing, "k"), _unpacked(v, packing, "v")]


def _unpacked(pages: torch.Tensor, packing: Packing, holds: Literal["k", "v"]) -> View:
    """What is in `pages` [page, head, token, value], whose values of a page and head lie together in some order."""
    if packing == "plain" or (packing == "k_transposed" and holds == "v"):
        return pages, "bhtd", holds
    page, head, token, value = pages.stride()
    tokens, dim = pages.shape[2:]
    inner: tuple[int, ...]
    if value != 1 or token != dim:
        raise UnknownFormError("kv_cache_form", f"pages with strides {pages.stride()}")
    if packing == "k_transposed":
        inner, axes = (dim, tokens), "bhdt"
    elif dim % _TILE or tokens % _TILE:
        raise UnknownFormError("kv_cache_form", f"pages of {tokens} tokens of {dim} values are not made of tiles")
    elif holds == "k":
        inner, axes = (tokens // _TILE, dim // _PAIR, _TILE, _PAIR), "bhtdtd"
    else:
        inner, axes = (dim // _TILE, tokens // _PAIR, _TILE, _PAIR), "bhdtdt"
    steps = [math.prod(inner[place + 1 :]) for place in range(len(inner))]
    view = torch.as_strided(pages, (*pages.shape[:2], *inner), (page, head, *steps), pages.storage_offset())
    return view, axes, holds


def cpu_packing(dtype: torch.dtype, shapes: Iterable[PageShape], cache_dtype: str, block_tokens: int) -> Packing:
    """How vLLM on this CPU keeps pages, by trying; MLA's are never packed.

    `dtype`: what the model computes in; `cache_dtype`: vLLM's setting, such as "auto" or "fp8". Raises UnknownFormError
    where it is none of the known ways, or not one for all shapes, or one that blocks of so many tokens cut through.
    """
    found = {_packing_of(dtype, shape, cache_dtype) for shape in shapes if shape.v_dim}
    if len(found) > 1:
        raise UnknownFormError("cpu_packing", f"layers are packed in several ways: {', '.join(sorted(found))}")
    if "amx" in found and block_tokens % _TILE:
        text = f"blocks of {block_tokens} tokens cut through tiles of {_TILE}; take a multiple for block_tokens"
        raise UnknownFormError("cpu_packing", text)
    return found.pop() if found else "plain"


def _packing_of(dtype: torch.dtype, shape: PageShape, cache_dtype: str) -> Packing:
    quantised = cache_dtype.startswith("fp8")
    stored = {"fp8_e5m2": torch.float8_e5m2}.get(cache_dtype, torch.float8_e4m3fn) if quantised else dtype
    generator = torch.Generator().manual_seed(1)
    size = (shape.tokens, shape.heads, shape.k_dim)
    key = torch.rand(size, generator=generator, dtype=torch.float32).to(dtype)
    value = torch.rand(size, generator=generator, dtype=torch.float32).to(dtype)
    page = torch.zeros(
        (1, shape.heads, shape.tokens, 2 * shape.k_dim), dtype=torch.uint8 if quantised else dtype
    )  # fmt: skip
    try:
        _write_page(page, key, value, cache_dtype)
    except RuntimeError as error:  # as it says where the processor is too small
        raise UnknownFormError("cpu_packing", f"vLLM keeps no {cache_dtype} here: {error}") from error
    for packing in CPU_PACKINGS:
        try:
            k, v = (_by_token(view).view(stored) for view in _regions(page, shape, packing))
        except UnknownFormError:
            continue
        if _alike(k, key) and _alike(v, value):
            return packing
    raise UnknownFormError("cpu_packing", "pages of this instruction set are packed in a way that is not known")


def _by_token(view: View) -> torch.Tensor:
    """The first page of a view, as [head, token, value]."""
    page, axes = view[0][0], view[1][1:]
    places = [place for letter in "htd" for place, each in enumerate(axes) if each == letter]
    lengths = [math.prod(page.shape[place] for place, each in enumerate(axes) if each == letter) for letter in "htd"]
    return page.permute(places).reshape(lengths)


def _alike(kept: torch.Tensor, written: torch.Tensor) -> bool:
    """Whether values [head, token, value] are those written as [token, head, value]; quantising rounds its own way."""
    coarse = kept.element_size() == 1
    expected = written.transpose(0, 1).float()
    return torch.allclose(kept.float(), expected, rtol=0.15 if coarse else 0.0, atol=0.05 if coarse else 0.0)


def _write_page(page: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache_dtype: str) -> None:
    """One full page through vLLM's own operation, whatever that takes in this version."""
    import inspect

    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends import cpu_attn

    heads, tokens, dim = page.shape[1], page.shape[2], key.shape[2]
    regions = page.view(1, heads, 2 * tokens, dim)
    k, v = regions.chunk(2, dim=2)
    slots = torch.arange(tokens, dtype=torch.int64)
    find: Any = cpu_attn._get_attn_isa
    known: dict[str, Any] = {"head_size": dim, "kv_cache_dtype": cache_dtype}
    isa = find(key.dtype, tokens, **{n: a for n, a in known.items() if n in inspect.signature(find).parameters})
    write: Any = ops.cpu_attn_reshape_and_cache
    extra: dict[str, Any] = {"k_scale": 1.0, "v_scale": 1.0, "kv_cache_dtype": cache_dtype}
    write(key, value, k, v, slots, isa, **{n: a for n, a in extra.items() if n in inspect.signature(write).parameters})
