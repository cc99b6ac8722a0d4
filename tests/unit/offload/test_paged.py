"""Paged caches of every layout to slots and back: each value where a plain loop over the definition puts it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixcache_offload import paged
from prefixcache_offload.engine import Holds
from prefixcache_offload.memory import Memory
from prefixcache_offload.paged import PagedCache, PagedTensor, Stretch, gather, scatter
from prefixcache_offload.strides import PartShape

GRANULE = 4096
PAGES = 9
WORDS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32}
# (axes, what each tensor holds); "T" and "D" are the inner parts of t and d
LAYOUTS: list[tuple[str, tuple[Holds, ...]]] = [
    ("cbthd", ("kv",)),
    ("cbhtd", ("kv",)),
    ("bcthd", ("kv",)),
    ("bchtd", ("kv",)),
    ("bhtd", ("kv",)),
    ("bthd", ("kv",)),
    ("bthd", ("k", "v")),
    ("bhdt", ("k", "v")),
    ("bhtdTD", ("k", "v")),
    ("lcbthd", ("kv",)),
    ("blcthd", ("kv",)),
    ("bhltd", ("k", "v")),
]
INNER_TOKENS, INNER_DIM = 2, 2


@dataclass
class Case:
    """A part, an engine's tensors with one rank's heads of it, and prompts that lie in both."""

    part: PartShape
    heads: int
    first_head: int
    page_tokens: int
    stretches: list[Stretch]


@st.composite
def cases(draw: st.DrawFn, axes: str) -> Case:
    equal = "c" in axes
    k_dim = 2 * draw(st.integers(1, 2))
    v_dim = k_dim if equal else 2 * draw(st.integers(1, 2))
    block = draw(st.sampled_from([4, 6, 8]))
    part = PartShape(
        kv_heads=draw(st.integers(1, 4)),
        layers=draw(st.integers(1, 3)),
        tokens=block,
        k_dim=k_dim,
        v_dim=v_dim,
        itemsize=draw(st.sampled_from([1, 2, 4])),
        scale_bytes=draw(st.sampled_from([0, 8])),
    )
    first_head = draw(st.integers(0, part.kv_heads - 1))
    heads = draw(st.integers(1, part.kv_heads - first_head))
    page_tokens = draw(st.sampled_from([2, 4, 6, 8, 16]))
    slots = draw(st.permutations(range(12)))
    ids = draw(st.permutations(range(PAGES)))
    stretches = []
    for _ in range(draw(st.integers(0, 2))):  # one or two prompts, each with pages and slots of its own
        take, ids = ids[:4], ids[4:]
        pages = np.array(take, np.int64)
        grain = 1 if "T" not in axes else INNER_TOKENS
        stop = draw(st.integers(0, 4 * page_tokens // grain)) * grain
        start = draw(st.integers(0, stop // grain)) * grain
        first_block = start // block
        count = -(-stop // block) - first_block
        if count > len(slots):
            continue
        pages[: start // page_tokens] = -1  # not looked at
        stretches.append(Stretch(np.array(slots[:count], np.uint32), pages, start, stop, first_block))
        slots = slots[count:]
    return Case(part, heads, first_head, page_tokens, stretches)


def shape_of(case: Case, axes: str, holds: Holds) -> tuple[int, ...]:
    part = case.part
    d = part.k_dim + part.v_dim if holds == "kv" and "c" not in axes else part.dim("v" if holds == "v" else "k")
    tokens = case.page_tokens // (INNER_TOKENS if "T" in axes else 1)
    sizes = {"c": 2, "b": PAGES, "h": case.heads, "l": part.layers, "t": tokens, "T": INNER_TOKENS, "D": INNER_DIM}
    sizes["d"] = d // (INNER_DIM if "D" in axes else 1)
    return tuple(sizes[letter] for letter in axes)


def made(case: Case, axes: str, holds: tuple[Holds, ...], seed: int) -> list[tuple[np.ndarray, Holds, int]]:
    """(array, what it holds, first layer) of every tensor of an engine, filled at random."""
    rng, found = np.random.default_rng(seed), []
    for one in holds:
        for layer in range(1 if "l" in axes else case.part.layers):
            raw = rng.integers(0, 256, (*shape_of(case, axes, one), case.part.itemsize), dtype=np.uint8)
            found.append((raw.view(WORDS[case.part.itemsize])[..., 0], one, layer))
    return found


def loop(
    case: Case, axes: str, tensors: list[tuple[np.ndarray, Holds, int]], each: Callable[[np.ndarray, Any, int], None]
) -> int:
    """Call `each(tensor, index, byte offset in the pool)` for every value that must move, by the definition alone."""
    part, count = case.part, 0
    for stretch in case.stretches:
        pages, slots = np.asarray(stretch.pages), np.asarray(stretch.slots)
        for tensor, holds, first_layer in tensors:
            for component in [c for c in ("k", "v") if c in holds]:
                dim = part.k_dim if component == "k" else part.v_dim
                shift = part.k_dim if component == "v" and holds == "kv" and "c" not in axes else 0
                layers = part.layers if "l" in axes else 1
                for h, layer, position, d in np.ndindex(case.heads, layers, stretch.stop - stretch.start, dim):
                    token = stretch.start + position
                    inside, value = token % case.page_tokens, d + shift
                    index = {"b": pages[token // case.page_tokens], "h": h, "l": layer, "t": inside, "d": value}
                    index["c"] = int(component == "v")
                    if "T" in axes:
                        index["t"], index["T"] = divmod(inside, INNER_TOKENS)
                        index["d"], index["D"] = divmod(value, INNER_DIM)
                    row = (case.first_head + h) * part.layers + first_layer + layer
                    at = row * part.layer_bytes + (token % part.tokens * dim + d) * part.itemsize
                    at += part.tokens * part.k_dim * part.itemsize if component == "v" else 0
                    slot = int(slots[token // part.tokens - stretch.first_block])
                    each(tensor, tuple(index[letter] for letter in axes), slot * GRANULE + at)
                    count += 1
    return count


def described(case: Case, axes: str, tensors: list[tuple[np.ndarray, Holds, int]]) -> PagedCache:
    ours = axes.replace("T", "t").replace("D", "d")
    members = [PagedTensor(tensor, ours, holds, layer) for tensor, holds, layer in tensors]
    return PagedCache(case.part, members, first_head=case.first_head)


@pytest.mark.parametrize(("axes", "holds"), LAYOUTS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_layout_moves_what_a_plain_loop_does(axes: str, holds: tuple[Holds, ...], data: st.DataObject) -> None:
    case = data.draw(cases(axes))
    size = case.part.itemsize
    pool = np.random.default_rng(3).integers(0, 256, 16 * GRANULE, dtype=np.uint8)
    tensors = made(case, axes, holds, 4)
    cache = described(case, axes, tensors)
    expected = pool.copy()

    def put(tensor: np.ndarray, index: Any, at: int) -> None:
        expected[at : at + size] = np.frombuffer(tensor[index].tobytes(), np.uint8)

    count = loop(case, axes, tensors, put)
    assert gather(cache, Memory.of_bytes(pool), case.stretches) == count * size
    assert np.array_equal(pool, expected)

    pool[:] = np.random.default_rng(5).integers(0, 256, pool.size, dtype=np.uint8)
    before, wanted = pool.copy(), [tensor.copy() for tensor, _, _ in tensors]
    place = {id(tensor): wanted[i] for i, (tensor, _, _) in enumerate(tensors)}

    def take(tensor: np.ndarray, index: Any, at: int) -> None:
        place[id(tensor)][index] = np.frombuffer(before[at : at + size].tobytes(), WORDS[size])[0]

    loop(case, axes, tensors, take)
    assert scatter(cache, Memory.of_bytes(pool), case.stretches) == count * size
    assert all(np.array_equal(tensor, want) for (tensor, _, _), want in zip(tensors, wanted, strict=True))
    assert np.array_equal(pool, before)


PART = PartShape(kv_heads=4, layers=3, tokens=8, k_dim=16, v_dim=16, itemsize=2)
SLOTS, IDS = [4, 0, 2], [5, 1, 8, 0, 7, 3]


def test_one_engine_reads_what_another_wrote_with_other_ranks_and_pages() -> None:
    pool = Memory.of_bytes(np.zeros(8 * GRANULE, np.uint8))
    whole = torch.randn(PART.layers, 2, 24, 4, 16).to(torch.bfloat16)  # layer, k or v, token, head, dim
    for rank in (1, 0):  # two ranks, pages of 4 tokens
        layers = [torch.zeros(2, PAGES, 4, 2, 16, dtype=torch.bfloat16) for _ in range(PART.layers)]
        for layer, cache in enumerate(layers):
            for i, page in enumerate(IDS):
                cache[:, page] = whole[layer, :, 4 * i : 4 * i + 4, 2 * rank : 2 * rank + 2]
        members = [PagedTensor(cache, "cbthd", first_layer=i) for i, cache in enumerate(layers)]
        gather(PagedCache(PART, members, first_head=2 * rank), pool, [Stretch(SLOTS, IDS, 0, 24)])
    # one rank, pages of 16 tokens, heads before tokens; it has the first 4 tokens itself
    wide = torch.zeros(PAGES, PART.layers, 2, 4, 16, 16, dtype=torch.bfloat16)
    reader = PagedCache(PART, [PagedTensor(wide, "blchtd")])
    scatter(reader, pool, [Stretch(SLOTS, [6, 2], 4, 24)])
    read = torch.cat([wide[6], wide[2, :, :, :, :8]], dim=3).permute(0, 1, 3, 2, 4)
    assert torch.equal(read[:, :, 4:], whole[:, :, 4:])
    assert not read[:, :, :4].any()


def test_layers_of_one_storage_are_one_tensor_and_a_copy_a_run() -> None:
    storage = torch.zeros(PART.layers, PAGES, 4, 8, 32, dtype=torch.int16)
    members = [PagedTensor(storage[i], "bhtd", first_layer=i) for i in range(PART.layers)]
    joined = PagedCache(PART, members)
    assert joined.tensors == 1
    stretch = [Stretch([0, 2, 4], [1, 2, 3], 0, 24)]
    assert [len(list(each.moves())) for job in joined.jobs(stretch) for each in job.moves] == [1, 1]
    apart = [PagedTensor(storage[i].clone(), "bhtd", first_layer=i) for i in range(PART.layers)]
    assert PagedCache(PART, apart).tensors == PART.layers
    swapped = [PagedTensor(storage[2 - i], "bhtd", first_layer=i) for i in range(PART.layers)]
    assert PagedCache(PART, swapped).tensors == PART.layers

    storage.copy_(torch.randint(-9999, 9999, storage.shape, dtype=torch.int16))
    pools = [np.zeros(8 * GRANULE, np.uint8) for _ in range(2)]
    apart = [PagedTensor(storage[i].clone(), "bhtd", first_layer=i) for i in range(PART.layers)]
    for cache, pool in zip((joined, PagedCache(PART, apart)), pools, strict=True):
        gather(cache, Memory.of_bytes(pool), stretch)
    assert np.array_equal(*pools)
    assert pools[0].any()


def test_a_page_of_the_cpu_backend_with_keys_transposed() -> None:
    """[head, 2 * token, dim] whose first half is K as [dim, token]: two views of one storage."""
    pages, heads, tokens, dim = 5, 2, 8, 16
    part = PartShape(heads, 1, 4, dim, dim, 2)
    cache = torch.zeros(pages, heads, 2 * tokens, dim, dtype=torch.bfloat16)
    k, v = torch.randn(2, pages, heads, tokens, dim).to(torch.bfloat16)
    cache[:, :, :tokens] = k.transpose(2, 3).reshape(pages, heads, tokens, dim)
    cache[:, :, tokens:] = v
    steps = cache.stride()
    keys = cache.as_strided((pages, heads, dim, tokens), (steps[0], steps[1], tokens, 1))
    members = [PagedTensor(keys, "bhdt", "k"), PagedTensor(cache[:, :, tokens:], "bhtd", "v")]
    pool = np.zeros(4 * GRANULE, np.uint8)
    gather(PagedCache(part, members), Memory.of_bytes(pool), [Stretch([1, 3], [4], 0, 8)])
    for i, slot in enumerate((1, 3)):
        stored = torch.from_numpy(pool[slot * GRANULE :][: part.part_bytes]).view(torch.bfloat16)
        stored = stored.view(heads, 2, 4, dim)
        assert torch.equal(stored[:, 0], k[4, :, 4 * i : 4 * i + 4])
        assert torch.equal(stored[:, 1], v[4, :, 4 * i : 4 * i + 4])


def test_mla_and_dtypes_without_arithmetic() -> None:
    for dtype in (torch.float8_e4m3fn, torch.float16, torch.float32):
        part = PartShape(1, 2, 4, 72, 0, dtype.itemsize)
        layers = [torch.randn(PAGES, 4, 72).to(dtype) for _ in range(2)]
        cache = PagedCache(part, [PagedTensor(each, "btd", "k", i) for i, each in enumerate(layers)])
        pool = Memory.of_bytes(np.zeros(4 * GRANULE, np.uint8))
        gather(cache, pool, [Stretch([2, 0], [7, 1], 0, 8)])
        again = [torch.zeros(PAGES, 4, 72).to(dtype) for _ in range(2)]
        other = PagedCache(part, [PagedTensor(each, "btd", "k", i) for i, each in enumerate(again)])
        scatter(other, pool, [Stretch([2, 0], [0, 3], 0, 8)])
        for before, after in zip(layers, again, strict=True):
            assert torch.equal(before[[7, 1]].view(torch.uint8), after[[0, 3]].view(torch.uint8))


def test_thousands_of_pieces_cost_few_objects() -> None:
    """Cutting is arrays: no Python object a piece."""
    cuts = paged._cut([Stretch(np.arange(512), np.arange(2048), 16, 32768)], 64, 16)
    assert [cut.tokens for cut in cuts] == [16]
    assert cuts[0].places.size == 2047
    odd = paged._cut([Stretch(np.arange(3), np.arange(4), 0, 192)], 64, 48)
    assert [(cut.tokens, cut.places.tolist()) for cut in odd] == [(48, [0, 144]), (32, [64, 96]), (16, [48, 128])]


def zeros(*shape: int) -> Any:
    return np.zeros(shape, np.uint16)


LAYER = (2, PAGES, 4, 4, 16)
BAD: list[tuple[list[PagedTensor], str]] = [
    ([], "needs tensors"),
    ([PagedTensor(zeros(*LAYER), "cbthd"), PagedTensor(zeros(*LAYER), "cbthd")], "2 times"),
    ([PagedTensor(zeros(*LAYER), "cbthd"), PagedTensor(zeros(*LAYER), "cbthd", first_layer=2)], "0 times"),
    ([PagedTensor(zeros(*LAYER[1:]), "bthd", "k")], "v of layer 0 is there 0 times"),
    ([PagedTensor(zeros(*LAYER), "cbthd", first_layer=3)], "outside"),
    ([PagedTensor(np.zeros(LAYER, np.float32), "cbthd")], "4 bytes"),
    ([PagedTensor(zeros(2, PAGES, 4, 5, 16), "cbthd")], "outside"),
    ([PagedTensor(zeros(*LAYER), "cbthd"), PagedTensor(zeros(2, 2, 8, 4, 16), "cbthd", first_layer=1)], "one size"),
    ([PagedTensor(zeros(*LAYER), "cbthd"), PagedTensor(zeros(2, 2, 4, 3, 16), "cbthd", first_layer=1)], "same heads"),
]


@pytest.mark.parametrize(("members", "text"), BAD)
def test_caches_that_would_leave_bytes_out_are_refused(members: list[PagedTensor], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        PagedCache(PART, members)


@pytest.mark.parametrize(
    ("stretch", "text"),
    [
        (Stretch([0], [0, 1], 0, 9), "are wanted"),
        (Stretch([0], [0, 1], 5, 4), "are wanted"),
        (Stretch([0], [0, 1], 0, 8, first_block=1), "are wanted"),
        (Stretch([0, 2], [0, 1], 0, 12), "end before"),
        (Stretch([0], [0, -1], 0, 8), "leaves its page"),
        (Stretch([0], [0, PAGES], 0, 8), "leaves its page"),
        (Stretch([7], [0, 1], 0, 8), "reaches out"),
    ],
)
def test_stretches_that_do_not_fit_are_refused_before_a_byte_moves(stretch: Stretch, text: str) -> None:
    tensors = [np.ones(LAYER, np.uint16) for _ in range(PART.layers)]
    cache = PagedCache(PART, [PagedTensor(each, "cbthd", first_layer=i) for i, each in enumerate(tensors)])
    pool = np.zeros(8 * GRANULE, np.uint8)
    for move in (gather, scatter):
        with pytest.raises((ValueError, IndexError), match=text):
            move(cache, Memory.of_bytes(pool), [Stretch([0], [0, 1], 0, 8), stretch])
    assert not pool.any()
    assert all((each == 1).all() for each in tensors)
