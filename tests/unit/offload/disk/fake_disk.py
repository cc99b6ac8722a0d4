"""A file system in memory that stands in at the disk tier's seam, and fails in every way a test asks for.

The faults it makes:
- crash: the n-th changing call (counted from 0) ends the machine's willingness: it is not done, done in part (a write
  is cut at a multiple of 512 bytes, or only its later pages arrive) or done whole, and every later call raises
  `Crashed`. `after_kill` is the disk a new process finds.
- power cut: `after_power_cut` keeps of each file what was synced, and of unsynced pages a seeded choice.
- errors: the next calls of a kind raise a given errno, a number of times or until told otherwise.
- short calls: reads and writes move at most so many bytes.
- hangs: calls of a kind wait until `let_go`.
- the directory vanishes, another one lies at its place, or the file system turns read-only or full.
- direct calls are refused when opening, or only when writing.
- bytes change on disk: `files` may be written to by the test.

It does not make: calls that succeed and do nothing, reordered names without a crash.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from prefixcache_offload.disk.seam import Buffer, Space

SECTOR = 512
CHANGING = ("create", "pwrite", "allocate", "truncate", "rename", "unlink", "sync", "sync_directory")


class Crashed(BaseException):
    """The process is no more: nothing may catch this."""


@dataclass
class File:
    """One file's bytes, and what of them would survive a power cut."""

    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""


@dataclass
class Crash:
    """When to crash, and what is left of the call in which it happens: "nothing", "head", "tail" or "whole"."""

    at: int
    leaves: str = "nothing"


class FakeDisk:
    """See the top of the file."""

    def __init__(self, files: dict[str, File] | None = None, *, direct: str = "offered") -> None:
        self.files: dict[str, File] = files or {}
        self.named = set(self.files)
        self.direct = direct
        """"offered", "refused_at_open" or "refused_at_write"."""
        self.crash: Crash | None = None
        self.calls: list[str] = []
        """Changing calls so far."""
        self.counts: Counter[str] = Counter()
        self.errors: dict[str, tuple[int, int]] = {}
        """Kind of call -> (errno, how many times; -1 without end)."""
        self.most_bytes: int | None = None
        self.free_bytes = 1 << 40
        self.read_only = False
        self.inode = 1
        self.hanging: set[str] = set()
        self._gate = threading.Condition()
        self._crashed = False
        self._open: dict[int, tuple[File, bool]] = {}
        self._locks: dict[int, int] = {}
        self._next_fd = 1000

    # --- what a test does to it ------------------------------------------------------------------------------------

    def after_kill(self) -> FakeDisk:
        """What a new process finds: everything that was done, synced or not."""
        return FakeDisk({name: File(bytearray(f.data), bytes(f.data)) for name, f in self.files.items()})

    def after_power_cut(self, seed: int) -> FakeDisk:
        """What is found after the power came back."""
        chance = random.Random(seed)
        left = {}
        for name, file in self.files.items():
            if name not in self.named and chance.random() < 0.5:
                continue
            data = bytearray(file.synced)
            data.extend(bytes(max(0, len(file.data) - len(data))))
            for start in range(0, len(file.data), SECTOR):
                if chance.random() < 0.5:
                    data[start : start + SECTOR] = file.data[start : start + SECTOR]
            left[name] = File(data, bytes(data))
        return FakeDisk(left)

    def hang(self, kind: str) -> None:
        """Calls of this kind wait from now on."""
        with self._gate:
            self.hanging.add(kind)

    def let_go(self) -> None:
        """Nothing hangs any more."""
        with self._gate:
            self.hanging.clear()
            self._gate.notify_all()

    def wait_for_hanging(self, kind: str, timeout_s: float = 20.0) -> bool:
        """Until a call of this kind hangs."""
        with self._gate:
            return self._gate.wait_for(lambda: self.counts["hangs " + kind] > 0, timeout_s)

    @property
    def total_bytes(self) -> int:
        """Of all files."""
        return sum(len(f.data) for f in self.files.values())

    # --- the seam --------------------------------------------------------------------------------------------------

    def open(self, path: str, *, create: bool = False, direct: bool = False, write: bool = True) -> int:
        self._begin("open")
        if direct and self.direct == "refused_at_open":
            raise OSError(errno.EINVAL, "no direct calls")
        if create:
            if path in self.files:
                raise FileExistsError(errno.EEXIST, path)
            self._change("create")
            self.files[path] = File()
            self._done()
        elif path not in self.files:
            raise FileNotFoundError(errno.ENOENT, path)
        self._next_fd += 1
        self._open[self._next_fd] = self.files[path], direct
        return self._next_fd

    def close(self, fd: int) -> None:
        self._begin("close")
        del self._open[fd]
        for file, holder in list(self._locks.items()):
            if holder == fd:
                del self._locks[file]

    def read_ahead(self, fd: int, offset: int, size_bytes: int) -> None:
        """A hint, which nobody has to take."""

    def pread_now(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Nothing but what hangs has to be waited for."""
        return 0 if "pread" in self.hanging else self.pread(fd, buffers, offset)

    def pread(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        self._begin("pread")
        data = self._open[fd][0].data
        left = len(data) - offset if self.most_bytes is None else min(self.most_bytes, len(data) - offset)
        done = 0
        for buffer in buffers:
            size = max(min(buffer.nbytes, left - done), 0)
            buffer[:size] = data[offset + done : offset + done + size]
            done += size
        return done

    def pwrite(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        self._begin("pwrite")
        file, direct = self._open[fd]
        if direct and self.direct == "refused_at_write":
            raise OSError(errno.EINVAL, "no direct calls")
        raw = b"".join(bytes(b) for b in buffers)[: self.most_bytes]
        leaves = self._change("pwrite")
        if leaves == "head":
            self._put(file, raw[: len(raw) // 2 // SECTOR * SECTOR], offset)
        elif leaves == "tail":
            skipped = -(-len(raw) // 2 // SECTOR) * SECTOR
            self._put(file, raw[skipped:], offset + skipped)
        elif leaves == "whole":
            self._put(file, raw, offset)
        self._done()
        return len(raw)

    def allocate(self, fd: int, size_bytes: int) -> None:
        self._begin("allocate")
        if self.total_bytes + size_bytes > self.free_bytes:
            raise OSError(errno.ENOSPC, "full")
        self._resize(fd, size_bytes, "allocate")

    def truncate(self, fd: int, size_bytes: int) -> None:
        self._begin("truncate")
        self._resize(fd, size_bytes, "truncate")

    def sync(self, fd: int) -> None:
        self._begin("sync")
        file = self._open[fd][0]
        if self._change("sync") == "whole":
            file.synced = bytes(file.data)
        self._done()

    def sync_directory(self, path: str) -> None:
        self._begin("sync_directory")
        if self._change("sync_directory") == "whole":
            self.named = set(self.files)
        self._done()

    def size(self, fd: int) -> int:
        self._begin("size")
        return len(self._open[fd][0].data)

    def rename(self, source: str, target: str) -> None:
        self._begin("rename")
        if self._change("rename") == "whole":
            self.files[target] = self.files.pop(source)
        self._done()

    def unlink(self, path: str) -> None:
        self._begin("unlink")
        if path not in self.files:
            raise FileNotFoundError(errno.ENOENT, path)
        if self._change("unlink") == "whole":
            del self.files[path]
        self._done()

    def make_directory(self, path: str) -> None:
        self._begin("make_directory")

    def names(self, path: str) -> list[str]:
        self._begin("names")
        return [os.path.basename(name) for name in self.files if os.path.dirname(name) == path]

    def identity(self, path: str) -> tuple[int, int]:
        self._begin("identity")
        return 1, self.inode

    def space(self, path: str) -> Space:
        self._begin("space")
        return Space(max(self.free_bytes - self.total_bytes, 0), self.read_only)

    def lock(self, fd: int) -> bool:
        self._begin("lock")
        file = id(self._open[fd][0])
        if file in self._locks:
            return False
        self._locks[file] = fd
        return True

    # --- faults ----------------------------------------------------------------------------------------------------

    def _begin(self, kind: str) -> None:
        if self._crashed:
            raise Crashed
        with self._gate:
            if kind in self.hanging:
                self.counts["hangs " + kind] += 1
                self._gate.notify_all()
                self._gate.wait_for(lambda: kind not in self.hanging)
        self.counts[kind] += 1
        code, times = self.errors.get(kind, (0, 0))
        if times:
            self.errors[kind] = code, times - 1
            raise OSError(code, os.strerror(code))
        if self.read_only and kind in CHANGING:
            raise OSError(errno.EROFS, "read-only")

    def _change(self, kind: str) -> str:
        """Count a changing call; answer what of it is to be done."""
        self.calls.append(kind)
        if self.crash is None or len(self.calls) - 1 != self.crash.at:
            return "whole"
        self._crashed = True
        if kind == "create" and self.crash.leaves != "whole":
            raise Crashed
        return self.crash.leaves

    def _done(self) -> None:
        if self._crashed:
            raise Crashed

    def _resize(self, fd: int, size_bytes: int, kind: str) -> None:
        data = self._open[fd][0].data
        if self._change(kind) == "whole":
            del data[size_bytes:]
            data.extend(bytes(size_bytes - len(data)))
        self._done()

    @staticmethod
    def _put(file: File, raw: bytes, offset: int) -> None:
        if len(file.data) < offset:
            file.data.extend(bytes(offset - len(file.data)))
        file.data[offset : offset + len(raw)] = raw
