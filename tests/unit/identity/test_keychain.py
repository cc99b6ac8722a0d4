"""A conversation hashed bit by bit has the keys of the same conversation hashed at once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.identity import Extra, KeyChain, block_keys, split_extras
from prefixcache.identity.canonical import Value, pack

ROOT = bytes(range(32))


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[list[int]], list[Extra], int]:
    turns = draw(st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=40), max_size=8))
    length = sum(map(len, turns))
    places = st.integers(0, length - 1) if length else st.nothing()
    extra = st.builds(Extra, st.sampled_from(["image", "audio"]), st.binary(min_size=1, max_size=4), places)
    return turns, draw(st.lists(extra, max_size=5)) if length else [], draw(st.integers(1, 20))


@given(conversation=conversations(), exports=st.sets(st.integers(0, 7)))
def test_incremental_equals_one_shot(conversation: tuple[list[list[int]], list[Extra], int], exports: set[int]) -> None:
    turns, extras, block_tokens = conversation
    chain, new = KeyChain(ROOT, block_tokens), b""
    for number, turn in enumerate(turns):
        first = chain.token_count
        new += chain.append(turn, [extra for extra in extras if first <= extra.offset < first + len(turn)])
        if number in exports:
            chain = KeyChain.import_state(chain.export_state())
    whole = [token for turn in turns for token in turn]
    assert new == block_keys(ROOT, whole, block_tokens, split_extras(extras, block_tokens))
    assert chain.token_count == len(whole)
    assert chain.block_count == len(whole) // block_tokens
    assert chain.last_key == (new[-32:] or ROOT)
    assert new.endswith(chain.keys)


def test_keys_hold_all_blocks_so_far() -> None:
    chain = KeyChain(ROOT, 64)
    assert chain.append(range(100)) == chain.keys
    chain.append(list(range(100, 300)))
    assert chain.keys == block_keys(ROOT, list(range(300)), 64)


def test_a_refused_append_changes_nothing() -> None:
    chain = KeyChain(ROOT, 4)
    chain.append([1, 2, 3])
    before = chain.export_state()
    for tokens, extras in (
        ([1, -1], []),
        (b"\0" * 5, []),
        ([4, 5], [Extra("image", b"x", 5)]),
        ([4, 5], [Extra("image", b"x", 2)]),
        ([4, 5], [Extra("image", b"", 3)]),
    ):
        with pytest.raises(ValueError, match=r".+"):
            chain.append(tokens, extras)
        assert chain.export_state() == before


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"block_tokens": 0},
        {"blocks": -1},
        {"parent": b"short"},
        {"tail": b"\0" * 16},
        {"tail": b"\0" * 3},
        {"extras": [["image", b"x"]]},
        {"extras": [["image", b"x", 0]]},
        {"extras": None},
    ],
)
def test_a_state_that_is_not_one_is_refused(change: dict[str, Value]) -> None:
    state: dict[str, Value] = {
        "schema": 1,
        "block_tokens": 4,
        "blocks": 2,
        "parent": ROOT,
        "tail": b"\0" * 8,
        "extras": [],
    }
    KeyChain.import_state(pack(state))
    with pytest.raises(ValueError, match=r".+"):
        KeyChain.import_state(pack({**state, **change}))


def test_noise_is_not_a_state() -> None:
    for noise in (b"", b"\xc1", b"\x80", b"\xff" * 40):
        with pytest.raises(ValueError, match=r".+"):
            KeyChain.import_state(noise)
