"""Coded slots beside engines' tensors of every order: decoded straight to their place or by way of a copy, the same
numbers come."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from prefixcache_offload import transfer
from prefixcache_offload.codecs import arrays, moves
from prefixcache_offload.codecs.apart import raw_stride
from prefixcache_offload.codecs.formats import INT4, INT8, Format
from prefixcache_offload.codecs.moves import CodedJob
from prefixcache_offload.engine import EngineTensor, Job, Move, plan
from prefixcache_offload.memory import Memory
from prefixcache_offload.strides import PartShape, Span, Strided
from prefixcache_offload.units import SLOT_GRANULE

SHAPE = PartShape(2, 3, 8, 16, 16, 2)
BLOCKS = 6


class Pool:
    """Slots in any order and at any distance, filled by numpy."""

    def __init__(self, form: Format, shape: PartShape = SHAPE, slots: Sequence[int] = (9, 2, 4, 6, 0, 12)) -> None:
        self.form, self.shape = form, shape
        self.slots = np.array(slots, np.uint32) * (-(-form.coded(shape).part_bytes // SLOT_GRANULE))
        size = (int(self.slots.max()) + 4) * SLOT_GRANULE
        self.data = np.zeros(size, np.uint8)
        self.memory = Memory.of_bytes(self.data)
        self.numbers = torch.randn(len(slots), shape.part_bytes // 2, generator=torch.Generator().manual_seed(1))
        raw = self.numbers.to(torch.bfloat16).view(torch.uint8).numpy()
        coded = np.zeros((len(slots), form.coded(shape).part_bytes), np.uint8)
        arrays.encode(form, shape, "bfloat16", raw, coded)
        back = np.zeros_like(raw)
        arrays.decode(form, shape, "bfloat16", coded, back)
        self.coded, self.raw = coded, torch.from_numpy(raw.copy()).view(torch.bfloat16)
        self.decoded = torch.from_numpy(back).view(torch.bfloat16)

    def fill(self) -> None:
        for slot, row in zip(self.slots.tolist(), self.coded, strict=True):
            self.data[slot * SLOT_GRANULE : slot * SLOT_GRANULE + row.size] = row

    def read(self) -> np.ndarray:
        size = self.coded.shape[1]
        starts = self.slots.astype(np.int64) * SLOT_GRANULE
        return np.stack([self.data[start : start + size] for start in starts])

    def job(self, jobs: list[Job]) -> CodedJob:
        return CodedJob(self.form, self.shape, "bfloat16", self.slots, jobs)


def blocks_in(tensor: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    return want.view(tensor.shape)


def stacked(shape: PartShape, tensor: torch.Tensor) -> list[Job]:
    """One move of all blocks of [n, ...], as the SDK plans it."""
    memory, place = Memory.of_tensor(tensor)
    lengths, itemsize = place.shape[1:], tensor.element_size()
    strides, step = [], itemsize
    for length in reversed(lengths):
        strides.insert(0, step)
        step *= length
    pool = Strided(0, lengths, tuple(strides)).stacked(place.shape[0], raw_stride(shape))
    return [Job(memory, [Move(pool, place)], itemsize)]


def straight(pool: Pool, jobs: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """Load, and fail if that went by way of a copy."""
    with monkeypatch.context() as patch:
        patch.setattr(moves, "_load_by_copy", lambda *_: pytest.fail("that went by way of a copy"))
        moves.load(pool.memory, [pool.job(jobs)])


ORDERS = {
    "flat": lambda h, ly, t, d: (h * ly * 2 * t * d,),
    "head, rest": lambda h, ly, t, d: (h, ly * 2 * t * d),
    "head, layer, rest": lambda h, ly, t, d: (h, ly, 2 * t * d),
    "head and layer, c, rest": lambda h, ly, t, d: (h * ly, 2, t * d),
    "all": lambda h, ly, t, d: (h, ly, 2, t, d),
}


@pytest.mark.parametrize("form", [INT8, INT4], ids=lambda form: form.name)
@pytest.mark.parametrize("order", ORDERS)
def test_arrays_of_whole_blocks(form: Format, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(form)
    pool.fill()
    axes = ORDERS[order](SHAPE.kv_heads, SHAPE.layers, SHAPE.tokens, SHAPE.k_dim)
    target = torch.zeros(BLOCKS, *axes, dtype=torch.bfloat16)
    straight(pool, stacked(SHAPE, target), monkeypatch)
    assert torch.equal(target, blocks_in(target, pool.decoded))


def test_whole_blocks_as_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(INT8)
    pool.fill()
    target = torch.zeros(BLOCKS, SHAPE.part_bytes, dtype=torch.uint8)
    straight(pool, stacked(SHAPE, target), monkeypatch)
    assert torch.equal(target.view(torch.bfloat16), pool.decoded)


def test_whole_blocks_in_a_permuted_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the Transformers adapter restores: [layer, c, head, token of the prompt, dim] seen as blocks."""
    pool = Pool(INT8)
    pool.fill()
    cache = torch.zeros(SHAPE.layers, 2, SHAPE.kv_heads, BLOCKS * SHAPE.tokens, SHAPE.k_dim, dtype=torch.bfloat16)
    view = cache.unflatten(3, (BLOCKS, SHAPE.tokens)).permute(3, 2, 0, 1, 4, 5)
    straight(pool, stacked(SHAPE, view), monkeypatch)
    assert torch.equal(view, blocks_in(view, pool.decoded))


def test_an_order_that_hides_k_and_v_goes_by_way_of_a_copy() -> None:
    pool = Pool(INT8)
    pool.fill()
    target = torch.zeros(BLOCKS, 3, SHAPE.part_bytes // 6, dtype=torch.bfloat16)
    assert moves._planes(pool.memory, pool.job(stacked(SHAPE, target))) is None
    moves.load(pool.memory, [pool.job(stacked(SHAPE, target))])
    assert torch.equal(target, blocks_in(target, pool.decoded))


def layer_tensors(axes: str, tokens: int, pages: int) -> list[torch.Tensor]:
    lengths = {"b": pages, "t": tokens, "h": SHAPE.kv_heads, "d": SHAPE.k_dim, "c": 2}
    return [torch.zeros([lengths[a] for a in axes], dtype=torch.bfloat16) for _ in range(SHAPE.layers)]


def paged_jobs(kept: list[torch.Tensor], axes: str, places: np.ndarray) -> list[Job]:
    slots = moves.raw_slots(SHAPE, BLOCKS)
    return [
        plan(SHAPE, Span(0, SHAPE.kv_heads, layer, 1), EngineTensor.of(tensor, axes, "kv"), slots, places)
        for layer, tensor in enumerate(kept)
    ]


@pytest.mark.parametrize("form", [INT8, INT4], ids=lambda form: form.name)
@pytest.mark.parametrize("axes", ["cbthd", "cbhtd", "bcthd"])
@pytest.mark.parametrize("page_tokens", [4, 8, 16])
def test_engines_pages(form: Format, axes: str, page_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages smaller than, as large as and larger than a block, in any order."""
    pool = Pool(form)
    pool.fill()
    pages = 2 * BLOCKS * SHAPE.tokens // page_tokens
    order = np.array(random.Random(page_tokens).sample(range(pages), pages // 2))
    step = min(page_tokens, SHAPE.tokens)
    tokens = np.arange(0, BLOCKS * SHAPE.tokens, step)
    places = order[tokens // page_tokens] * page_tokens + tokens % page_tokens
    kept = layer_tensors(axes, page_tokens, pages)
    straight(pool, paged_jobs(kept, axes, places), monkeypatch)
    # the same through a raw pool and the plain path
    raw = np.zeros(BLOCKS * raw_stride(SHAPE), np.uint8).reshape(BLOCKS, -1)
    raw[:, : SHAPE.part_bytes] = pool.decoded.view(torch.uint8).numpy()
    plain = layer_tensors(axes, page_tokens, pages)
    transfer.load(Memory.of_bytes(raw.reshape(-1)), paged_jobs(plain, axes, places))
    for mine, theirs in zip(kept, plain, strict=True):
        assert torch.equal(mine, theirs)
    # and back
    empty = Pool(form)
    source = layer_tensors(axes, page_tokens, pages)
    raw[:, : SHAPE.part_bytes] = pool.raw.view(torch.uint8).numpy()
    transfer.load(Memory.of_bytes(raw.reshape(-1)), paged_jobs(source, axes, places))
    moves.store(empty.memory, [empty.job(paged_jobs(source, axes, places))])
    assert np.array_equal(empty.read(), pool.coded)


PORTIONS = {
    "heads": [(range(1), None), (range(1, 2), None)],
    "layers": [(range(2), range(2)), (range(2), range(2, 3))],
    "both": [(range(each, each + 1), some) for each in range(2) for some in (range(1), range(1, 3))],
}


@pytest.mark.parametrize("form", [INT8, INT4], ids=lambda form: form.name)
@pytest.mark.parametrize("portions", PORTIONS)
@pytest.mark.parametrize("with_torch", [True, False])
def test_what_several_write_is_what_one_would_have_written(
    form: Format, portions: str, monkeypatch: pytest.MonkeyPatch, *, with_torch: bool
) -> None:
    """Each has tensors of its own heads and layers alone, and changes nobody else's bytes."""
    pool, empty = Pool(form), Pool(form)
    places = np.arange(BLOCKS) * SHAPE.tokens
    every = layer_tensors("bcthd", SHAPE.tokens, BLOCKS)
    raw = np.zeros(BLOCKS * raw_stride(SHAPE), np.uint8).reshape(BLOCKS, -1)
    raw[:, : SHAPE.part_bytes] = pool.raw.view(torch.uint8).numpy()
    transfer.load(Memory.of_bytes(raw.reshape(-1)), paged_jobs(every, "bcthd", places))
    if not with_torch:
        monkeypatch.setattr(moves, "sys", type("NoTorch", (), {"modules": {}}))
    for heads, layers in PORTIONS[portions]:
        jobs = [
            plan(
                SHAPE,
                Span(heads.start, len(heads), layer, 1),
                EngineTensor.of(every[layer][:, :, :, heads.start : heads.stop], "bcthd", "kv"),
                moves.raw_slots(SHAPE, BLOCKS),
                places,
            )
            for layer in layers or range(SHAPE.layers)
        ]
        before = empty.data.copy()
        moves.store(empty.memory, [empty.job(jobs)._replace(heads=heads, layers=layers)])
        assert not before[empty.data != before].any(), "somebody had written there"
    assert np.array_equal(empty.read(), pool.coded)


def test_without_torch_the_same_bytes_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves, "sys", type("NoTorch", (), {"modules": {}}))
    pool = Pool(INT8)
    pool.fill()
    target = np.zeros((BLOCKS, SHAPE.part_bytes), np.uint8)
    memory, place = Memory.of_array(target)
    dense = Strided(0, (SHAPE.part_bytes,), (1,)).stacked(BLOCKS, raw_stride(SHAPE))
    jobs = [Job(memory, [Move(dense, place)], 1)]
    moves.load(pool.memory, [pool.job(jobs)])
    assert target.tobytes() == pool.decoded.view(torch.uint8).numpy().tobytes()
    empty = Pool(INT8)
    target[:] = pool.raw.view(torch.uint8).numpy()
    moves.store(empty.memory, [empty.job(jobs)])
    assert np.array_equal(empty.read(), pool.coded)


def test_mla_has_no_v(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = PartShape(1, 2, 8, 24, 0, 2)
    pool = Pool(INT8, shape)
    pool.fill()
    target = torch.zeros(BLOCKS, 1, shape.layers, shape.tokens, shape.k_dim, dtype=torch.bfloat16)
    straight(pool, stacked(shape, target), monkeypatch)
    assert torch.equal(target, blocks_in(target, pool.decoded))


def test_memory_that_may_not_be_written_is_refused_before_anything_moves() -> None:
    pool = Pool(INT8)
    fixed = np.zeros((BLOCKS, SHAPE.part_bytes), np.uint8)
    fixed.setflags(write=False)
    memory, place = Memory.of_array(fixed)
    dense = Strided(0, (SHAPE.part_bytes,), (1,)).stacked(BLOCKS, raw_stride(SHAPE))
    with pytest.raises(ValueError, match="read-only"):
        moves.load(pool.memory, [pool.job([Job(memory, [Move(dense, place)], 1)])])
    pool.data.setflags(write=False)
    frozen = Memory.of_bytes(pool.data)
    with pytest.raises(ValueError, match="read-only"):
        moves.store(frozen, [pool.job([Job(memory, [Move(dense, place)], 1)])])
