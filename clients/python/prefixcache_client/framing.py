"""Frames of the local channel: bytes to frames and back.

A frame, little-endian: u32 payload length, u32 call id, u8 method, u8 flags, payload. No sockets, no threads, no clock
here; whoever owns the socket feeds bytes in and takes frames out.
"""

import struct
from typing import Final

MAX_PAYLOAD_BYTES: Final = 64 << 20
"""A longer frame ends the connection, by the contract."""

END: Final = 1
ERROR: Final = 2
CANCEL: Final = 4
DESCRIPTORS: Final = 8
_KNOWN_FLAGS: Final = END | ERROR | CANCEL | DESCRIPTORS

_HEADER: Final = struct.Struct("<IIBB")
HEADER_BYTES: Final = _HEADER.size


class BadFrame(Exception):
    """The peer does not speak the protocol: a frame too long, or with a flag nobody knows."""


Frame = tuple[int, int, int, bytes]
"""(call id, method, flags, payload); a plain tuple, because one is made for every call."""


def pack_frame(call_id: int, method: int, payload: bytes, flags: int = END) -> bytes:
    """The bytes of one frame. The payload must not be longer than MAX_PAYLOAD_BYTES."""
    return _HEADER.pack(len(payload), call_id, method, flags) + payload


class FrameBuffer:
    """Bytes that came but are not a whole frame yet.

    Kept as one immutable `bytes`, `pending`: nearly always a receive brings one whole frame, which costs one slice.
    """

    __slots__ = ("pending",)

    def __init__(self) -> None:
        self.pending = b""

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        self.pending = self.pending + data if self.pending else data

    def take_next(self, data: bytes) -> Frame | None:
        """As `feed` and `take`: nearly always `data` is one whole frame and nothing else."""
        if not self.pending and len(data) >= HEADER_BYTES:
            size, call_id, method, flags = _HEADER.unpack_from(data)
            if len(data) == HEADER_BYTES + size and not flags & ~_KNOWN_FLAGS:
                return call_id, method, flags, data[HEADER_BYTES:]
        self.feed(data)
        return self.take()

    def missing(self) -> int:
        """Bytes that the frame begun still lacks; 0 when its header has not come."""
        if len(self.pending) < HEADER_BYTES:
            return 0
        size: int = _HEADER.unpack_from(self.pending)[0]
        return max(HEADER_BYTES + size - len(self.pending), 0)

    def take(self) -> Frame | None:
        """The next whole frame, or None. Raises BadFrame."""
        data = self.pending
        if len(data) < HEADER_BYTES:
            return None
        size, call_id, method, flags = _HEADER.unpack_from(data)
        if size > MAX_PAYLOAD_BYTES or flags & ~_KNOWN_FLAGS:
            raise BadFrame(f"a frame of {size} bytes with flags {flags:#x}")
        end = HEADER_BYTES + size
        if len(data) < end:
            return None
        self.pending = data[end:]
        return call_id, method, flags, data[HEADER_BYTES:end]
