"""How a host pool keeps pages: in an order that is known here, as runs of bytes, or as what the pool itself flattens.

Rules:
1. Known orders (`CanonicalForm`) are stored in canonical order, so a page written in one layout is read in any other,
   and split by heads where ranks of other numbers read it. A pool is only taken for known if its tensors have the very
   shapes, and a page the very bytes, that its layout means.
2. All others are stored as they are, and everything the bytes could depend on is part of `detail`: class, layout,
   sizes, SGLang's version. Two pools that differ in any of it find nothing of each other's.
3. What a pool cannot do, or does otherwise than expected, is refused with a reason.

Axes as in prefixcache_offload.engine. It must not know keys or calls.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from prefixcache.identity.canonical import Value
from prefixcache.identity.layout import MAX_DIM, GroupKind, LayerGroup, Layout, LayoutError
from prefixcache_client import Blocks
from prefixcache_client.blocks import BlockFormat
from prefixcache_client.tensors import KvTensors
from prefixcache_offload.paged import PagedCache, PagedTensor
from prefixcache_sglang.facts import CannotShareError
from prefixcache_sglang.pages import PiecedPages, Places, RunPages

Holds = Literal["k", "v", "kv"]

# What the axes are, by layout, of K and V in one tensor and of one component alone, with pages apart from tokens.
_PAIRED: Final[Mapping[str, str]] = {
    "layer_first": "clbthd", "page_first": "cbtlhd", "page_first_direct": "cblthd", "page_head": "cbhtld",
    "page_unified": "bhlcthd",
}  # fmt: skip
_SINGLE: Final[Mapping[str, str]] = {
    "layer_first": "lbthd", "page_first": "btlhd", "page_first_direct": "blthd", "page_unified": "blthd",
}  # fmt: skip
_PLAIN: Final = "nhd"
_BY_TOKEN: Final = ("layer_first", "page_first")
"""Layouts whose tensors have one axis for all tokens of all pages."""
_DTYPES: Final = {getattr(torch, name): name for name in (
    "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "int8",
    "uint8",
)}  # fmt: skip
_ERRORS: Final = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, AssertionError)


class View(NamedTuple):
    """One tensor of a pool with its axes named."""

    tensor: torch.Tensor
    axes: str
    holds: Holds


@dataclass(frozen=True)
class CanonicalForm:
    """A pool whose pages are understood. `views`: its tensors, by piece; `layout`: of one piece; `heads_each`: of its
    heads, those of a piece."""

    pool: Any
    views: Sequence[Sequence[View]]
    layout: Layout
    page_tokens: int
    block_tokens: int
    detail: Mapping[str, Value]
    heads_each: int

    @property
    def pieces(self) -> int:
        """Keys a page."""
        return len(self.views)

    def pages(self, indices: Places) -> KvTensors:
        """Pages that begin at these token positions of the pool."""
        return PiecedPages(self._own, indices // self.page_tokens)

    def flat(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, KvTensors]:
        """Flat pages, as the pool makes them, in one new tensor that can be loaded to or stored from."""
        joined = torch.stack([each.reshape(-1) for each in tensors])
        views = flat_views(self.pool, joined)
        pieces = [[_cut(view, piece, self.heads_each) for view in views] for piece in range(self.pieces)]
        return joined, PiecedPages(self._caches(pieces), np.arange(len(tensors), dtype=np.int64))

    def finish(self, tensors: KvTensors, indices: Places, whole: npt.NDArray[np.bool_]) -> None:
        """Nothing: pages were loaded where they belong."""

    @cached_property
    def _own(self) -> list[PagedCache]:
        return self._caches(self.views)

    def _caches(self, views: Sequence[Sequence[View]]) -> list[PagedCache]:
        shape = BlockFormat(self.layout, self.block_tokens).shapes[0]
        return [PagedCache(shape, [PagedTensor(*view) for view in piece]) for piece in views]


@dataclass(frozen=True, slots=True)
class RunsForm:
    """A pool that tells where a page's bytes are, and not what they mean."""

    pool: Any
    sizes: tuple[int, ...]
    layout: Layout
    page_tokens: int
    block_tokens: int
    detail: Mapping[str, Value]
    pieces: int = 1

    def pages(self, indices: Places) -> KvTensors:
        """See CanonicalForm. Raises ValueError when the pool tells other sizes than at first."""
        tokens = (indices[:, None] + np.arange(self.page_tokens)).reshape(-1)
        addresses, sizes = self.pool.get_page_buffer_meta(torch.from_numpy(tokens))
        if tuple(sizes) != self.sizes * len(indices):
            raise ValueError("the pool's pages have other sizes now")
        return RunPages(np.asarray(addresses, np.int64).reshape(len(indices), -1), self.sizes)

    def flat(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, KvTensors]:
        """Not here: whether a flat page has its runs in the same order is not known. Raises ValueError."""
        raise ValueError("runs are not flat pages")

    def finish(self, tensors: KvTensors, indices: Places, whole: npt.NDArray[np.bool_]) -> None:
        """Nothing: pages were loaded where they belong."""


@dataclass(frozen=True, slots=True)
class FlatForm:
    """A pool that only hands out a copy of a page, and takes one back."""

    pool: Any
    page_bytes: int
    layout: Layout
    page_tokens: int
    block_tokens: int
    detail: Mapping[str, Value]
    pieces: int = 1

    def pages(self, indices: Places) -> KvTensors:
        """See CanonicalForm; copies."""
        flat = [self.pool.get_data_page(int(index), flat=True) for index in indices.tolist()]
        return self.flat(flat)[1]

    def flat(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, KvTensors]:
        """See CanonicalForm."""
        joined = torch.stack([as_bytes(each) for each in tensors])
        return joined, Blocks(joined)

    def finish(self, tensors: KvTensors, indices: Places, whole: npt.NDArray[np.bool_]) -> None:
        """Have the pool take pages that were loaded."""
        assert isinstance(tensors, Blocks)
        like = self.pool.get_dummy_flat_data_page()
        for index, page in zip(indices[whole].tolist(), tensors.arrays[torch.from_numpy(whole)], strict=True):
            self.pool.set_from_flat_data_page(int(index), page.clone().view(like.dtype))


Form = CanonicalForm | RunsForm | FlatForm


def form_of(pool: Any, pieces: int) -> Form:
    """How `pool` keeps pages; `pieces`: how many ranges of heads a page is stored as, where heads are known.

    Raises CannotShareError.
    """
    try:
        known = _canonical(pool, pieces)
    except CannotShareError:
        raise
    except (*_ERRORS, LayoutError) as error:
        raise CannotShareError("pool_unknown", f"{type(pool).__name__}: {error}") from error
    if known is not None:
        return known
    if pieces > 1:
        raise CannotShareError("heads_unknown", f"the heads of a {type(pool).__name__} cannot be told apart")
    for make in (_runs, _flat):
        try:
            return make(pool)
        except _ERRORS as error:
            why = error
    raise CannotShareError("pool_unknown", f"{type(pool).__name__} with layout {pool.layout!r}: {why}")


def flat_form(pool: Any) -> FlatForm:
    """The form of a pool's own flat pages. Raises CannotShareError."""
    try:
        return _flat(pool)
    except _ERRORS as error:
        raise CannotShareError("flat_unsupported", f"{type(pool).__name__}: {error}") from error


def flat_views(pool: Any, joined: torch.Tensor) -> list[View]:
    """Flat pages, [n, values of a page], with their axes named. Raises ValueError."""
    views = _views(pool)
    if len(views) != 1:
        raise ValueError("K and V in tensors of their own have no flat page")
    tensor, axes, holds = views[0]
    inner = [length for axis, length in zip(axes, tensor.shape, strict=True) if axis != "b"]
    return [View(joined.view(len(joined), *inner), "b" + axes.replace("b", ""), holds)]


def as_bytes(page: torch.Tensor) -> torch.Tensor:
    """A flat page as u8[bytes]."""
    return page.contiguous().view(torch.uint8).reshape(-1)


def _canonical(pool: Any, pieces: int) -> CanonicalForm | None:
    """None where the pool's tensors or the bytes of a page are not what its layout means."""
    views = _views(pool)
    if not views or pool.dtype not in _DTYPES or not _has_plain_rows(pool):
        return None
    heads, layers, tokens = (_length(views[0], axis) for axis in "hlt")
    k_dim = sum(_length(view, "d") for view in views if view.holds != "v")
    v_dim = sum(_length(view, "d") for view in views if view.holds != "k")
    page_bytes = heads * layers * tokens * (k_dim + v_dim) * pool.dtype.itemsize
    told = (int(pool.size_per_token) * int(pool.page_size), pool.layer_num, pool.page_size)
    if (page_bytes, layers, tokens) != told:
        return None
    if heads % pieces:
        raise CannotShareError("heads_uneven", f"{heads} heads of a rank do not make {pieces} equal pieces")
    each, first = heads // pieces, int(pool.start_layer or 0)
    group = LayerGroup(
        GroupKind.FULL, tuple(range(first, first + layers)), each, k_dim, v_dim, _DTYPES[pool.dtype]
    )  # fmt: skip
    cut = [[_cut(view, piece, each) for view in views] for piece in range(pieces)]
    return CanonicalForm(pool, cut, Layout.of(group), tokens, tokens, {"form": "canonical"}, each)


def _has_plain_rows(pool: Any) -> bool:
    """Whether the engine's own rows, which the pool copies as they are, are [token, head, value]."""
    infos = getattr(pool, "_buffer_infos", None) or ()
    layouts = [getattr(getattr(info, "buffers", None), "layout", _PLAIN) for info in infos]
    return all(str(getattr(layout, "value", layout)) == _PLAIN for layout in layouts)


def _views(pool: Any) -> list[View]:
    """The pool's tensors with their axes named; none where they are not what the layout means."""
    found = [_with_pages(each, pool) for each in _tensors(pool, str(pool.layout))]
    views = [each for each in found if each is not None]
    return views if len(views) == len(found) else []


def _tensors(pool: Any, layout: str) -> list[tuple[torch.Tensor, str, Holds]]:
    """The pool's tensors, the axes that its layout means, and what each holds; axes "" where it means none."""
    buffer, single = getattr(pool, "kv_buffer", None), _SINGLE.get(layout, "")
    if isinstance(buffer, tuple):  # heads of K and V that differ in size
        return [(buffer[0], single, "k"), (buffer[1], single, "v")]
    if isinstance(buffer, torch.Tensor):
        both = _PAIRED.get(layout, "")
        if hasattr(pool, "v_head_dim") and buffer.dim() == len(both) - (layout in _BY_TOKEN):
            return [(buffer, both, "kv")]
        return [(buffer, single, "k")]
    alone = getattr(pool, "k_buffer", None)
    return [(alone, single, "k")] if isinstance(alone, torch.Tensor) else []


def _with_pages(told: tuple[torch.Tensor, str, Holds], pool: Any) -> View | None:
    """A tensor of a pool with an axis of pages and one of tokens; None where it has another shape."""
    tensor, axes, holds = told
    layout, page = str(pool.layout), (int(pool.page_num), int(pool.page_size))
    if not axes:
        return None
    if layout in _BY_TOKEN:
        at = axes.index("b")
        if tensor.dim() != len(axes) - 1 or tensor.shape[at] != math.prod(page):
            return None
        tensor = torch.unflatten(tensor, at, page)
    elif layout == "page_unified" and "c" not in axes and tensor.dim() == len(axes) - 1:
        tensor = tensor.unsqueeze(axes.index("h"))  # MLA, which has no axis of heads there
    if tensor.dim() != len(axes):
        return None
    view = View(tensor, axes, holds)
    return view if (_length(view, "b"), _length(view, "t")) == page else None


def _length(view: View, axis: str) -> int:
    lengths = [length for letter, length in zip(view.axes, view.tensor.shape, strict=True) if letter == axis]
    return math.prod(lengths)


def _cut(view: View, piece: int, heads: int) -> View:
    """The heads of one piece. Raises ValueError where an axis in two parts does not let itself be cut there."""
    tensor, axes, holds = view
    at = [index for index, letter in enumerate(axes) if letter == "h"]
    inner = math.prod(tensor.shape[index] for index in at[1:])
    first = piece * heads
    if len(at) == 1 or inner == 1 or heads % inner == 0:
        return View(tensor.narrow(at[0], first // inner, heads // inner), axes, holds)
    if inner % heads:
        raise ValueError(f"{heads} heads do not fit groups of {inner}")
    group = tensor.narrow(at[0], first // inner, 1)
    return View(group.narrow(at[1], first % inner, heads), axes, holds)


def _runs(pool: Any) -> RunsForm:
    addresses, sizes = pool.get_page_buffer_meta(torch.zeros(pool.page_size, dtype=torch.int64))
    if not sizes or len(addresses) != len(sizes):
        raise ValueError("it tells no page")
    form = _opaque(pool, "runs", sum(sizes), [int(size) for size in sizes])
    return RunsForm(pool, tuple(int(size) for size in sizes), *form)


def _flat(pool: Any) -> FlatForm:
    like = pool.get_dummy_flat_data_page()
    size = like.numel() * like.element_size()
    if not size or as_bytes(pool.get_data_page(0, flat=True)).numel() != size:
        raise ValueError("its flat pages differ in size")
    return FlatForm(pool, size, *_opaque(pool, "flat", size, [size]))


def _opaque(
    pool: Any, kind: str, page_bytes: int, sizes: list[int]
) -> tuple[Layout, int, int, Mapping[str, Value]]:  # fmt: skip
    tokens = max(int(pool.page_size), -(-page_bytes // MAX_DIM))
    detail: dict[str, Value] = {
        "form": kind,
        "class": type(pool).__name__,
        "layout": str(pool.layout),
        "sizes": list(sizes),
        "dtype": str(pool.dtype),
        "shape": [int(getattr(pool, name, None) or 0) for name in ("layer_num", "head_num", "head_dim", "page_size")],
        "layers": [int(getattr(pool, name, None) or 0) for name in ("start_layer", "end_layer")],
        "version": str(getattr(sys.modules.get("sglang"), "__version__", "")),
    }
    return Layout.opaque(page_bytes, tokens, f"native:sglang:{kind}"), int(pool.page_size), tokens, detail
