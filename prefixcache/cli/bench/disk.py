"""`bench disk`: the disk tier's own reads and writes of 2 MiB blocks, beside what the file system gives
a plain program.

The limit is `fio` (psync, direct, 2 MiB) where it is installed, else a loop of preadv/pwritev on threads, at the best
of 1, 2 and 4 jobs. Both go to the same directory; rounds are interleaved and each figure is the median of its rounds.
Files are new for every written round, on both sides. Our side includes headers, footers, syncs, the callback
of each record and the checksums of what is read; what is written comes with its checksum, as the daemon knows it since
the commit; what a daemon adds above that is `demotion`'s. GB are 10^9 bytes.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from prefixcache.cli.bench import demotion
from prefixcache.cli.bench.plan import Plan, Progress
from prefixcache.cli.errors import CliError
from prefixcache_offload.disk import ENTRY, DiskOptions, DiskRefused, Entries, Outcome
from prefixcache_offload.disk.records import digest
from prefixcache_offload.disk.shared import Ended
from prefixcache_offload.disk.tier import DiskTier

JOBS: Final = (1, 2, 4)
TIMEOUT_S: Final = 300.0
FILE: Final = "limit"

Bytes = npt.NDArray[np.uint8]
Rate = Callable[[str, int], float]
"""(`read` or `write`, jobs) -> bytes per second."""


def run(plan: Plan, progress: Progress, where: Path | None = None) -> dict[str, Any]:
    """`disk` of the result. where: a directory of the file system to measure, by default the current one."""
    blocks = plan.disk_blocks
    samples: dict[str, list[float]] = {}
    with folder_on(where, 3 * blocks * plan.block_bytes) as folder:
        name, limit = _limit(folder, blocks, plan.block_bytes)
        ours = _Ours(folder / "tier", blocks, plan.block_bytes)
        for number in range(plan.disk_rounds):
            progress(f"disk: round {number + 1} of {plan.disk_rounds}")
            _round(number, limit, ours, samples)
        with_daemon = demotion.run(plan, progress, folder)
    rates = {key: statistics.median(values) / 1e9 for key, values in samples.items()}
    return {
        "disk": {
            "read_gb_per_s": rates["read"],
            "write_gb_per_s": rates["write"],
            "limit_read_gb_per_s": max(rates[f"read {jobs}"] for jobs in JOBS),
            "limit_write_gb_per_s": max(rates[f"write {jobs}"] for jobs in JOBS),
            "limit": name,
            **with_daemon,
        }
    }


def _round(number: int, limit: Rate, ours: _Ours, samples: dict[str, list[float]]) -> None:
    """Every case once, in an order of its own each round. Each reads what it has just written, because a disk behind a
    hypervisor reads back sooner what was written last."""
    cases: list[tuple[str, Callable[[str], float]]] = [
        ("", lambda what: ours.write() if what == "write" else ours.read())
    ]
    cases += [(f" {jobs}", partial(_swapped, limit, jobs)) for jobs in JOBS]
    random.Random(number).shuffle(cases)
    for name, measure in cases:
        for what in ("write", "read"):
            samples.setdefault(what + name, []).append(measure(what))
    ours.clean()


def _swapped(limit: Rate, jobs: int, what: str) -> float:
    return limit(what, jobs)


@contextmanager
def folder_on(where: Path | None, size_bytes: int) -> Iterator[Path]:
    """A folder on the file system to measure, gone afterwards."""
    base = where or Path.cwd()
    free = shutil.disk_usage(base).free
    if free < 2 * size_bytes:
        raise CliError(
            f"{base} has {free >> 20} MiB free, the disk benchmark wants {2 * size_bytes >> 20}",
            "run it in a directory of another disk",
            reason="no_space",
        )
    folder = Path(tempfile.mkdtemp(prefix="prefixcache-bench-", dir=base))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Ours:
    """The tier, written to and read from as the daemon does it: one job per prefix of all blocks."""

    def __init__(self, folder: Path, blocks: int, block_bytes: int) -> None:
        self._folder, self._blocks, self._block_bytes = folder, blocks, block_bytes
        self._memory = _touched(blocks * block_bytes)
        self._at = np.arange(blocks, dtype=np.int64) * block_bytes
        digests = [digest(self._memory[start : start + block_bytes]) for start in self._at.tolist()]
        self._digests = np.frombuffer(b"".join(digests), np.uint8).reshape(blocks, -1)
        self._found: Entries = np.zeros(0, ENTRY)
        self._tier: DiskTier | None = None
        self._written = 0

    def _opened(self) -> DiskTier:
        """A new directory, so that a written round goes to new files as the limit's does."""
        if self._tier is None:
            size = 2 * self._blocks * self._block_bytes + (1 << 30)
            options = DiskOptions(cap_bytes=size, queue_bytes=size)
            try:
                self._tier = DiskTier(str(self._folder), options)
            except DiskRefused as refused:
                raise CliError(str(refused), reason=str(refused.reason)) from refused
        return self._tier

    def write(self) -> float:
        """Append every block; bytes per second until the last end was told."""
        tier, entries = self._opened(), np.zeros(self._blocks, ENTRY)
        entries["namespace"], entries["length"] = 1, self._block_bytes
        numbers = np.arange(self._blocks, dtype=np.uint64) + np.uint64(1)
        entries["key"][:, :8] = numbers.view(np.uint8).reshape(-1, 8)
        waits = _Waits(self._blocks)
        start = time.perf_counter()
        tier.write(1, self._memory, self._at, entries, waits.done, self._digests)
        rate = waits.rate(start, self._memory.size)
        self._found = waits.entries
        return rate

    def read(self) -> float:
        """Read every block back; bytes per second until the last was verified."""
        waits = _Waits(self._blocks)
        start = time.perf_counter()
        self._opened().read(2, self._memory, self._at, self._found, waits.done)
        return waits.rate(start, self._memory.size)

    def clean(self) -> None:
        """Leave nothing of this round."""
        if self._tier is not None:
            self._tier.close()
            self._tier = None
        shutil.rmtree(self._folder, ignore_errors=True)


class _Waits:
    """For the end of a job."""

    def __init__(self, count: int) -> None:
        self.entries: Entries = np.zeros(count, ENTRY)
        self._failed: list[int] = []
        self._finished = threading.Event()

    def done(self, ended: Ended) -> None:
        """Some records have ended."""
        self.entries[ended.which] = ended.entries
        self._failed += [int(o) for o in ended.outcomes if o != Outcome.OK]
        if ended.left == 0:
            self._finished.set()

    def rate(self, start: float, size_bytes: int) -> float:
        """Bytes per second once all have ended. Raises CliError unless all ended well."""
        if not self._finished.wait(TIMEOUT_S):
            raise CliError(f"the disk took more than {TIMEOUT_S:.0f} s", reason="disk_hangs")
        elapsed = time.perf_counter() - start
        if self._failed:
            raise CliError(f"the disk failed: {Outcome(self._failed[0]).name.lower()}", reason="disk_failed")
        return size_bytes / elapsed


def _limit(folder: Path, blocks: int, block_bytes: int) -> tuple[str, Rate]:
    if shutil.which("fio") is not None:
        return "fio", _Fio(folder / FILE, blocks, block_bytes).rate
    return "preadv", _Loop(folder / FILE, blocks, block_bytes).rate


class _Fio:
    """fio, each job on its own stretch of one file."""

    def __init__(self, path: Path, blocks: int, block_bytes: int) -> None:
        self._path, self._blocks, self._block_bytes = path, blocks, block_bytes

    def rate(self, what: str, jobs: int) -> float:
        """Bytes per second, as fio tells it."""
        if what == "write":
            self._path.unlink(missing_ok=True)
        share = self._blocks // jobs * self._block_bytes
        command = [
            *("fio", "--name=limit", f"--filename={self._path}", f"--rw={what}", f"--bs={self._block_bytes}"),
            *("--ioengine=psync", "--direct=1", f"--numjobs={jobs}", f"--size={share}", f"--offset_increment={share}"),
            *("--group_reporting", "--output-format=json", "--allow_file_create=1", "--thread"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        if done.returncode:
            raise CliError(f"fio failed: {done.stderr.strip() or done.stdout.strip()}", reason="fio_failed")
        told = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][what]
        return float(told["bw_bytes"])


class _Loop:
    """The plainest program: threads that call preadv or pwritev on one file, direct where that is offered."""

    def __init__(self, path: Path, blocks: int, block_bytes: int) -> None:
        self._path, self._blocks, self._block_bytes = path, blocks, block_bytes
        self._buffers = [_touched(block_bytes) for _ in range(max(JOBS))]

    def rate(self, what: str, jobs: int) -> float:
        """Bytes per second."""
        if what == "write":
            self._path.unlink(missing_ok=True)
        fd = self._open()
        try:
            if what == "write":
                os.posix_fallocate(fd, 0, self._blocks * self._block_bytes)
            return self._timed(os.pwritev if what == "write" else os.preadv, fd, jobs)
        finally:
            os.close(fd)

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            return os.open(self._path, flags | os.O_DIRECT, 0o600)
        except OSError:
            return os.open(self._path, flags, 0o600)

    def _timed(self, call: Callable[[int, list[Any], int], int], fd: int, jobs: int) -> float:
        def job(number: int) -> None:
            buffer = self._buffers[number].data
            for block in range(number, self._blocks, jobs):
                if call(fd, [buffer], block * self._block_bytes) != self._block_bytes:
                    raise CliError("a plain call moved fewer bytes than asked", reason="disk_failed")

        threads = [threading.Thread(target=job, args=(number,)) for number in range(jobs)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self._blocks * self._block_bytes / (time.perf_counter() - start)


def _touched(size_bytes: int) -> Bytes:
    """Memory on pages, every one of them touched, with bytes that no disk can shorten."""
    memory = np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8)
    piece = np.random.default_rng(1).integers(256, size=min(size_bytes, 1 << 20), dtype=np.uint8)
    for start in range(0, size_bytes, piece.size):
        memory[start : start + piece.size] = piece[: size_bytes - start]
    return memory
