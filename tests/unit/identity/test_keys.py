"""Block keys against their formula, their bad inputs, and their independence of the process."""

import hashlib
import hmac
import os
import struct
import subprocess
import sys
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.identity import Extra, Tokens, block_keys, foreign_key, pack_extra, pack_tokens, root_key, split_extras
from prefixcache.identity.keys import PUBLIC_KEY

ROOT = bytes(range(32))
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=200)


def by_formula(parent: bytes, tokens: list[int], block_tokens: int, extras: dict[int, bytes]) -> bytes:
    """The design's formula, written with struct and hashlib only."""
    keys = b""
    for block in range(len(tokens) // block_tokens):
        extra = extras.get(block, b"")
        body = struct.pack(f"<{block_tokens}I", *tokens[block * block_tokens : (block + 1) * block_tokens])
        parent = hashlib.sha256(parent + struct.pack("<I", len(extra)) + extra + body).digest()
        keys += parent
    return keys


@given(tokens=TOKENS, block_tokens=st.integers(1, 70), extras=st.dictionaries(st.integers(0, 9), st.binary(max_size=9)))
def test_block_keys_follow_the_formula(tokens: list[int], block_tokens: int, extras: dict[int, bytes]) -> None:
    assert block_keys(ROOT, tokens, block_tokens, extras) == by_formula(ROOT, tokens, block_tokens, extras)
    assert block_keys(ROOT, tokens, block_tokens) == by_formula(ROOT, tokens, block_tokens, {})


@given(tokens=TOKENS)
def test_every_form_of_the_same_tokens_gives_the_same_keys(tokens: list[int]) -> None:
    packed = struct.pack(f"<{len(tokens)}I", *tokens)
    forms: list[Tokens] = [
        tokens,
        tuple(tokens),
        packed,
        bytearray(packed),
        memoryview(packed),
        array("I", tokens),
        np.array(tokens, dtype=np.int64),
        np.array(tokens, dtype=np.uint32),
        np.array(tokens, dtype=">u8"),
        np.repeat(np.array(tokens, dtype=np.uint32), 2)[::2],
    ]
    assert {bytes(pack_tokens(form)) for form in forms} == {packed}
    assert len({block_keys(ROOT, form, 4) for form in forms}) == 1


def test_only_whole_blocks_have_keys() -> None:
    assert block_keys(ROOT, [1] * 63, 64) == b""
    assert len(block_keys(ROOT, [1] * 129, 64)) == 2 * 32
    assert block_keys(ROOT, b"", 64) == b""


def test_keys_go_on_from_the_last_key() -> None:
    tokens = list(range(256))
    first = block_keys(ROOT, tokens[:128], 64)
    assert first + block_keys(first[-32:], tokens[128:], 64) == block_keys(ROOT, tokens, 64)


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        (b"\0" * 6, ValueError),
        (memoryview(b"\0" * 7), ValueError),
        ([-1], ValueError),
        ([2**32], ValueError),
        ([2**70], ValueError),
        (np.array([-1]), ValueError),
        (np.array([2**32]), ValueError),
        (np.zeros((2, 2), np.int64), ValueError),
        ([1.5], TypeError),
        (["a"], TypeError),
        (np.array([1.5]), TypeError),
        (np.array([True]), TypeError),
    ],
)
def test_bad_tokens_are_refused(tokens: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        block_keys(ROOT, tokens, 64)  # type: ignore[arg-type]  # bad input is the point


@pytest.mark.parametrize("parent", [b"", b"\0" * 31, b"\0" * 33])
def test_a_parent_of_another_length_is_refused(parent: bytes) -> None:
    with pytest.raises(ValueError, match="parent must be 32 bytes"):
        block_keys(parent, [1] * 64, 64)


@pytest.mark.parametrize("block_tokens", [0, -1, 65537])
def test_a_block_size_out_of_range_is_refused(block_tokens: int) -> None:
    with pytest.raises(ValueError, match="block_tokens must be"):
        block_keys(ROOT, [1], block_tokens)


def test_root_key_is_an_hmac_of_fingerprint_and_salt() -> None:
    tenant = bytes(range(1, 33))
    assert root_key(ROOT, tenant_key=tenant, cache_salt=b"x") == hmac.digest(tenant, ROOT + b"x", "sha256")
    assert root_key(ROOT) == hmac.digest(PUBLIC_KEY, ROOT, "sha256")
    assert len({root_key(ROOT), root_key(ROOT, cache_salt=b"a"), root_key(ROOT, tenant_key=tenant)}) == 3


@pytest.mark.parametrize("tenant_key", [b"", b"\1" * 31, b"\1" * 33])
def test_a_tenant_key_of_another_length_is_refused(tenant_key: bytes) -> None:
    with pytest.raises(ValueError, match="tenant_key must be 32 bytes"):
        root_key(ROOT, tenant_key=tenant_key)


def test_an_unset_tenant_key_is_refused() -> None:
    with pytest.raises(ValueError, match="all zero"):
        root_key(ROOT, tenant_key=b"\0" * 32)


def test_a_fingerprint_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="fingerprint must be 32 bytes"):
        root_key(b"short")


def test_extras_are_sorted_canonical_msgpack() -> None:
    one, two = Extra("image", b"\xaa", 3), Extra("embedding", b"\xbb", 7)
    expected = b"\x92\x93\xa9embedding\xc4\x01\xbb\x07\x93\xa5image\xc4\x01\xaa\x03"
    assert pack_extra([one, two]) == pack_extra([two, one, two]) == expected
    assert pack_extra([]) == b""


@pytest.mark.parametrize("extra", [Extra("", b"x", 0), Extra("image", b"", 0), Extra("image", b"x", -1)])
def test_a_bad_extra_is_refused(extra: Extra) -> None:
    with pytest.raises(ValueError, match=r"extra|kind"):
        pack_extra([extra])


def test_an_extra_changes_its_block_and_all_after_it() -> None:
    tokens = [7] * 256
    plain = block_keys(ROOT, tokens, 64)
    image = block_keys(ROOT, tokens, 64, split_extras([Extra("image", b"cat", 130)], 64))
    assert image == by_formula(ROOT, tokens, 64, {2: pack_extra([Extra("image", b"cat", 2)])})
    assert image[:64] == plain[:64]
    assert image[64:96] != plain[64:96]
    assert image[96:] != plain[96:]


def test_an_extra_before_the_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="before the prompt"):
        split_extras([Extra("image", b"x", -1)], 64)


def test_an_extra_cannot_be_mistaken_for_tokens() -> None:
    assert block_keys(ROOT, [0, 0, 0, 9], 4) != block_keys(ROOT, [0, 9], 2, {0: b"\0" * 8})


def test_foreign_keys_follow_the_formula() -> None:
    assert foreign_key(ROOT, b"engine") == hashlib.sha256(ROOT + struct.pack("<I", 6) + b"engine").digest()
    with pytest.raises(ValueError, match="empty"):
        foreign_key(ROOT, b"")


def test_keys_do_not_depend_on_the_process() -> None:
    script = (
        "import hashlib;from prefixcache.identity import *;"
        "extras=split_extras([Extra(k,k.encode(),5) for k in {'image','audio','embedding','video'}],64);"
        "print(block_keys(root_key(bytes(32),cache_salt=b's'),list(range(500)),64,extras).hex())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed, "LC_ALL": locale},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed, locale in (("0", "C"), ("1", "C.UTF-8"), ("4242", "C"))
    }
    extras = split_extras([Extra(kind, kind.encode(), 5) for kind in ("image", "audio", "embedding", "video")], 64)
    assert outputs == {block_keys(root_key(bytes(32), cache_salt=b"s"), list(range(500)), 64, extras).hex() + "\n"}
