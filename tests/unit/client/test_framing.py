"""Frames come out whole and in order, however the bytes were cut on the way."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache_client.framing import END, ERROR, MAX_PAYLOAD_BYTES, BadFrame, FrameBuffer, pack_frame

flags = st.sampled_from([END, END | ERROR, 0])
frame = st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 255), flags, st.binary(max_size=60))


@given(frames=st.lists(frame, max_size=8), cuts=st.lists(st.integers(1, 40), min_size=1))
def test_any_cut_gives_the_same_frames(frames: list[tuple[int, int, int, bytes]], cuts: list[int]) -> None:
    wire = b"".join(pack_frame(call, method, payload, flags) for call, method, flags, payload in frames)
    buffer, got, at = FrameBuffer(), [], 0
    while at < len(wire):
        step = cuts[at % len(cuts)]
        buffer.feed(wire[at : at + step])
        at += step
        while (frame := buffer.take()) is not None:
            got.append(frame)
    assert got == frames


@given(frames=st.lists(frame, max_size=8), cuts=st.lists(st.integers(1, 80), min_size=1))
def test_the_short_way_gives_the_same(frames: list[tuple[int, int, int, bytes]], cuts: list[int]) -> None:
    wire = b"".join(pack_frame(call, method, payload, flags) for call, method, flags, payload in frames)
    buffer, got, at = FrameBuffer(), [], 0
    while at < len(wire):
        step = cuts[at % len(cuts)]
        frame = buffer.take_next(wire[at : at + step])
        at += step
        while frame is not None:
            got.append(frame)
            frame = buffer.take()
    assert got == frames


def test_missing_says_how_much_of_a_frame_is_to_come() -> None:
    buffer = FrameBuffer()
    assert buffer.missing() == 0
    buffer.feed(pack_frame(1, 2, b"x" * 100)[:30])
    assert buffer.take() is None
    assert buffer.missing() == 80


@pytest.mark.parametrize(("size", "flags"), [(MAX_PAYLOAD_BYTES + 1, END), (0, 16), (0, 128 | END)])
def test_frames_that_the_contract_forbids(size: int, flags: int) -> None:
    buffer = FrameBuffer()
    buffer.feed(struct.pack("<IIBB", size, 1, 1, flags))
    with pytest.raises(BadFrame):
        buffer.take()


def test_the_layout_of_the_header_is_the_contracts() -> None:
    assert pack_frame(0x01020304, 7, b"ab") == bytes([2, 0, 0, 0, 4, 3, 2, 1, 7, 1]) + b"ab"
