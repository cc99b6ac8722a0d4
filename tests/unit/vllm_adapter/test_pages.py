"""Pages beside blocks: against a plain model that copies token by token, for every mix of sizes, forms and starts."""

import itertools

import numpy as np
import numpy.typing as npt
import pytest
import torch

from prefixcache.identity.layout import GroupKind, LayerGroup, Layout
from prefixcache_client.blocks import BlockFormat
from prefixcache_offload import transfer
from prefixcache_offload.memory import Memory
from prefixcache_offload.units import SLOT_GRANULE
from prefixcache_vllm.orders import PageRun, page_run
from prefixcache_vllm.packing import PageShape, layer_views
from prefixcache_vllm.pages import NULL_PAGE, LayerPages, PagedSpan, describe_layers
from prefixcache_vllm.ranks import Rank

HEADS, DIM, LAYERS, TOKENS = 2, 16, 2, 448
FORM = BlockFormat(Layout.of(LayerGroup(GroupKind.FULL, tuple(range(LAYERS)), HEADS, DIM, DIM, "float32")), 64)
STRIDE = -(-FORM.block_bytes // SLOT_GRANULE)

Values = npt.NDArray[np.float32]


def kv_of(seed: int) -> Values:
    """A prompt's KV as [layer, k or v, token, head, value]."""
    return np.random.default_rng(seed).random((LAYERS, 2, TOKENS, HEADS, DIM), dtype=np.float32)


def blocks_of(kv: Values) -> Values:
    """The same as canonical blocks: [block, head, layer, k or v, token, value]."""
    blocks = kv.reshape(LAYERS, 2, TOKENS // 64, 64, HEADS, DIM)
    return np.ascontiguousarray(blocks.transpose(2, 4, 0, 1, 3, 5))


class Pages:
    """An engine's tensors with pages of `size` tokens, and the pages of one prompt in them, in disorder."""

    def __init__(self, size: int, form: str) -> None:
        self.size = size
        count = -(-TOKENS // size)
        self.ids = list(1 + np.random.default_rng(5).permutation(count + 3)[:count])
        shapes = {
            "fused": (count + 4, HEADS, size, 2 * DIM),
            "packed": (count + 4, HEADS, size, 2 * DIM),
            "amx": (count + 4, HEADS, size, 2 * DIM),
            "pair_first": (2, count + 4, size, HEADS, DIM),
            "pair_second": (count + 4, 2, size, HEADS, DIM),
        }
        self.tensors = [torch.zeros(shapes[form]) for _ in range(LAYERS)]
        shape = PageShape(HEADS, size, DIM, DIM)
        packing = {"packed": "k_transposed", "amx": "amx"}.get(form, "plain")
        self.form = form
        layers = {
            i: LayerPages(layer_views(tensor, shape, packing), 0, size)  # type: ignore[arg-type] # a literal
            for i, tensor in enumerate(self.tensors)
        }
        self.parts = describe_layers(FORM, layers, Rank())

    def token(self, layer: int, token: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of K and V of one token, [head, value], written down without the code under test."""
        tensor, page, at = self.tensors[layer], int(self.ids[token // self.size]), token % self.size
        if self.form == "fused":
            return tensor[page, :, at, :DIM], tensor[page, :, at, DIM:]
        if self.form == "packed":
            flat = tensor[page].reshape(HEADS, 2 * self.size * DIM)
            k = flat[:, : self.size * DIM].view(HEADS, DIM, self.size)[:, :, at]
            return k, flat[:, self.size * DIM :].view(HEADS, self.size, DIM)[:, at]
        if self.form == "amx":
            k, v = tensor[page].reshape(HEADS, 2, self.size * DIM).unbind(1)
            k = k.view(HEADS, self.size // 16, DIM // 2, 16, 2)[:, at // 16, :, at % 16]
            v = v.view(HEADS, DIM // 16, self.size // 2, 16, 2)[:, :, at // 2, :, at % 2]
            return k, v
        pair = tensor[:, page] if self.form == "pair_first" else tensor[page]
        return pair[0, at], pair[1, at]

    def write(self, kv: Values) -> None:
        for layer, token in itertools.product(range(LAYERS), range(TOKENS)):
            k, v = self.token(layer, token)
            k.copy_(torch.from_numpy(kv[layer, 0, token]).reshape(k.shape))
            v.copy_(torch.from_numpy(kv[layer, 1, token]).reshape(v.shape))

    def read(self) -> Values:
        kv = np.zeros((LAYERS, 2, TOKENS, HEADS, DIM), np.float32)
        for layer, token in itertools.product(range(LAYERS), range(TOKENS)):
            k, v = self.token(layer, token)
            kv[layer, 0, token], kv[layer, 1, token] = k.reshape(HEADS, DIM).numpy(), v.reshape(HEADS, DIM).numpy()
        return kv

    def span(self, first: int, end: int, *, partial: bool) -> PagedSpan:
        return PagedSpan(self.parts, (page_run(self.ids, self.size, first, end),), first, end, partial=partial)


def pool_of(blocks: Values | None) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32]]:
    """A pool with a slot for each block, in reverse order."""
    count = TOKENS // 64
    pool = np.zeros(count * STRIDE * SLOT_GRANULE, np.uint8)
    slots = np.arange(count - 1, -1, -1, dtype=np.uint32) * STRIDE
    if blocks is not None:
        for slot, block in zip(slots, blocks, strict=True):
            raw = block.reshape(-1).view(np.uint8)
            pool[slot * SLOT_GRANULE : slot * SLOT_GRANULE + raw.size] = raw
    return pool, slots


SIZES = (16, 32, 48, 64, 80, 128, 256)
FORMS = ("fused", "packed", "amx", "pair_first", "pair_second")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", FORMS)
def test_store(size: int, form: str) -> None:
    kv, pages = kv_of(1), Pages(size, form)
    pages.write(kv)
    first = -(-64 // size) * size  # pages from somewhere on, as after a loaded prefix
    span = pages.span(first, TOKENS, partial=False)
    pool, slots = pool_of(None)
    covered = span.covers(FORM, 0)
    assert covered == range(-(-first // 64), TOKENS // 64)
    blocks = np.arange(covered.start, covered.stop)
    transfer.store(Memory.of_bytes(pool), span.jobs(FORM, 0, blocks, slots[covered.start :]))
    expected, _ = pool_of(blocks_of(kv))
    for block in blocks:
        at = int(slots[block]) * SLOT_GRANULE
        assert np.array_equal(pool[at : at + FORM.block_bytes], expected[at : at + FORM.block_bytes]), block


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", FORMS)
def test_load_from_any_page_on_writes_nothing_else(size: int, form: str) -> None:
    kv, ours, pages = kv_of(1), kv_of(2), Pages(size, form)
    pages.write(ours)
    first = size  # a page that the engine has itself
    span = pages.span(first, TOKENS, partial=True)
    pool, slots = pool_of(blocks_of(kv))
    covered = span.covers(FORM, 0)
    blocks = np.arange(covered.start, covered.stop)
    transfer.load(Memory.of_bytes(pool), span.jobs(FORM, 0, blocks, slots[covered.start : covered.stop]))
    found = pages.read()
    assert np.array_equal(found[:, :, :first], ours[:, :, :first])
    assert np.array_equal(found[:, :, first:], kv[:, :, first:])


def test_windows_have_holes() -> None:
    pages = Pages(32, "fused")
    for gone in range(5):
        pages.ids[gone] = NULL_PAGE
    assert pages.span(0, TOKENS, partial=False).covers(FORM, 0) == range(3, 7)
    assert pages.span(0, TOKENS, partial=True).covers(FORM, 0) == range(7)


def test_page_runs() -> None:
    assert page_run([7, 8, 9, 10], 32, 40, 100) == PageRun(1, (8, 9, 10))
    assert page_run([7], 256, 64, 128) == PageRun(0, (7,))
