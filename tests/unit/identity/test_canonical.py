"""Canonical msgpack: one form for each value, and nothing that has none."""

import enum
import json
from pathlib import Path

import msgpack  # type: ignore[import-untyped]  # msgpack ships no type information
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.identity.canonical import CanonicalError, Value, pack, unpack

VECTORS = json.loads((Path(__file__).resolve().parents[2] / "vectors" / "canonical.json").read_text())

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
    | st.binary(max_size=300)
)
values: st.SearchStrategy[Value] = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=20)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=10), inner, max_size=20)
    ),
    max_leaves=30,
)


@given(value=values)
def test_a_value_survives(value: Value) -> None:
    assert unpack(pack(value)) == value
    assert pack(unpack(pack(value))) == pack(value)


@given(items=st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), st.integers(0, 9)), seed=st.randoms())
def test_the_order_of_a_map_does_not_matter(items: dict[str, int], seed: object) -> None:
    shuffled = list(items.items())
    seed.shuffle(shuffled)  # type: ignore[attr-defined]  # hypothesis types its Random as an object
    assert pack(dict(shuffled)) == pack(items)


@given(data=st.binary(max_size=60))
def test_noise_is_refused_or_canonical(data: bytes) -> None:
    try:
        value = unpack(data)
    except CanonicalError:
        return
    assert pack(value) == data


@pytest.mark.parametrize("vector", VECTORS["refused"], ids=lambda vector: vector["why"])
def test_what_is_not_canonical_is_refused(vector: dict[str, str]) -> None:
    with pytest.raises(CanonicalError):
        unpack(bytes.fromhex(vector["packed"]))


class Number(enum.IntEnum):
    ONE = 1


class Name(enum.StrEnum):
    ONE = "one"


@pytest.mark.parametrize(
    "value",
    [
        float("nan"), float("inf"), float("-inf"), 2**64, -(2**63) - 1, {1: 2}, {b"a": 1}, {None: 1}, {1, 2},
        object(), np.int64(1), np.float64(1.0), np.str_("a"), bytearray(b"a"), Number.ONE, Name.ONE, "\ud800",
        {"\ud800": 1}, [{"deep": [float("nan")]}], msgpack.Timestamp(1),
    ],
    ids=repr,
)  # fmt: skip
def test_what_has_no_canonical_form_is_refused(value: Value) -> None:
    with pytest.raises(CanonicalError, match="value"):
        pack(value)


def test_the_place_is_named() -> None:
    with pytest.raises(CanonicalError, match=r"value\.a\[1\]\.b: nan"):
        pack({"a": [1, {"b": float("nan")}]})


def test_nesting_has_a_bound() -> None:
    value: Value = []
    for _ in range(32):
        value = [value]
    assert unpack(pack(value)) == value
    with pytest.raises(CanonicalError, match="nested"):
        pack([value])
    with pytest.raises(CanonicalError):
        unpack(b"\x91" * 100_000 + b"\xc0")
