"""What `bench disk` tells of a whole daemon: requests beside writes (`beside`), and the way back from disk.

Prompts that are on disk only are acquired: until the first block can be read where it lies, and until it is in the
worker's tensor, beside one plain read of as many bytes from the same file system. It must not know how the tier alone
is measured (`disk` does).
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from prefixcache.cli.bench import beside, cached
from prefixcache.cli.bench.beside import BLOCKS, HOST_PROMPTS, OPTIONS, counters, namespace, settle, tokens_of
from prefixcache.cli.bench.daemon import BenchDaemon, running
from prefixcache.cli.bench.plan import Plan, Progress
from prefixcache.cli.errors import CliError
from prefixcache_client import Blocks, Client

_FIRST: Final = 1 << 21  # prompts of its own


def run(plan: Plan, progress: Progress, folder: Path) -> dict[str, float]:
    """Further figures of `disk`. folder: on the file system to measure."""
    environ = {"PREFIXCACHE_DISK": str(folder / "data"), "PREFIXCACHE_DISK_BYTES": str(4 << 30)}
    progress("disk: requests beside other work")
    with running(HOST_PROMPTS * BLOCKS * plan.block_bytes, environ) as daemon:
        told = beside.measure(daemon, plan, folder)
        progress("disk: the way back")
        # Written first, so that what is on disk is as old for a plain read as for the daemon's.
        with _file(folder / "plain", plan.block_bytes) as read, Client(daemon.address, OPTIONS) as client:
            _store_all(client, daemon, plan)
            told |= _way_back(client, plan, read)
        stats = counters(daemon)
    told["write_amplification"] = stats.get("disk_write_amplification_permille", 0) / 1000
    return told


def _prompts(plan: Plan) -> range:
    return range(_FIRST, _FIRST + 4 * plan.disk_rounds)


def _store_all(client: Client, daemon: BenchDaemon, plan: Plan) -> None:
    """Put on disk what is to come back, and so much behind it that memory holds the last of it only."""
    ns = namespace(client)
    blocks = np.random.default_rng(3).integers(256, size=(BLOCKS, plan.block_bytes), dtype=np.uint8)
    for prompt in range(_FIRST, _prompts(plan).stop + HOST_PROMPTS):
        cached.store(client, ns, tokens_of(ns, prompt), Blocks(blocks))
        if prompt % (HOST_PROMPTS // 2) == 0:
            settle(daemon)


def _way_back(client: Client, plan: Plan, read: Callable[[], float]) -> dict[str, float]:
    """Milliseconds until the first block of a prompt on disk could be read in shared memory, until it was copied, and
    of a plain read of one block."""
    ns = namespace(client)
    target = np.zeros((1, plan.block_bytes), np.uint8)
    bytes_s, block_s, plain_s = [], [], []
    for prompt in _prompts(plan):
        on_disk = client.lookup(ns, tokens_of(ns, prompt))
        if on_disk.tokens < BLOCKS * ns.block_tokens:
            continue
        plain_s.append(read())
        began = time.perf_counter()
        with client.acquire(ns, tokens_of(ns, prompt), max_tokens=ns.block_tokens) as lease:
            if not lease.blocks:
                continue
            with lease.view(0) as there:
                assert there.size == plan.block_bytes
                readable = time.perf_counter()
            if lease.copy_to(Blocks(target)):
                bytes_s.append(readable - began)
                block_s.append(time.perf_counter() - began)
    if not block_s:
        raise CliError("no prompt came back from disk", reason="not_cached")
    medians = {"first_bytes_ms": bytes_s, "first_block_ms": block_s, "plain_read_ms": plain_s}
    return {name: statistics.median(values) * 1e3 for name, values in medians.items()}


@contextmanager
def _file(path: Path, size_bytes: int) -> Iterator[Any]:
    """A file of blocks that a plain program reads one after the other, direct where that is offered."""
    blocks = 64
    buffer = mmap.mmap(-1, size_bytes)
    with path.open("wb") as file:
        for _ in range(blocks):
            file.write(os.urandom(size_bytes))
        file.flush()
        os.fsync(file.fileno())
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        fd = os.open(path, os.O_RDONLY)
    place = 0

    def read() -> float:
        nonlocal place
        began = time.perf_counter()
        os.preadv(fd, [buffer], place * size_bytes)
        place = (place + 1) % blocks
        return time.perf_counter() - began

    try:
        yield read
    finally:
        os.close(fd)
