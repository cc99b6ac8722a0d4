"""`namespaces.log`: the full spec of every namespace that has records, so that a restart knows what its bytes are.

A spec is opaque bytes under a 32-byte fingerprint. Records name a namespace by 8 bytes of the fingerprint, so a lost
entry can lose blocks but never give one namespace's blocks to another. Entries are checksummed and begin at multiples
of 512; a damaged one is skipped and counted. The file is synced before `register` answers.
"""

import struct
from collections.abc import Iterable

from prefixcache_offload.disk.directory import NAMESPACES, Directory, replace_file
from prefixcache_offload.disk.records import DIGEST_BYTES, digest
from prefixcache_offload.disk.seam import read_fully, write_fully

_GRID = 512
_HEAD = struct.Struct("<8sI32s")
_MAGIC = b"PfxName\n"
FINGERPRINT_BYTES = 32


class NamespaceRefused(Exception):
    """A namespace cannot be kept on disk: another has its short name, or the file has reached its bound."""


def short_name(fingerprint: bytes) -> int:
    """The u64 that records carry; never 0, which means "all" in a tombstone."""
    return int.from_bytes(fingerprint[:8], "little") or 1


class NamespaceBook:
    """What `namespaces.log` holds. Not thread-safe; the caller serialises."""

    def __init__(self, directory: Directory, cap_bytes: int) -> None:
        """Read it. Raises OSError."""
        self._directory = directory
        self._cap_bytes = cap_bytes
        self._end = 0
        self.damaged = 0
        self.specs: dict[int, tuple[bytes, bytes]] = {}
        """Short name -> (fingerprint, spec)."""
        self._read()

    @property
    def size_bytes(self) -> int:
        """Bytes of the file."""
        return self._end

    def register(self, fingerprint: bytes, spec: bytes) -> int:
        """Keep a spec, answer its short name; nothing is written if it is known. Raises NamespaceRefused, OSError."""
        if len(fingerprint) != FINGERPRINT_BYTES:
            raise ValueError(f"a fingerprint has {FINGERPRINT_BYTES} bytes, not {len(fingerprint)}")
        name = short_name(fingerprint)
        known = self.specs.get(name)
        if known is not None and known[0] != fingerprint:
            raise NamespaceRefused(f"two namespaces share the short name {name:016x}")
        if known is not None and known[1] == spec:
            return name
        entry = _pack(fingerprint, spec)
        if self._end + len(entry) > self._cap_bytes:
            raise NamespaceRefused(f"{NAMESPACES} has reached its bound of {self._cap_bytes} bytes: forget some first")
        self._append(entry)
        self.specs[name] = (fingerprint, spec)
        return name

    def forget_others(self, kept: Iterable[int]) -> int:
        """Rewrite the file with the named ones only; answer how many went. Raises OSError (then nothing changed)."""
        kept = set(kept)
        specs = {name: spec for name, spec in self.specs.items() if name in kept}
        content = b"".join(_pack(*spec) for spec in specs.values())
        self._directory.require()
        replace_file(self._directory.disk, self._directory.path, NAMESPACES, content)
        gone = len(self.specs) - len(specs)
        self.specs, self._end = specs, len(content)
        return gone

    def _append(self, entry: bytes) -> None:
        disk, path = self._directory.disk, self._directory.file(NAMESPACES)
        self._directory.require()
        try:
            fd, fresh = disk.open(path, create=True), True
        except FileExistsError:
            fd, fresh = disk.open(path), False
        try:
            write_fully(disk, fd, [memoryview(entry)], self._end)
            disk.sync(fd)
        finally:
            disk.close(fd)
        if fresh:
            disk.sync_directory(self._directory.path)
        self._end += len(entry)

    def _read(self) -> None:
        disk = self._directory.disk
        if NAMESPACES not in disk.names(self._directory.path):
            return
        fd = disk.open(self._directory.file(NAMESPACES), write=False)
        try:
            raw = memoryview(bytearray(disk.size(fd)))
            raw = raw[: read_fully(disk, fd, [raw], 0)]
        finally:
            disk.close(fd)
        at = 0
        while at < len(raw):
            at += self._read_entry(raw[at:])
        self._end = -(-len(raw) // _GRID) * _GRID

    def _read_entry(self, raw: memoryview) -> int:
        """Take the entry at the start of `raw`; answer how far the next one is."""
        parsed = _unpack(raw)
        if parsed is None:
            self.damaged += 1
            return _GRID
        fingerprint, spec, size = parsed
        self.specs[short_name(fingerprint)] = (fingerprint, spec)
        return size


def _pack(fingerprint: bytes, spec: bytes) -> bytes:
    body = _HEAD.pack(_MAGIC, len(spec), fingerprint) + spec
    body += digest(body)
    return body + bytes(-len(body) % _GRID)


def _unpack(raw: memoryview) -> tuple[bytes, bytes, int] | None:
    if len(raw) < _HEAD.size:
        return None
    magic, length, fingerprint = _HEAD.unpack(raw[: _HEAD.size])
    end = _HEAD.size + length
    if magic != _MAGIC or end + DIGEST_BYTES > len(raw) or digest(raw[:end]) != raw[end : end + DIGEST_BYTES]:
        return None
    return fingerprint, bytes(raw[_HEAD.size : end]), -(-(end + DIGEST_BYTES) // _GRID) * _GRID
