"""A pool's file that can survive a graceful stop: named at the end of a clean drain, the name used up at attach.

    fresh start    O_TMPFILE on tmpfs: no name, so kill -9 leaves nothing
    clean drain    `save`: the pool gets a name, then the snapshot gets its name; that second link is the clean mark
    next start     `attach`: the mark is taken away (exactly one process can), checked, and only then the pool is used

A file that had a name can never be linked again once it lost it (kernel rule), so after `attach` the pool keeps its
name while it is in use; killed then, it has no mark, and the next start removes it. The file cannot be sealed, so it is
for one trust domain, and its bytes are to be verified on first use. What the snapshot says is the caller's business.
"""

import errno
import fcntl
import hashlib
import os
import stat
import struct
from dataclasses import dataclass
from enum import Enum

from prefixcache_offload import memfd
from prefixcache_offload.units import check_pool_size

FORMAT_VERSION = 1
_MAGIC = b"PFXWARM\0"
# magic, version, 0, pool bytes, slab bytes, device, inode, snapshot bytes, sha256 of the snapshot
_HEAD = struct.Struct("<8sIIQQQQQ32s")
_MODE = 0o600


class WarmRefusal(Enum):
    """Why a saved pool was not used."""

    FOREIGN = "foreign"
    BAD_VERSION = "bad_version"
    WRONG_SIZE = "wrong_size"
    CORRUPT = "corrupt"
    IN_USE = "in_use"


class WarmRefused(Exception):
    """A saved pool exists and cannot be used; start fresh. All but FOREIGN and IN_USE are removed by then."""

    def __init__(self, reason: WarmRefusal, detail: str) -> None:
        super().__init__(f"{reason.value}: {detail}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class WarmPlace:
    """Where a daemon's pool is kept: a folder on tmpfs and a name of its own in it."""

    name: str
    directory: str = "/dev/shm"

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name:
            raise ValueError(f"{self.name!r} is not a file name")

    @property
    def pool_path(self) -> str:
        """The pool's bytes."""
        return os.path.join(self.directory, f"{self.name}.pool")

    @property
    def mark_path(self) -> str:
        """The clean mark, which is the snapshot."""
        return os.path.join(self.directory, f"{self.name}.clean")


class WarmFile:
    """A pool's file: `fd` to hand to `HostPool.over` (give it `os.dup(fd)`), and `snapshot`, None when it is fresh."""

    def __init__(self, place: WarmPlace, fds: tuple[int, int], sizes: tuple[int, int], snapshot: bytes | None) -> None:
        """Use `create` or `attach`. `fds`: the file and our lock on it; `sizes`: pool and slab bytes."""
        self.place = place
        self.fd, self._lock_fd = fds
        self.snapshot = snapshot
        self._sizes = sizes
        self._named = snapshot is not None

    def save(self, snapshot: bytes) -> None:
        """Name the pool and leave the clean mark with `snapshot`; call it when nobody writes any more.

        Raises OSError, FileExistsError where somebody else's pool has the name; the pool is then as before.
        """
        pool = os.fstat(self.fd)
        digest = hashlib.sha256(snapshot).digest()
        ids = (*self._sizes, pool.st_dev, pool.st_ino, len(snapshot))
        head = _HEAD.pack(_MAGIC, FORMAT_VERSION, 0, *ids, digest)
        mark = os.open(self.place.directory, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, _MODE)
        try:
            _write_all(mark, head + snapshot)
            if not self._named:
                _link(self.fd, self.place.pool_path)
                self._named = True
            _link(mark, self.place.mark_path)
        finally:
            os.close(mark)

    def discard(self) -> None:
        """Take the pool's name away, if it has one: it will not be saved."""
        if self._named:
            os.unlink(self.place.pool_path)
            self._named = False

    def close(self) -> None:
        """Close our descriptors; a saved pool stays. Safe to call twice."""
        fds, self.fd, self._lock_fd = (self.fd, self._lock_fd), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)


def create(place: WarmPlace, size_bytes: int, slab_bytes: int) -> WarmFile:
    """A fresh pool file without a name. Raises OSError: ENOSPC when the folder has less room, ENOTSUP off tmpfs."""
    check_pool_size(size_bytes, slab_bytes)
    fd = os.open(place.directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, _MODE)
    try:
        room = os.fstatvfs(fd)
        if memfd.get_seals(fd) is memfd.Seal.NONE:
            raise OSError(errno.ENOTSUP, f"{place.directory} is not on tmpfs")
        if room.f_bavail * room.f_frsize < size_bytes:
            raise OSError(errno.ENOSPC, f"{place.directory} has no room for {size_bytes} bytes")
        os.ftruncate(fd, size_bytes)
        return WarmFile(place, (fd, _lock(fd)), (size_bytes, slab_bytes), None)
    except (OSError, WarmRefused):
        os.close(fd)
        raise


def attach(place: WarmPlace, size_bytes: int, slab_bytes: int) -> WarmFile | None:
    """Take the saved pool, using its clean mark up; None when there is none (leftovers of a killed run are removed).

    Raises WarmRefused when there is one that does not fit; then start fresh with `create`, except for FOREIGN and
    IN_USE, which need another name.
    """
    check_pool_size(size_bytes, slab_bytes)
    fd = _open_own(place.pool_path, os.O_RDWR)
    if fd < 0:
        _take_mark(place)  # a mark without its pool says nothing
        return None
    held = [fd]
    try:
        held.append(_lock(fd))  # held from here on, so that nobody else takes or removes what we look at
        if not _is_at(place.pool_path, fd):  # whoever had it before us took it away
            return None
        content = _take_mark(place)
        if content is None:
            os.unlink(place.pool_path)
            return None
        try:
            snapshot = _parse(content, fd, (size_bytes, slab_bytes))
        except WarmRefused:
            os.unlink(place.pool_path)
            raise
        fds = (held[0], held[1])
        held.clear()
        return WarmFile(place, fds, (size_bytes, slab_bytes), snapshot)
    finally:
        for each in held:
            os.close(each)


def _take_mark(place: WarmPlace) -> bytes | None:
    """The mark's content after it has lost its name: of several processes exactly one gets it."""
    fd = _open_own(place.mark_path, os.O_RDONLY)
    if fd < 0:
        return None
    with os.fdopen(fd, "rb") as file:
        try:
            os.unlink(place.mark_path)
        except FileNotFoundError:
            return None
        return file.read()


def _parse(content: bytes, pool_fd: int, sizes: tuple[int, int]) -> bytes:
    if len(content) < _HEAD.size or not content.startswith(_MAGIC):
        raise WarmRefused(WarmRefusal.CORRUPT, "the clean mark is not one of ours")
    _, version, _, pool, slab, device, inode, length, digest = _HEAD.unpack_from(content)
    if version != FORMAT_VERSION:
        raise WarmRefused(WarmRefusal.BAD_VERSION, f"format {version}, this program reads {FORMAT_VERSION}")
    actual = os.fstat(pool_fd)
    if (device, inode) != (actual.st_dev, actual.st_ino):
        raise WarmRefused(WarmRefusal.CORRUPT, "the clean mark belongs to another pool file")
    if (pool, slab) != sizes or actual.st_size != sizes[0]:
        raise WarmRefused(WarmRefusal.WRONG_SIZE, f"{pool} bytes in slabs of {slab}, wanted {sizes[0]} in {sizes[1]}")
    snapshot = content[_HEAD.size :]
    if len(snapshot) != length or hashlib.sha256(snapshot).digest() != digest:
        raise WarmRefused(WarmRefusal.CORRUPT, "the snapshot's checksum is wrong")
    return snapshot


def _open_own(path: str, flags: int) -> int:
    """Open a private regular file of this user; -1 where there is none. Raises WarmRefused (FOREIGN) otherwise."""
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return -1
    except OSError as error:
        raise WarmRefused(WarmRefusal.FOREIGN, f"{path}: {error}") from error
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        os.close(fd)
        raise WarmRefused(WarmRefusal.FOREIGN, f"{path} is not a private file of this user")
    return fd


def _is_at(path: str, fd: int) -> bool:
    try:
        named = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(fd))


def _lock(fd: int) -> int:
    # A description of its own: workers share `fd`'s, and a lock on that would live as long as they do.
    lock_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock_fd)
        raise WarmRefused(WarmRefusal.IN_USE, "another process uses this pool") from error
    return lock_fd


def _link(fd: int, path: str) -> None:
    # Naming a src_dir_fd makes Python call linkat with AT_SYMLINK_FOLLOW, the only way to name a file without a name.
    os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)


def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]
