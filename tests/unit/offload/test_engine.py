"""Engine tensors to and from slots: every layout round-trips, and lands where a plain loop says it must."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefixcache_offload import transfer, vectored
from prefixcache_offload.engine import EngineTensor, Holds, plan
from prefixcache_offload.memory import Memory
from prefixcache_offload.strides import PartShape, Span

GRANULE = 4096
WORDS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
# (axes, what each tensor holds): Transformers, its stacked form, vLLM NHD, HND and fused, SGLang device and host
LAYOUTS: list[tuple[str, tuple[Holds, ...]]] = [
    ("1htd", ("k", "v")),
    ("1lhtd", ("k", "v")),
    ("clhtd", ("kv",)),
    ("cbthd", ("kv",)),
    ("cbhtd", ("kv",)),
    ("bcthd", ("kv",)),
    ("bhtd", ("kv",)),
    ("bthd", ("kv",)),
    ("thd", ("k", "v")),
    ("clthd", ("kv",)),
    ("ctlhd", ("kv",)),
    ("cblthd", ("kv",)),
]


@pytest.fixture(params=["numpy", "kernel", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Force one of the three ways of copying; the last two begin with one move by numpy."""
    monkeypatch.setattr(transfer, "_SLOW_IN_A_ROW", 1)
    monkeypatch.setattr(transfer, "_PATIENCE_S", 1e9 if request.param == "numpy" else -1e9)
    monkeypatch.setattr(vectored, "MIN_PIECE_BYTES", 1 << 60 if request.param == "torch" else 0)
    return str(request.param)


@dataclass
class Case:
    """A random part, the tensors of an engine that hold it, and where its blocks are on both sides."""

    part: PartShape
    span: Span
    page_tokens: int
    slots: list[int]
    places: list[int]

    @property
    def tokens(self) -> int:
        return self.part.tokens * len(self.slots) // max(len(self.places), 1)


@st.composite
def cases(draw: st.DrawFn, axes: str, *, fused_dims: bool) -> Case:
    k_dim = draw(st.integers(1, 5))
    v_dim = draw(st.integers(1, 5)) if fused_dims else k_dim
    part = PartShape(
        kv_heads=draw(st.integers(1, 4)),
        layers=draw(st.integers(1, 3)),
        tokens=draw(st.sampled_from([2, 4, 8])),
        k_dim=k_dim,
        v_dim=v_dim,
        itemsize=draw(st.sampled_from([1, 2, 4])),
        scale_bytes=draw(st.sampled_from([0, 8])),
    )
    first_head = draw(st.integers(0, part.kv_heads - 1))
    first_layer = draw(st.integers(0, part.layers - 1))
    heads = draw(st.integers(1, part.kv_heads - first_head))
    layers = draw(st.integers(1, part.layers - first_layer)) if "l" in axes else 1
    blocks = draw(st.integers(0, 5))
    slots = draw(st.lists(st.integers(0, 9), min_size=blocks, max_size=blocks, unique=True))
    pieces = draw(st.sampled_from([1, 2])) if "b" in axes else 1
    piece_tokens = part.tokens // pieces
    page_tokens = piece_tokens * draw(st.sampled_from([1, 2])) if "b" in axes else part.tokens * 8
    room = 10 * page_tokens // piece_tokens if "b" in axes else 8
    count = blocks * pieces
    units = draw(st.lists(st.integers(0, room - 1), min_size=count, max_size=count, unique=True))
    return Case(
        part, Span(first_head, heads, first_layer, layers), page_tokens, slots, [u * piece_tokens for u in units]
    )


def shape_of(case: Case, axes: str, holds: Holds) -> tuple[int, ...]:
    part = case.part
    both = holds == "kv" and "c" not in axes
    d = part.k_dim + part.v_dim if both else part.v_dim if holds == "v" else part.k_dim
    sizes = {"1": 1, "c": 2, "b": 10, "h": case.span.heads, "l": case.span.layers, "t": case.page_tokens, "d": d}
    return tuple(sizes[letter] for letter in axes)


def element(case: Case, axes: str, where: dict[str, int]) -> tuple[int, ...]:
    return tuple(where.get(letter, 0) for letter in axes)


def reference(case: Case, axes: str, holds: Holds, tensor: np.ndarray, pool: np.ndarray) -> list[tuple[Any, int]]:
    """(index in the tensor, byte offset in the pool) of every value, by plain loops over the definition."""
    part, span, pairs = case.part, case.span, []
    pieces = len(case.places) // max(len(case.slots), 1)
    for component in ("k", "v"):
        if component not in holds:
            continue
        dim = part.k_dim if component == "k" else part.v_dim
        shift = part.k_dim if component == "v" and holds == "kv" and "c" not in axes else 0
        for block, slot in enumerate(case.slots):
            for h, layer, t, d in np.ndindex(span.heads, span.layers, part.tokens, dim):
                place = case.places[block * pieces + t // case.tokens] + t % case.tokens
                where = {"b": place // case.page_tokens, "t": place % case.page_tokens, "h": h, "l": layer}
                where |= {"d": d + shift, "c": int(component == "v")}
                offset = (span.first_head + h) * part.layers + span.first_layer + layer
                offset = offset * part.layer_bytes + (t * dim + d) * part.itemsize
                offset += part.tokens * part.k_dim * part.itemsize if component == "v" else 0
                pairs.append((element(case, axes, where), slot * GRANULE + offset))
    return pairs


def random_bytes(shape: tuple[int, ...], itemsize: int, seed: int) -> np.ndarray:
    made = np.random.default_rng(seed).integers(0, 256, (*shape, itemsize), dtype=np.uint8)
    words: np.ndarray = made.view(WORDS[itemsize])[..., 0]
    return words


@pytest.mark.parametrize(("axes", "holds"), LAYOUTS)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_layouts_load_and_store_exactly_what_a_plain_loop_does(
    way: str, axes: str, holds: tuple[Holds, ...], data: st.DataObject
) -> None:
    case = data.draw(cases(axes, fused_dims=holds == ("kv",) and "c" not in axes))
    pool = np.random.default_rng(3).integers(0, 256, 12 * GRANULE, dtype=np.uint8)
    memory = Memory.of_bytes(pool)
    for one in holds:
        tensor = random_bytes(shape_of(case, axes, one), case.part.itemsize, 4)
        job = plan(case.part, case.span, EngineTensor.of(tensor, axes, one), case.slots, case.places)
        pairs = reference(case, axes, one, tensor, pool)
        expected_pool, expected_tensor = pool.copy(), tensor.copy()
        for index, offset in pairs:
            expected_pool[offset : offset + case.part.itemsize] = np.frombuffer(tensor[index].tobytes(), np.uint8)
        assert transfer.store(memory, [job]) == len(pairs) * case.part.itemsize
        assert np.array_equal(pool, expected_pool)

        pool[:] = np.random.default_rng(5).integers(0, 256, pool.size, dtype=np.uint8)
        for index, offset in pairs:
            raw = pool[offset : offset + case.part.itemsize].tobytes()
            expected_tensor[index] = np.frombuffer(raw, WORDS[case.part.itemsize])[0]
        before = pool.copy()
        transfer.load(memory, [job])
        assert np.array_equal(tensor, expected_tensor)
        assert np.array_equal(pool, before)


def test_two_ranks_store_halves_that_one_rank_reads(way: str) -> None:
    part = PartShape(kv_heads=4, layers=3, tokens=8, k_dim=6, v_dim=6, itemsize=2)
    slots, places = [0, 5, 2], [0, 8, 16]
    pool = Memory.of_bytes(np.zeros(8 * GRANULE, np.uint8))
    whole = random_bytes((2, 3, 24, 4, 6), 2, 1)
    for rank in (1, 0):
        half = np.ascontiguousarray(whole[:, :, :, 2 * rank : 2 * rank + 2])
        transfer.store(pool, [plan(part, Span(2 * rank, 2, 0, 3), EngineTensor.of(half, "clthd", "kv"), slots, places)])
    # read by another engine with another order, one tensor a layer, all heads
    for layer in range(3):
        keys = [np.zeros((1, 4, 24, 6), np.uint16) for _ in range(2)]
        halves: tuple[Holds, Holds] = ("k", "v")
        jobs = [
            plan(part, Span(0, 4, layer, 1), EngineTensor.of(array, "1htd", holds), slots, places)
            for array, holds in zip(keys, halves, strict=True)
        ]
        transfer.load(pool, jobs)
        for component in range(2):
            assert np.array_equal(keys[component][0], whole[component, layer].transpose(1, 0, 2))


def test_mla_is_one_head_without_values(way: str) -> None:
    part = PartShape(kv_heads=1, layers=2, tokens=4, k_dim=576, v_dim=0, itemsize=1)
    latent = random_bytes((3, 4, 576), 1, 2)
    pool = Memory.of_bytes(np.zeros(4 * GRANULE, np.uint8))
    job = plan(part, Span(0, 1, 1, 1), EngineTensor.of(latent, "btd", "k"), [1, 2], [8, 0])
    assert transfer.store(pool, [job]) == 2 * 4 * 576
    flat = pool.array(part.view("k", part.whole()).moved(GRANULE), 1)
    assert np.array_equal(flat[0, 1], latent[2])
    assert not flat[0, 0].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn])
def test_torch_tensors_of_every_dtype_in_views_of_their_storage(way: str, dtype: torch.dtype) -> None:
    itemsize = dtype.itemsize
    part = PartShape(kv_heads=2, layers=1, tokens=4, k_dim=8, v_dim=8, itemsize=itemsize)
    base = torch.randn(3, 2, 20, 8).to(dtype)
    tensor = base[1:2, :, 4:]  # a batch row and a token range of a larger cache
    tensor.requires_grad_(dtype.is_floating_point and dtype != torch.float8_e4m3fn)
    pool = Memory.of_bytes(np.zeros(4 * GRANULE, np.uint8))
    engine = EngineTensor.of(tensor, "1htd", "k")
    transfer.store(pool, [plan(part, part.whole(), engine, [3, 1, 2], [0, 4, 8])])
    out = torch.zeros(1, 2, 12, 8).to(dtype)
    transfer.load(pool, [plan(part, part.whole(), EngineTensor.of(out, "1htd", "k"), [3, 1, 2], [0, 4, 8])])
    assert torch.equal(out.view(torch.uint8), tensor.detach()[:, :, :12].contiguous().view(torch.uint8))


def test_blocks_at_equal_distances_become_one_move() -> None:
    part = PartShape(kv_heads=2, layers=2, tokens=4, k_dim=8, v_dim=8, itemsize=2)
    tensor = EngineTensor.of(np.zeros((1, 2, 400, 8), np.uint16), "1htd", "k")
    span = Span(0, 2, 0, 1)

    def moves(slots: list[int], places: list[int]) -> list[tuple[int, ...]]:
        return [move.engine.shape for each in plan(part, span, tensor, slots, places).moves for move in each.moves()]

    assert moves([3, 5, 7, 9], [0, 4, 8, 12]) == [(4, 2, 1, 4, 8)]
    assert moves([3, 5, 8, 11], [0, 4, 8, 12]) == [(2, 2, 1, 4, 8)] * 2
    assert moves([9, 7, 5], [0, 4, 8]) == [(2, 1, 4, 8)] * 3
    assert moves([], []) == []


BAD_PLANS: list[tuple[list[int], list[int]]] = [
    ([0], [-1]),
    ([0], [37]),
    ([0], [40]),
    ([0, 1], [0, 4, 8]),
    ([0], []),
    ([], [0]),
    ([0], [0, 1, 2]),
]


@pytest.mark.parametrize(("slots", "places"), BAD_PLANS)
def test_places_that_do_not_fit_are_refused(slots: list[int], places: list[int]) -> None:
    part = PartShape(kv_heads=1, layers=1, tokens=4, k_dim=8, v_dim=8, itemsize=2)
    tensor = EngineTensor.of(np.zeros((1, 1, 40, 8), np.uint16), "1htd", "k")
    with pytest.raises(ValueError, match=r"places|piece"):
        plan(part, part.whole(), tensor, slots, places)


@pytest.mark.parametrize(
    ("shape", "axes", "holds"),
    [
        ((1, 2, 4, 8), "1htx", "k"),
        ((1, 2, 4, 8), "htd", "k"),
        ((1, 2, 4, 8), "bbtd", "k"),
        ((3, 2, 4, 8), "1htd", "k"),
        ((2, 2, 4, 8), "chtd", "k"),
        ((2, 4, 8), "bhd", "k"),
    ],
)
def test_letters_that_do_not_fit_are_refused(shape: tuple[int, ...], axes: str, holds: Holds) -> None:
    with pytest.raises(ValueError, match="axes"):
        EngineTensor.of(np.zeros(shape, np.uint16), axes, holds)


@pytest.mark.parametrize(
    ("shape", "axes", "holds"),
    [
        ((1, 3, 4, 8), "1htd", "k"),
        ((1, 2, 4, 9), "1htd", "k"),
        ((2, 2, 4, 15), "bhtd", "kv"),
        ((3, 2, 4, 8), "chtd", "kv"),
    ],
)
def test_tensors_of_another_shape_are_refused(shape: tuple[int, ...], axes: str, holds: Holds) -> None:
    part = PartShape(kv_heads=2, layers=1, tokens=4, k_dim=8, v_dim=8, itemsize=2)
    with pytest.raises(ValueError, match=r"tensor has|axis c"):
        plan(part, part.whole(), EngineTensor.of(np.zeros(shape, np.uint16), axes, holds), [0], [0])


def test_a_slot_outside_the_pool_is_refused_before_it_is_touched(way: str) -> None:
    part = PartShape(kv_heads=1, layers=1, tokens=4, k_dim=512, v_dim=512, itemsize=2)
    pool = Memory.of_bytes(np.zeros(8 * GRANULE, np.uint8))
    tensor = np.ones((1, 1, 4, 512), np.uint16)
    job = plan(part, part.whole(), EngineTensor.of(tensor, "1htd", "v"), [7], [0])
    for move in (transfer.load, transfer.store):
        with pytest.raises((ValueError, TypeError)):
            move(pool, [job])
    assert (tensor == 1).all()
