"""One data directory: whose it is, which format, who has it open, and what its files are called.

A directory belongs to one daemon at a time (`flock` on `lock`). `format` holds the version, the nonce that marks this
directory's records, and the epoch: one more at every opening, the high bits of every sequence number, so that no two
runs draw the same one without reading the log first. What is in the segments is not known here.
"""

import errno
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from prefixcache_offload.disk.outcomes import DiskRefused, Refusal
from prefixcache_offload.disk.records import NONCE_BYTES, PAGE, VERSION, digest
from prefixcache_offload.disk.seam import Disk, read_fully, scratch, write_fully

MAGIC: Final = "prefixcache-disk"
FORMAT, LOCK, PROBE, NAMESPACES = "format", "lock", "probe", "namespaces.log"
SEGMENT_PREFIX: Final = "segment-"
_NEW: Final = ".new"
_OURS_ALONE: Final = {LOCK, PROBE, FORMAT + _NEW, NAMESPACES + _NEW, "lost+found"}
"""What may lie in a directory that has no format file and is still ours: an opening that was cut short."""
EPOCH_SHIFT: Final = 40


def segment_name(number: int) -> str:
    """File name of a segment."""
    return f"{SEGMENT_PREFIX}{number:08x}"


class Whereabouts(Enum):
    """What a path leads to that led to a data directory."""

    HERE = "here"
    GONE = "gone"
    REPLACED = "replaced"
    """Another directory, or this one without its files."""


@dataclass
class Directory:
    """An opened and locked data directory."""

    disk: Disk
    path: str
    nonce: bytes
    epoch: int
    direct: bool
    lock_fd: int
    identity: tuple[int, int]

    def file(self, name: str) -> str:
        """Path of a file in it."""
        return os.path.join(self.path, name)

    def segments(self) -> list[int]:
        """Numbers of the segment files, ascending. Raises OSError."""
        found = [n[len(SEGMENT_PREFIX) :] for n in self.disk.names(self.path) if n.startswith(SEGMENT_PREFIX)]
        return sorted(int(n, 16) for n in found if len(n) == 8 and set(n) <= set("0123456789abcdef"))

    def open_segment(self, number: int, *, create: bool = False) -> int:
        """Descriptor of a segment file. Raises OSError."""
        if create:
            self.require()
        return self.disk.open(self.file(segment_name(number)), create=create, direct=self.direct)

    def open_cached(self, number: int) -> int:
        """Descriptor of a segment file for reads through the page cache, which can be asked for ahead. Raises
        OSError."""
        return self.disk.open(self.file(segment_name(number)), write=False)

    def whereabouts(self) -> "Whereabouts":
        """Whether the path still leads to this directory and its format file, or to something else."""
        try:
            same = self.disk.identity(self.path) == self.identity and FORMAT in self.disk.names(self.path)
        except OSError:
            return Whereabouts.GONE
        return Whereabouts.HERE if same else Whereabouts.REPLACED

    def still_there(self) -> bool:
        """See `whereabouts`."""
        return self.whereabouts() is Whereabouts.HERE

    def require(self) -> None:
        """Before a file is made by its path: what lies there now may be somebody else's, or would be taken for it.
        Raises OSError where the path does not lead to this directory any more."""
        if not self.still_there():
            raise FileNotFoundError(errno.ENOENT, "another directory is in the place of this one, or none", self.path)

    def probe(self) -> None:
        """Write a page, read it back, remove it. Raises OSError where that does not work."""
        self.require()
        probe_direct(self.disk, self.path, direct=self.direct)

    @contextmanager
    def nameless_file(self) -> Iterator[int]:
        """A descriptor of a file that nobody can find and that is gone with the block. Raises OSError."""
        self.require()
        name = self.file(PROBE + "-rate")
        fd = self.disk.open(name, create=True, direct=self.direct)
        try:
            self.disk.unlink(name)
            yield fd
        finally:
            self.disk.close(fd)

    def close(self) -> None:
        """Let another daemon have it."""
        self.disk.close(self.lock_fd)


def open_directory(disk: Disk, path: str) -> Directory:
    """Lock and check a data directory, or make a new one. Raises DiskRefused with the reason."""
    try:
        disk.make_directory(path)
        _check_ours(path, disk.names(path))
        lock_fd = _lock(disk, path)
    except OSError as error:
        raise DiskRefused(Refusal.UNUSABLE, f"cannot use {path}: {error}") from error
    try:
        nonce, epoch = _read_format(disk, path)
        replace_file(disk, path, FORMAT, _format_bytes(nonce, epoch + 1))
        direct = _offers_direct(disk, path)
        return Directory(disk, path, nonce, epoch + 1, direct, lock_fd, disk.identity(path))
    except OSError as error:
        disk.close(lock_fd)
        raise DiskRefused(Refusal.UNUSABLE, f"cannot use {path}: {error}") from error
    except DiskRefused:
        disk.close(lock_fd)
        raise


def _check_ours(path: str, names: list[str]) -> None:
    strange = sorted(set(names) - _OURS_ALONE)
    if strange and FORMAT not in names:
        raise DiskRefused(
            Refusal.FOREIGN,
            f"{path} is not a prefixcache data directory: it has no {FORMAT} file but holds {strange[0]!r}; "
            "give an empty directory",
        )


def _lock(disk: Disk, path: str) -> int:
    name = os.path.join(path, LOCK)
    try:
        fd = disk.open(name, create=True)
    except FileExistsError:
        fd = disk.open(name)
    if not disk.lock(fd):
        disk.close(fd)
        raise DiskRefused(Refusal.IN_USE, f"another daemon uses {path}")
    return fd


def _format_bytes(nonce: bytes, epoch: int) -> bytes:
    told: dict[str, Any] = {"magic": MAGIC, "format": VERSION, "nonce": nonce.hex(), "epoch": epoch}
    told["check"] = _check(told)
    return json.dumps(told).encode() + b"\n"


def _check(told: dict[str, Any]) -> str:
    return digest(json.dumps([told[name] for name in ("magic", "format", "nonce", "epoch")]).encode()).hex()


def _read_format(disk: Disk, path: str) -> tuple[bytes, int]:
    """(nonce, epoch) of the directory; new ones if it has none yet."""
    if FORMAT not in disk.names(path):
        return secrets.token_bytes(NONCE_BYTES), 0
    fd = disk.open(os.path.join(path, FORMAT), write=False)
    try:
        raw = memoryview(bytearray(PAGE))
        size = read_fully(disk, fd, [raw], 0)
    finally:
        disk.close(fd)
    return _parse_format(path, bytes(raw[:size]))


def _parse_format(path: str, raw: bytes) -> tuple[bytes, int]:
    try:
        told = json.loads(raw)
        if told["magic"] != MAGIC:
            raise DiskRefused(Refusal.FOREIGN, f"{path} is not a prefixcache data directory: {FORMAT} is another's")
        version = int(told["format"])
        if version != VERSION:
            newer = version > VERSION
            raise DiskRefused(
                Refusal.NEWER_FORMAT if newer else Refusal.OTHER_FORMAT,
                f"{path} has format {version}, this program writes {VERSION}: "
                + ("use a newer program or another directory" if newer else "give another directory or remove it"),
            )
        nonce, epoch = bytes.fromhex(told["nonce"]), int(told["epoch"])
        if told["check"] != _check(told) or len(nonce) != NONCE_BYTES:
            raise ValueError("its checksum is wrong")
    except (ValueError, KeyError, TypeError) as error:
        raise DiskRefused(Refusal.DAMAGED_FORMAT, f"{path}/{FORMAT} is damaged: {error}; remove {path}") from error
    return nonce, epoch


def replace_file(disk: Disk, path: str, name: str, content: bytes) -> None:
    """Make a small file hold exactly `content`, or leave it as it was. Raises OSError."""
    fresh = os.path.join(path, name + _NEW)
    if name + _NEW in disk.names(path):
        disk.unlink(fresh)
    fd = disk.open(fresh, create=True)
    try:
        write_fully(disk, fd, [memoryview(content)], 0)
        disk.sync(fd)
    finally:
        disk.close(fd)
    disk.rename(fresh, os.path.join(path, name))
    disk.sync_directory(path)


def _offers_direct(disk: Disk, path: str) -> bool:
    """Whether direct calls work here (ramfs refuses them at open, others only at the first write)."""
    try:
        probe_direct(disk, path, direct=True)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return False
    return True


def probe_direct(disk: Disk, path: str, *, direct: bool) -> None:
    """Write one page, read it back and remove it. Raises OSError where any of it fails."""
    name = os.path.join(path, PROBE)
    if PROBE in disk.names(path):
        disk.unlink(name)
    fd = disk.open(name, create=True, direct=direct)
    try:
        page, back = scratch(PAGE), scratch(PAGE)
        page[:NONCE_BYTES] = secrets.token_bytes(NONCE_BYTES)
        write_fully(disk, fd, [page], 0)
        disk.sync(fd)
        if read_fully(disk, fd, [back], 0) != PAGE or back != page:
            raise OSError(errno.EIO, "a page just written reads back otherwise")
    finally:
        disk.close(fd)
        disk.unlink(name)
