"""How a pool is announced to another process, and how its descriptors travel.

`PoolDescriptor` is plain data for a message; the descriptors themselves go beside it over a unix socket (SCM_RIGHTS),
so nothing ever has a name in the file system. No framing of messages here: that belongs to the transport.
"""

import array
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from prefixcache_offload.units import check_pool_size

MAX_DESCRIPTORS = 64
"""Most descriptors in one message; the kernel's own bound is 253."""


@dataclass(frozen=True, slots=True)
class PoolDescriptor:
    """What a process must know to map a pool. `tier` is "host" or "gpu".

    `writable`: the receiver may map it writable. `sealed`: its size cannot change (False only for warm restart files).
    """

    pool_id: int
    tier: str
    size_bytes: int
    slab_bytes: int
    writable: bool
    sealed: bool = True

    def __post_init__(self) -> None:
        check_pool_size(self.size_bytes, self.slab_bytes)


class HandleKind(StrEnum):
    """What the bytes of a pool are reached through."""

    MEMFD = "memfd"
    """A sealed memory file: mapped."""
    CUDA_FD = "cuda_fd"
    """A descriptor of an allocation made with cuMemCreate: imported by the driver."""
    CUDA_IPC = "cuda_ipc"
    """64 opaque bytes of legacy CUDA IPC, in `PoolExport.ipc_handle`; no descriptor for the bytes."""


@dataclass(frozen=True, slots=True)
class PoolExport:
    """All that another process needs to reach a pool of any tier.

    `fds` are the sender's and stay its own: (pool, control), or (control,) where `handle` is CUDA_IPC. What is sent
    beside the message is `fds`; everything else is plain data. `device_uuid` is "" for host memory.
    """

    descriptor: PoolDescriptor
    handle: HandleKind
    fds: tuple[int, ...] = ()
    device_uuid: str = ""
    ipc_handle: bytes = b""

    @property
    def descriptors(self) -> int:
        """How many descriptors come with it."""
        return 1 if self.handle is HandleKind.CUDA_IPC else 2


def send_descriptors(sock: socket.socket, payload: bytes, fds: Sequence[int]) -> int:
    """Send `payload` (at least one byte) with `fds` over a unix stream socket; answer how many payload bytes left.

    The descriptors go with the first byte; a short answer means the rest of the payload is still to be sent, without
    them.
    """
    if not payload:
        raise ValueError("descriptors need at least one byte of payload to travel with")
    return socket.send_fds(sock, [payload], list(fds))


def receive_descriptors(sock: socket.socket, max_bytes: int) -> tuple[bytes, list[int]]:
    """Receive up to `max_bytes` with the descriptors that came along, close-on-exec; the caller closes them.

    Raises OSError when the kernel had to drop descriptors (too many, or this process has none left); those that
    arrived are closed then.
    """
    room = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
    data, ancillary, flags, _ = sock.recvmsg(max_bytes, room, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    if flags & socket.MSG_CTRUNC:
        close_all(fds)
        raise OSError("descriptors were lost on the way: too many at once, or this process has too many open")
    return data, list(fds)


def close_all(fds: Sequence[int]) -> None:
    """Close every descriptor given."""
    for fd in fds:
        os.close(fd)
