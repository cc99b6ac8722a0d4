"""Digests of files that have not changed, remembered in one small file of the user's cache folder.

Rules:
1. A stamp is device, inode, mtime and size of every file. A file changed so recently that another change could leave
   the same mtime is not remembered.
2. The file is replaced as a whole and never trusted: what cannot be read counts as empty, what cannot be written is
   skipped. Losing it costs a second of reading, nothing else.

What belongs here: remembering. It must not know what the digest is of.
"""

import json
import os
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

SCHEMA: Final = 1
DIGEST_BYTES: Final = 32
MAX_ENTRIES: Final = 256
MAX_FILE_BYTES: Final = 1 << 20
# Coarser than any clock a file system stamps with (ext4 4 ms, NFS and FAT up to 2 s).
SETTLE_NS: Final = 2_500_000_000

Stamp = tuple[tuple[int, int, int, int], ...]  # (device, inode, mtime in ns, size in bytes) of each file, sorted


def file_stamp(files: Iterable[Path]) -> Stamp:
    """What tells unchanged files from changed ones. Raises OSError for a file that is not there."""
    stats = [file.stat() for file in files]
    return tuple(sorted((stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in stats))


def default_path() -> Path | None:
    """`$XDG_CACHE_HOME/prefixcache/weights.json`, else under `~/.cache`; None for a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME") or ""
    try:
        root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    except RuntimeError:
        return None
    return root / "prefixcache" / "weights.json"


class DigestCache:
    """At most 256 digests by stamp, the oldest dropped first. Safe for many processes: the last writer wins."""

    def __init__(self, path: Path | None = None) -> None:
        """`path`: the file; None for the user's own."""
        self.path: Path | None = default_path() if path is None else path

    def get(self, stamp: Stamp) -> bytes | None:
        """The digest remembered for these files, or None."""
        return self._entries().get(_name(stamp))

    def put(self, stamp: Stamp, digest: bytes) -> None:
        """Remember a digest, unless the files are too new or the folder cannot be written."""
        if self.path is None or any(time.time_ns() - mtime < SETTLE_NS for _, _, mtime, _ in stamp):
            return
        entries = self._entries()
        entries.pop(_name(stamp), None)
        entries[_name(stamp)] = digest
        newest = dict(list(entries.items())[-MAX_ENTRIES:])
        with suppress(OSError):
            _replace(self.path, {name: value.hex() for name, value in newest.items()})

    def _entries(self) -> dict[str, bytes]:
        if self.path is None:
            return {}
        try:
            with self.path.open("rb") as file:
                content = json.loads(file.read(MAX_FILE_BYTES))
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(content, dict) or content.get("schema") != SCHEMA:
            return {}
        entries = content.get("digests")
        return _valid(entries) if isinstance(entries, dict) else {}


def _replace(path: Path, digests: dict[str, str]) -> None:
    """Write the file whole, beside its place, then move it there. Raises OSError and leaves nothing behind."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".weights-")
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump({"schema": SCHEMA, "digests": digests}, file)
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _valid(entries: dict[str, object]) -> dict[str, bytes]:
    result = {}
    for name, value in entries.items():
        with suppress(ValueError):
            digest = bytes.fromhex(value) if isinstance(value, str) else b""
            if len(digest) == DIGEST_BYTES:
                result[name] = digest
    return result


def _name(stamp: Stamp) -> str:
    return ",".join(":".join(map(str, file)) for file in stamp)
