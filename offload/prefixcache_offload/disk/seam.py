"""Every call of the disk tier that touches a file system, as one small protocol, so that a test can stand in for it.

The protocol is what the tier is allowed to ask; `RealDisk` asks the kernel. No retries, no meaning, no state but the
memory that calls use again.
All calls raise OSError as the kernel does. Writes may be short, as the kernel's may.
"""

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

Buffer = memoryview


class Space(NamedTuple):
    """What a file system says about itself."""

    free_bytes: int
    read_only: bool


class Disk(Protocol):
    """The file system as the tier sees it."""

    def open(self, path: str, *, create: bool = False, direct: bool = False, write: bool = True) -> int:
        """A descriptor; create: the file must not exist yet (mode 0600). EINVAL where direct is not offered."""
        ...

    def close(self, fd: int) -> None:
        """Give the descriptor back."""
        ...

    def pread(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Fill the buffers in turn; answer the bytes, fewer at the end of the file."""
        ...

    def read_ahead(self, fd: int, offset: int, size_bytes: int) -> None:
        """Begin to fetch what will be read soon through the page cache. Waits for nothing, promises nothing, and never
        fails."""
        ...

    def pread_now(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """As pread of what the page cache holds; 0 where that would wait, or where nobody can tell."""
        ...

    def pwrite(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Write the buffers in turn; answer the bytes written."""
        ...

    def allocate(self, fd: int, size_bytes: int) -> None:
        """Make the file this long with room behind it, if the file system can promise room; else only this long."""
        ...

    def truncate(self, fd: int, size_bytes: int) -> None:
        """Make the file this long."""
        ...

    def sync(self, fd: int) -> None:
        """Wait until the file's bytes and size would survive a power cut."""
        ...

    def sync_directory(self, path: str) -> None:
        """Wait until the names in a directory would survive a power cut."""
        ...

    def size(self, fd: int) -> int:
        """Bytes of an open file."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Replace target atomically."""
        ...

    def unlink(self, path: str) -> None:
        """Remove a name."""
        ...

    def make_directory(self, path: str) -> None:
        """Make it and what is above it, mode 0700; no error where it is."""
        ...

    def names(self, path: str) -> list[str]:
        """What is in a directory."""
        ...

    def identity(self, path: str) -> tuple[int, int]:
        """(device, inode) of a path, to notice that something else lies there now."""
        ...

    def space(self, path: str) -> Space:
        """Free bytes, and whether it can be written at all."""
        ...

    def lock(self, fd: int) -> bool:
        """Take the file's lock for as long as the descriptor lives; False if another has it."""
        ...


class RealDisk:
    """The kernel's own calls."""

    def open(self, path: str, *, create: bool = False, direct: bool = False, write: bool = True) -> int:
        flags = os.O_CLOEXEC | (os.O_RDWR if write else os.O_RDONLY)
        flags |= os.O_CREAT | os.O_EXCL if create else 0
        return os.open(path, flags | (os.O_DIRECT if direct else 0), 0o600)

    def close(self, fd: int) -> None:
        os.close(fd)

    def pread(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def read_ahead(self, fd: int, offset: int, size_bytes: int) -> None:
        with suppress(OSError):  # a sandbox may not know such calls
            os.posix_fadvise(fd, offset, size_bytes, os.POSIX_FADV_WILLNEED)

    def pread_now(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        try:
            return os.preadv(fd, buffers, offset, _NOWAIT) if _NOWAIT else 0
        except RuntimeError:  # "not implemented": a C library that is older than the call
            return 0
        except OSError as error:
            if error.errno in _CANNOT_TELL:
                return 0
            raise

    def pwrite(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def allocate(self, fd: int, size_bytes: int) -> None:
        # Not os.posix_fallocate: where the file system has no such call, libc writes into every block instead.
        while _libc.fallocate(fd, 0, 0, size_bytes):
            code = ctypes.get_errno()
            if code != errno.EINTR:
                break
        else:
            return
        if code not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise OSError(code, os.strerror(code))
        os.ftruncate(fd, size_bytes)

    def truncate(self, fd: int, size_bytes: int) -> None:
        os.ftruncate(fd, size_bytes)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def sync_directory(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def make_directory(self, path: str) -> None:
        os.makedirs(path, 0o700, exist_ok=True)

    def names(self, path: str) -> list[str]:
        return os.listdir(path)

    def identity(self, path: str) -> tuple[int, int]:
        found = os.stat(path)
        return found.st_dev, found.st_ino

    def space(self, path: str) -> Space:
        found = os.statvfs(path)
        return Space(found.f_bavail * found.f_frsize, bool(found.f_flag & os.ST_RDONLY))

    def lock(self, fd: int) -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def scratch(size_bytes: int) -> memoryview:
    """Zeroed memory that direct calls accept: it begins on a page."""
    return memoryview(mmap.mmap(-1, size_bytes))


class Scratches:
    """Scratch memory of one size that is used again: what a call does not fill stays as it was left, zeros at first.
    Whoever takes and gives back holds a lock of his own."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._idle: list[memoryview] = []

    def take(self) -> memoryview:
        """One that nobody has."""
        return self._idle.pop() if self._idle else scratch(self._size_bytes)

    def give_back(self, memory: memoryview) -> None:
        """It is not in the kernel any more."""
        self._idle.append(memory)


def read_fully(disk: Disk, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
    """As pread, but only the end of the file makes it short."""
    wanted, done = sum(b.nbytes for b in buffers), 0
    while done < wanted:
        got = disk.pread(fd, after(buffers, done), offset + done)
        if got <= 0:
            break
        done += got
    return done


def write_fully(disk: Disk, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
    """As pwrite, until everything is written or a call fails."""
    wanted, done = sum(b.nbytes for b in buffers), 0
    while done < wanted:
        got = disk.pwrite(fd, after(buffers, done), offset + done)
        if got <= 0:
            raise OSError(errno.EIO, "a write wrote nothing")
        done += got


def after(buffers: Sequence[Buffer], done: int) -> Sequence[Buffer]:
    """What is left of the buffers after `done` bytes of them."""
    if done == 0:
        return buffers
    rest: list[Buffer] = []
    for buffer in buffers:
        if done < buffer.nbytes:
            rest.append(buffer[done:])
            done = 0
        else:
            done -= buffer.nbytes
    return rest


_NOWAIT: int = getattr(os, "RWF_NOWAIT", 0)
_CANNOT_TELL = (errno.EAGAIN, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
