"""int8 and int4: sizes, errors bounded by a step, odd numbers, and the same bytes whether numpy or torch made them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixcache.identity.fingerprint import CODECS
from prefixcache_offload.codecs import arrays, tensors
from prefixcache_offload.codecs.formats import FORMATS, INT4, INT8, SOURCE_BYTES, CodecError, Format, format_of
from prefixcache_offload.strides import PartShape

FORMS = [INT8, INT4]
TYPES = list(SOURCE_BYTES)
SHAPES = {
    "heads of 64": (2, 3, 64, 64, 64),
    "mla": (1, 2, 16, 576, 0),
    "odd tokens, k and v of different sizes": (3, 1, 5, 20, 12),
    "one token": (1, 1, 1, 2, 2),
}
Bytes = npt.NDArray[np.uint8]


def shape_of(name: str, dtype: str) -> PartShape:
    return PartShape(*SHAPES[name], SOURCE_BYTES[dtype])


def raw_of(values: torch.Tensor, dtype: str) -> torch.Tensor:
    """float32 [n, numbers of a part] as the bytes of numbers of a type."""
    return values.to(getattr(torch, dtype)).view(torch.uint8)


def numbers(shape: PartShape, blocks: int = 3, seed: int = 0) -> torch.Tensor:
    made = torch.randn(blocks, shape.part_bytes // shape.itemsize, generator=torch.Generator().manual_seed(seed))
    return made * torch.linspace(0.01, 20, made.shape[1])


def there_and_back(form: Format, shape: PartShape, dtype: str, raw: torch.Tensor) -> torch.Tensor:
    """What decoding gives, float32 like the numbers; by numpy and torch alike."""
    coded = tensors.encode(form, shape, dtype, raw)
    same = np.zeros(coded.shape, np.uint8)
    arrays.encode(form, shape, dtype, raw.numpy(), same)
    assert np.array_equal(coded.numpy(), same), "numpy and torch code alike"
    back = torch.full(raw.shape, 7, dtype=torch.uint8)
    decode_into(form, shape, dtype, coded, back)
    other = np.zeros(raw.shape, np.uint8)
    arrays.decode(form, shape, dtype, same, other)
    assert np.array_equal(back.numpy(), other), "numpy and torch decode alike"
    return back.view(getattr(torch, dtype)).float()


def decode_into(form: Format, shape: PartShape, dtype: str, coded: torch.Tensor, raw: torch.Tensor) -> None:
    layers = coded.view(len(coded), shape.kv_heads, shape.layers, -1)
    targets = raw.view(getattr(torch, dtype)).view(len(raw), shape.kv_heads, shape.layers, -1)
    k = shape.tokens * shape.k_dim
    planes = [tensors.Plane("k", layers, targets[..., :k].unflatten(-1, (shape.tokens, shape.k_dim)), 0)]
    if shape.v_dim:
        planes.append(tensors.Plane("v", layers, targets[..., k:].unflatten(-1, (shape.tokens, shape.v_dim)), 0))
    tensors.decode([tensors.CodedPlanes(form, shape, planes)])


def test_names_and_versions_are_those_of_the_identity() -> None:
    assert {name: f"{form.name}.{form.version}" for name, form in FORMATS.items()} == {
        name: CODECS[name] for name in FORMATS
    }
    assert format_of("raw") is format_of("none") is None
    with pytest.raises(CodecError, match="known are raw, int8, int4") as caught:
        format_of("int3")
    assert caught.value.reason == "codec_unknown"


def test_how_much_smaller() -> None:
    shape = PartShape(8, 32, 64, 128, 128, 2)
    ratio = {form.name: shape.part_bytes / form.coded(shape).part_bytes for form in FORMS}
    assert ratio["int8"] > 1.9
    assert ratio["int4"] > 3.5


def test_what_cannot_be_coded_is_refused_with_a_way_out() -> None:
    with pytest.raises(CodecError, match="use int8"):
        INT4.coded(PartShape(1, 1, 4, 3, 3, 2))
    with pytest.raises(CodecError, match="raw"):
        INT8.coded(PartShape(1, 1, 4, 4, 4, 2, scale_bytes=8))
    with pytest.raises(CodecError, match="float8_e4m3fn"):
        tensors.encode(INT8, PartShape(1, 1, 1, 2, 2, 2), "float8_e4m3fn", torch.zeros(1, 8, dtype=torch.uint8))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_errors_stay_below_a_step(form: Format, dtype: str, name: str) -> None:
    """Half a step of the scale, and what the number type itself rounds."""
    shape = shape_of(name, dtype)
    raw = raw_of(numbers(shape), dtype)
    source, back = raw.view(getattr(torch, dtype)).float(), there_and_back(form, shape, dtype, raw)
    source, back = (x.view(len(x), shape.kv_heads, shape.layers, -1) for x in (source, back))
    at = 0
    for component in ("k", "v"):
        size, dim = shape.tokens * shape.dim(component), shape.dim(component)
        if not size:
            continue
        rule = form.rule(component)
        was, now = (x[..., at : at + size].unflatten(-1, (shape.tokens, dim)) for x in (source, back))
        axis = -2 if rule.by_channel else -1
        span = was.abs().amax(axis, keepdim=True) if rule.signed else was.amax(axis, True) - was.amin(axis, True)
        slack = was.abs().amax(axis, keepdim=True) * (2**-7 / rule.levels + (2**-8 if dtype == "bfloat16" else 2**-10))
        assert ((now - was).abs() <= 0.51 * span / rule.levels * 1.02 + slack).all()
        at += size


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_channels_and_tokens_that_never_change_come_back_as_they_were(form: Format) -> None:
    shape = shape_of("heads of 64", "bfloat16")
    constant = torch.full((1, shape.part_bytes // 2), -3.140625)
    assert torch.equal(there_and_back(form, shape, "bfloat16", raw_of(constant, "bfloat16")), constant) or form is INT8
    zeros = torch.zeros(1, shape.part_bytes // 2)
    assert not there_and_back(form, shape, "bfloat16", raw_of(zeros, "bfloat16")).any()


ODD = [float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1e-45, -1e-40, 6e-8, 65504.0, -65504.0, 3.4e38, -3.4e38]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("dtype", TYPES)
def test_odd_numbers_never_become_nan_or_infinite_and_stay_among_themselves(form: Format, dtype: str) -> None:
    """Each odd number in a channel and a token of its own: the other channels and tokens do not notice."""
    shape = PartShape(1, 1, 16, 16, 16, SOURCE_BYTES[dtype])
    plain = numbers(shape, blocks=1)
    odd = plain.clone().view(2, 16, 16)
    for i, number in enumerate(ODD):
        odd[:, i, i] = number
    back = there_and_back(form, shape, dtype, raw_of(odd.view(1, -1), dtype)).view(2, 16, 16)
    assert torch.isfinite(back).all()
    untouched = there_and_back(form, shape, dtype, raw_of(plain, dtype)).view(2, 16, 16)
    assert torch.equal(back[0, :, len(ODD) :], untouched[0, :, len(ODD) :]), "K of other channels"
    assert torch.equal(back[1, len(ODD) :], untouched[1, len(ODD) :]), "V of other tokens"


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(FORMS),
    st.sampled_from(TYPES),
    st.lists(st.floats(width=32), min_size=32, max_size=32),
)
def test_any_numbers_at_all_decode_to_finite_ones(form: Format, dtype: str, values: list[float]) -> None:
    shape = PartShape(1, 1, 4, 4, 4, SOURCE_BYTES[dtype])
    back = there_and_back(form, shape, dtype, raw_of(torch.tensor([values]), dtype))
    assert torch.isfinite(back).all()


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(FORMS), st.sampled_from(TYPES), st.integers(0, 2**32))
def test_any_bytes_at_all_decode_without_a_crash(form: Format, dtype: str, seed: int) -> None:
    """A slot that another owner fills while it is read: generations tell, but only afterwards."""
    shape = PartShape(2, 1, 4, 4, 4, SOURCE_BYTES[dtype])
    coded = np.random.default_rng(seed).integers(256, size=(1, form.coded(shape).part_bytes), dtype=np.uint8)
    decode_into(form, shape, dtype, torch.from_numpy(coded), torch.zeros(1, shape.part_bytes, dtype=torch.uint8))
    arrays.decode(form, shape, dtype, coded, np.zeros((1, shape.part_bytes), np.uint8))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_ranks_heads_are_one_range_of_the_whole(form: Format) -> None:
    """What two ranks wrote is byte for byte what one would have written, so either can read the other's."""
    whole = PartShape(4, 3, 16, 8, 8, 2)
    half = PartShape(2, 3, 16, 8, 8, 2)
    raw = raw_of(numbers(whole), "bfloat16")
    coded = tensors.encode(form, whole, "bfloat16", raw)
    for rank in range(2):
        mine = raw[:, rank * half.part_bytes : (rank + 1) * half.part_bytes].contiguous()
        size = form.coded(half).part_bytes
        assert torch.equal(tensors.encode(form, half, "bfloat16", mine), coded[:, rank * size : (rank + 1) * size])


def test_large_blocks_are_cut_by_heads_and_many_small_ones_taken_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "_PIECE", 1000)
    for name in SHAPES:
        shape = shape_of(name, "bfloat16")
        there_and_back(INT8, shape, "bfloat16", raw_of(numbers(shape, blocks=7), "bfloat16"))


def test_our_threads_leave_torchs_number_of_threads_alone() -> None:
    before = torch.get_num_threads()
    tensors._pool.cache_clear()
    shape = shape_of("heads of 64", "bfloat16")
    there_and_back(INT8, shape, "bfloat16", raw_of(numbers(shape), "bfloat16"))
    assert torch.get_num_threads() == before
    assert {tensors._pool().submit(torch.get_num_threads).result() for _ in range(8)} == {1}
