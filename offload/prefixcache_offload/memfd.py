"""Sealed anonymous files: how they are made, and how a received one is judged before it is mapped.

A mapping of a file that somebody truncates is SIGBUS for everybody who reads it. So every file made here can no longer
shrink or grow, and `verify` refuses one that still can. Nothing here maps memory or knows what the bytes are.
"""

import errno
import fcntl
import os
from enum import IntFlag

# Absent from the standard library up to 3.12; the values are the kernel's ABI.
_MFD_NOEXEC_SEAL = 0x8
_PRIVATE_MODE = 0o600


class Seal(IntFlag):
    """What can no longer be done to a memfd (F_SEAL_* of the kernel)."""

    NONE = 0
    SEAL = 0x1
    SHRINK = 0x2
    GROW = 0x4
    WRITE = 0x8
    FUTURE_WRITE = 0x10


FIXED_SIZE = Seal.SHRINK | Seal.GROW


class BadDescriptor(Exception):
    """A received descriptor is not what its sender said; it has not been mapped."""


def create(name: str, size_bytes: int) -> int:
    """Make a memfd of exactly `size_bytes`, mode 0600, sealed against shrinking and growing; answer its descriptor.

    `name` is only shown in /proc. Further seals may follow (`add_seals`). Pages cost memory when first touched.
    Raises OSError (ENOMEM, EMFILE) when the kernel refuses.
    """
    fd = _memfd(name)
    try:
        os.fchmod(fd, _PRIVATE_MODE)
        os.ftruncate(fd, size_bytes)
        add_seals(fd, FIXED_SIZE)
    except OSError:
        os.close(fd)
        raise
    return fd


def _memfd(name: str) -> int:
    base = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, base | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: a kernel before 6.3 does not know the flag
            raise
        return os.memfd_create(name, base)


def add_seals(fd: int, seals: Seal) -> None:
    """Add `seals` for ever. Raises PermissionError when the file is sealed against sealing."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, int(seals))


def get_seals(fd: int) -> Seal:
    """The seals of `fd`; Seal.NONE for a file that cannot carry any (not in memory)."""
    try:
        return Seal(fcntl.fcntl(fd, fcntl.F_GET_SEALS))
    except OSError as error:
        if error.errno == errno.EINVAL:
            return Seal.NONE
        raise


def verify(fd: int, size_bytes: int, *, sealed: bool) -> None:
    """Raise BadDescriptor unless mapping `fd` for `size_bytes` is safe.

    With `sealed` the file must be unable to shrink. Without it (warm restart files, one trust domain) only the size at
    this moment is checked, so the caller trusts its peer not to truncate.
    """
    try:
        actual = os.fstat(fd).st_size
        seals = get_seals(fd)
    except OSError as error:
        raise BadDescriptor(f"descriptor {fd} cannot be examined: {error}") from error
    if actual != size_bytes:
        raise BadDescriptor(f"the shared file has {actual} bytes, announced were {size_bytes}")
    if sealed and FIXED_SIZE not in seals:
        raise BadDescriptor(f"the shared file is not sealed against resizing (seals {seals!r})")
