"""Lossless: the bytes of 16-bit floats in two planes, the one with sign and exponent compressed, the other as it is.

A stored form begins with a `HEAD`, then comes one zstd frame, then the plane that is kept raw, then zeros up to a whole
page. Mantissas are noise and cost time without giving a byte; exponents of one model's KV are few and far from evenly
used (their entropy is 2.6 of 8 bits). Values of another size are compressed whole. What does not shrink by a sixteenth
has no stored form: the caller keeps it raw.

`unpack` believes nothing: sizes are compared before a byte is made, never more is made than the target holds, and what
comes out is compared with the digest of what went in. No file, slot or thread is known here.
"""

import functools
import importlib.util
import mmap
import threading
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

Bytes = npt.NDArray[np.uint8]

PAGE: Final = 4096
SPLIT_BYTES: Final = 2
"""Size of the values whose planes are told apart."""
LEVEL: Final = 1
HEAD: Final = np.dtype(
    [
        ("magic", "<u4"),
        ("form", "u1"),
        ("spare", "u1", 3),
        ("raw_bytes", "<u4"),
        ("frame_bytes", "<u4"),
        ("digest", "u1", 16),  # xxh3-128 of the bytes that went in
    ]
)
_MAGIC: Final = int.from_bytes(b"PxL1", "little")
_WHOLE, _SPLIT = 0, 1
_LEAST_BYTES: Final = 2 * PAGE
_LEAST_SAVED: Final = 16
"""One byte of so many must go, else it is not worth decoding."""
_SAMPLE_BYTES: Final = 64 << 10
_CHUNK: Final = 32 << 10
"""Values taken apart or put together at a time: their copies stay in the nearest caches."""
_local = threading.local()


class Packed(NamedTuple):
    """A stored form: `memory` is page-aligned and a whole number of pages long."""

    memory: memoryview
    pages: int


def available() -> bool:
    """Whether zstandard is installed."""
    return importlib.util.find_spec("zstandard") is not None


def pack(payload: Bytes, value_bytes: int) -> Packed | None:
    """The stored form of u8[n], or None where it would not be smaller by a sixteenth and a page at least.

    `value_bytes`: size of the numbers in it; 2 tells the planes apart, anything else compresses the whole.
    """
    size = payload.size
    if size < _LEAST_BYTES:
        return None
    split = value_bytes == SPLIT_BYTES and size % SPLIT_BYTES == 0
    high, low = _split(payload) if split else (payload, _NOTHING)
    most = size - size // _LEAST_SAVED - HEAD.itemsize - low.size
    if not _worth_it(high, most):
        return None
    frame = _compressor().compress(high)
    total = HEAD.itemsize + len(frame) + low.size
    pages = -(-total // PAGE)
    if len(frame) > most or pages >= -(-size // PAGE):
        return None
    memory = memoryview(mmap.mmap(-1, pages * PAGE))
    stored = np.frombuffer(memory, np.uint8)
    head = np.zeros(1, HEAD)
    head["magic"], head["form"] = _MAGIC, _SPLIT if split else _WHOLE
    head["raw_bytes"], head["frame_bytes"] = size, len(frame)
    head["digest"] = np.frombuffer(xxhash.xxh3_128_digest(payload.data), np.uint8)
    stored[: HEAD.itemsize] = head.view(np.uint8)
    stored[HEAD.itemsize : HEAD.itemsize + len(frame)] = np.frombuffer(frame, np.uint8)
    stored[HEAD.itemsize + len(frame) : total] = low
    return Packed(memory, pages)


def unpack(stored: Bytes, target: Bytes) -> bool:
    """Fill `target` (writable u8[n], contiguous) from its stored form. False: it is not one, or of other bytes.

    The target may hold anything after False.
    """
    if stored.size < HEAD.itemsize:
        return False
    head = np.frombuffer(stored[: HEAD.itemsize].tobytes(), HEAD)[0]
    size, frame_bytes, form = target.size, int(head["frame_bytes"]), int(head["form"])
    low_bytes = size // SPLIT_BYTES if form == _SPLIT else 0
    fits = HEAD.itemsize + frame_bytes + low_bytes <= stored.size
    if int(head["magic"]) != _MAGIC or form not in (_WHOLE, _SPLIT) or int(head["raw_bytes"]) != size or not fits:
        return False
    if form == _SPLIT and size % SPLIT_BYTES:
        return False
    high = _expand(stored[HEAD.itemsize : HEAD.itemsize + frame_bytes], size - low_bytes)
    if high is None:
        return False
    if form == _SPLIT:
        start = HEAD.itemsize + frame_bytes
        _join(high, stored[start : start + low_bytes], target)
    else:
        np.copyto(target, high)
    return bool(xxhash.xxh3_128_digest(target.data) == head["digest"].tobytes())


def _expand(frame: Bytes, size: int) -> Bytes | None:
    """u8[size] out of a zstd frame that says it holds just so much, or None."""
    import zstandard

    try:
        # The size that the frame tells is what zstandard allocates, so it is read before anything is made of it.
        if zstandard.get_frame_parameters(frame.data).content_size != size:
            return None
        made = _decompressor().decompress(frame.data, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError:
        return None
    return np.frombuffer(made, np.uint8) if len(made) == size else None


def _worth_it(plane: Bytes, most: int) -> bool:
    """Whether a piece from the middle shrinks as much as the whole would have to."""
    if most <= 0:
        return False
    if plane.size <= 2 * _SAMPLE_BYTES:
        return True
    first = (plane.size - _SAMPLE_BYTES) // 2
    shrunk = len(_compressor().compress(plane[first : first + _SAMPLE_BYTES]))
    return shrunk * plane.size <= most * _SAMPLE_BYTES * (1 + 1 / _LEAST_SAVED)


def _split(payload: Bytes) -> tuple[Bytes, Bytes]:
    """(bytes with sign and exponent, the other bytes) of little-endian values of 16 bits."""
    values = payload.view("<u2") if payload.ctypes.data % SPLIT_BYTES == 0 else payload.copy().view("<u2")
    high, low = np.empty(values.size, np.uint8), np.empty(values.size, np.uint8)
    shifted = np.empty(min(_CHUNK, values.size), np.uint16)
    for first in range(0, values.size, _CHUNK):
        some = values[first : first + _CHUNK]
        over = shifted[: some.size]
        np.copyto(low[first : first + some.size], some, casting="unsafe")
        np.right_shift(some, 8, out=over)
        np.copyto(high[first : first + some.size], over, casting="unsafe")
    return high, low


def _join(high: Bytes, low: Bytes, target: Bytes) -> None:
    """The inverse of `_split`."""
    if target.ctypes.data % SPLIT_BYTES:
        pairs = target.reshape(-1, SPLIT_BYTES)
        pairs[:, 0], pairs[:, 1] = low, high
        return
    values = target.view("<u2")
    wide = np.empty(min(_CHUNK, values.size), np.uint16)
    for first in range(0, values.size, _CHUNK):
        some = values[first : first + _CHUNK]
        over = wide[: some.size]
        np.copyto(some, high[first : first + some.size])
        np.left_shift(some, 8, out=some)
        np.copyto(over, low[first : first + some.size])
        np.bitwise_or(some, over, out=some)


def _compressor() -> Any:
    """One for each thread: they keep tables that are dear to make."""
    import zstandard

    made = getattr(_local, "compressor", None)
    if made is None:
        made = _local.compressor = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True)
    return made


def _decompressor() -> Any:
    import zstandard

    made = getattr(_local, "decompressor", None)
    if made is None:
        made = _local.decompressor = zstandard.ZstdDecompressor()
    return made


_NOTHING: Final = np.zeros(0, np.uint8)


@functools.cache
def sample(size_bytes: int = 1 << 20) -> Bytes:
    """bfloat16 values spread as KV is, u8[n], to time this codec with before there is anything else. Do not write."""
    chance = np.random.default_rng(1)
    spread = np.exp2(chance.normal(0, 1.5, 256)).astype(np.float32)
    values = chance.standard_normal((size_bytes // SPLIT_BYTES // spread.size, spread.size), np.float32) * spread
    words = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16).reshape(-1)
    words.setflags(write=False)
    return words.view(np.uint8)
