"""Frames of the local channel (proto/prefixcache/v1/local.proto): constants and the packing of headers.

Bytes only: no sockets, no sessions, no messages.
"""

import struct
from enum import IntFlag
from typing import Final

HEADER: Final = struct.Struct("<IIBB")  # payload length, call id, method, flags
HEADER_BYTES: Final = HEADER.size
MAX_FRAME_BYTES: Final = 64 << 20


class Flag(IntFlag):
    """What a frame is; an unknown bit ends the connection."""

    END = 1
    ERROR = 2
    CANCEL = 4
    DESCRIPTORS = 8


END: Final = int(Flag.END)
ERROR: Final = int(Flag.ERROR | Flag.END)
CANCEL: Final = int(Flag.CANCEL)
WITH_DESCRIPTORS: Final = int(Flag.DESCRIPTORS | Flag.END)
# A worker may send these; errors and descriptors only travel the other way.
FROM_CLIENT: Final = frozenset({0, END, CANCEL, CANCEL | END})
