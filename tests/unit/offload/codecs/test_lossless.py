"""The lossless form of bytes: every bit comes back, what does not shrink has none, and no damage is taken for data."""

from __future__ import annotations

import random

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from prefixcache_offload.codecs import lossless
from prefixcache_offload.codecs.lossless import HEAD, PAGE, Bytes


def kv(size_bytes: int, seed: int = 0) -> Bytes:
    """bfloat16 numbers of a bell curve, u8[size_bytes]."""
    values = np.random.default_rng(seed).standard_normal(-(-size_bytes // 2)).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)[:size_bytes]


def stored(payload: Bytes, value_bytes: int = 2) -> Bytes:
    packed = lossless.pack(payload, value_bytes)
    assert packed is not None
    assert packed.memory.nbytes == packed.pages * PAGE
    return np.frombuffer(packed.memory, np.uint8).copy()


@pytest.mark.parametrize("value_bytes", [0, 1, 2, 4])
@pytest.mark.parametrize("size", [8192, 8193, 65536, 200_000, 1 << 20])
def test_every_bit_comes_back(size: int, value_bytes: int) -> None:
    payload = kv(size)
    packed = lossless.pack(payload, value_bytes)
    if packed is None:
        assert value_bytes != 2 or size % 2 or size < 4 * PAGE, "exponents of one bell curve always shrink"
        return
    target = np.full(size + 3, 7, np.uint8)
    assert lossless.unpack(np.frombuffer(packed.memory, np.uint8), target[:size])
    assert np.array_equal(target[:size], payload)
    assert (target[size:] == 7).all()


@given(st.binary(max_size=300), st.integers(1, 200), st.integers(0, 8))
def test_any_bytes_come_back_or_stay_raw(piece: bytes, times: int, value_bytes: int) -> None:
    payload = np.frombuffer(piece * times, np.uint8)
    packed = lossless.pack(payload, value_bytes)
    if packed is not None:
        assert packed.pages < -(-payload.size // PAGE), "a form that frees no page is not worth decoding"
        target = np.zeros(payload.size, np.uint8)
        assert lossless.unpack(np.frombuffer(packed.memory, np.uint8), target)
        assert target.tobytes() == piece * times


def test_memory_that_begins_at_an_odd_address_is_read_and_filled_all_the_same() -> None:
    payload, target = np.zeros(65537, np.uint8), np.zeros(65537, np.uint8)
    payload[1:] = kv(65536)
    assert lossless.unpack(stored(payload[1:]), target[1:])
    assert np.array_equal(target, payload)


def test_special_values_keep_their_bits() -> None:
    """NaNs of every kind, infinities, both zeros, denormals: planes know nothing of numbers."""
    payload = np.tile(np.arange(1 << 16, dtype=np.uint16), 2).view(np.uint8)
    made = kv(1 << 20)
    made[: payload.size] = payload
    target = np.zeros(made.size, np.uint8)
    assert lossless.unpack(stored(made), target)
    assert np.array_equal(target, made)


def test_noise_and_small_things_have_no_stored_form() -> None:
    assert lossless.pack(np.frombuffer(random.Random(1).randbytes(1 << 18), np.uint8), 2) is None
    assert lossless.pack(kv(4096), 2) is None
    assert lossless.pack(np.zeros(0, np.uint8), 2) is None


def test_sixteen_bit_floats_shrink_more_in_planes_than_whole() -> None:
    payload = lossless.sample()
    split, whole = lossless.pack(payload, 2), lossless.pack(payload, 0)
    assert split is not None
    assert whole is None or split.pages < whole.pages
    assert payload.size / split.memory.nbytes > 1.35


def test_no_flipped_bit_is_taken_for_data() -> None:
    payload = kv(32768)
    good = stored(payload)
    end = good.size - np.argmax(good[::-1] != 0)
    chance = random.Random(3)
    for _ in range(300):
        bad = good.copy()
        bad[chance.randrange(end)] ^= 1 << chance.randrange(8)
        target = np.zeros(payload.size, np.uint8)
        assert not lossless.unpack(bad, target) or np.array_equal(target, payload)


@pytest.mark.parametrize("left", [0, 10, 31, 32, 100, 5000, 16000])
def test_a_form_that_is_cut_short_is_none(left: int) -> None:
    payload = kv(32768)
    assert not lossless.unpack(stored(payload)[:left], np.zeros(payload.size, np.uint8))


def test_a_form_of_another_length_is_refused_before_a_byte_is_made() -> None:
    payload = kv(32768)
    for size in (32766, 32770, 0, 1 << 20):
        assert not lossless.unpack(stored(payload), np.zeros(size, np.uint8))


def forged(frame: bytes, raw_bytes: int, form: int = 0) -> Bytes:
    """A stored form with any frame in it."""
    head = np.frombuffer(stored(kv(32768))[: HEAD.itemsize].tobytes(), HEAD).copy()
    head["form"], head["raw_bytes"], head["frame_bytes"] = form, raw_bytes, len(frame)
    return np.frombuffer(head.tobytes() + frame + bytes(PAGE), np.uint8)


def test_a_bomb_makes_no_more_bytes_than_the_target_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame that says it holds 256 MiB, one that says nothing, and one that holds more than it says."""
    bomb = zstandard.ZstdCompressor().compress(bytes(256 << 20))
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64 << 20))
    target = np.zeros(32768, np.uint8)
    opened = []
    real = lossless._decompressor
    monkeypatch.setattr(lossless, "_decompressor", lambda: opened.append(1) or real())
    assert not lossless.unpack(forged(bomb, 32768), target)
    assert not lossless.unpack(forged(silent, 32768), target)
    assert not opened, "the size is judged before the frame is"
    two = zstandard.ZstdCompressor().compress(bytes(32768)) * 2
    assert not lossless.unpack(forged(two, 32768), target), "a second frame behind the first"
    assert not lossless.unpack(forged(b"no frame at all", 32768), target)
    assert not lossless.unpack(forged(two, 32768, form=9), target), "a form that nobody knows"
