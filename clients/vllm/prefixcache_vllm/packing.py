"""Where K and V of a page lie in the tensors vLLM registers: every form it has had, as views with named axes.

Rules:
1. What a tensor's shape does not say is not guessed. A form that is not known is refused with the reason.
2. vLLM's CPU pages are packed for the instruction set. Which packing it is is found by writing random values through
   vLLM's own operation and looking where they are (`cpu_packing`).
3. Views only; no byte is moved here.

Axes as in prefixcache_offload.engine: b page, t token, h KV head, d value, c component.
"""

from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

Packing = Literal["plain", "k_transposed"]
"""`k_transposed`: K of a page and head is kept as [value, token], V as [token, value] (vLLM's AVX2 and AVX-512)."""

View = tuple[torch.Tensor, str, Literal["k", "v", "kv"]]

_PAIR: Final = 2


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
    elif len(dims) == len("cbhtd") and heads != tokens:
        return _pairs(tensor, shape, packing)
    raise _unknown(tensor, shape, packing)


def _pairs(tensor: torch.Tensor, shape: PageShape, packing: Packing) -> list[View]:
    """Forms with an axis for K and V."""
    by_heads, by_tokens = (shape.heads, shape.tokens, shape.k_dim), (shape.tokens, shape.heads, shape.k_dim)
    dims = tuple(tensor.shape)
    if dims[0] == _PAIR and dims[2:] == by_heads:
        return [_unpacked(tensor[0], packing, "k"), _unpacked(tensor[1], "plain", "v")]
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
    plain = (page_stride, head_stride, shape.k_dim, 1)
    transposed = (page_stride, head_stride, 1, shape.tokens)
    start = tensor.storage_offset()
    k = torch.as_strided(tensor, region, transposed if packing == "k_transposed" else plain, start)
    v = torch.as_strided(tensor, region, plain, start + shape.tokens * shape.k_dim)
    return [(k, "bhtd", "k"), (v, "bhtd", "v")]


def _unpacked(pages: torch.Tensor, packing: Packing, holds: Literal["k", "v"]) -> View:
    if packing == "plain":
        return pages, "bhtd", holds
    page, head, token, value = pages.stride()
    if value != 1 or token != pages.shape[3]:
        raise UnknownFormError("kv_cache_form", f"pages with strides {pages.stride()}")
    return torch.as_strided(pages, pages.shape, (page, head, 1, pages.shape[2]), pages.storage_offset()), "bhtd", holds


def cpu_packing(dtype: torch.dtype, shape: PageShape, cache_dtype: str) -> Packing:
    """How vLLM on this CPU keeps a page, by trying. Raises UnknownFormError where it is none of the known ways.

    `dtype`: what the model computes in; `cache_dtype`: vLLM's setting, such as "auto" or "fp8".
    """
    quantised = cache_dtype.startswith("fp8")
    stored = {"fp8_e5m2": torch.float8_e5m2}.get(cache_dtype, torch.float8_e4m3fn) if quantised else dtype
    generator = torch.Generator().manual_seed(1)
    size = (shape.tokens, shape.heads, shape.k_dim)
    key = torch.rand(size, generator=generator, dtype=torch.float32).to(dtype)
    value = torch.rand(size, generator=generator, dtype=torch.float32).to(dtype)
    page = torch.zeros(
        (1, shape.heads, shape.tokens, 2 * shape.k_dim), dtype=torch.uint8 if quantised else dtype
    )  # fmt: skip
    _write_page(page, key, value, cache_dtype)
    for packing in ("k_transposed", "plain"):
        (k, _, _), (v, _, _) = _regions(page, shape, packing)
        if _alike(k[0].view(stored), key) and _alike(v[0].view(stored), value):
            return packing
    raise UnknownFormError("cpu_packing", "pages of this instruction set are packed in a way that is not known")


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
