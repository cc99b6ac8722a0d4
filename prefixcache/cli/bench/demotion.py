"""What `bench disk` tells of a whole daemon: requests while blocks are being written, and the way back from disk.

Another process stores prompts at 1 GB/s, so that the daemon writes as much to its disk all the while; a worker
acquires a prompt that is in memory, before and meanwhile, and the two 99th percentiles stand beside each other.
Then prompts that are on disk only are acquired: until the first block is in the worker's tensor, beside one plain read
of as many bytes from the same file system. It must not know how the tier alone is measured (`disk` does).
"""

from __future__ import annotations

import mmap
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from prefixcache.cli.bench import cached
from prefixcache.cli.bench.daemon import BenchDaemon, running
from prefixcache.cli.bench.plan import Plan, Progress
from prefixcache.cli.bench.transfer import HEAD_DIM, KV_HEADS, LAYERS
from prefixcache.cli.daemon import connect
from prefixcache.cli.errors import CliError
from prefixcache_client import Blocks, Client, ClientOptions, Namespace

BLOCKS: Final = 8
"""Of one prompt, 2 MiB each."""
_HOST_PROMPTS: Final = 16
_TIMEOUT_S: Final = 20.0
_HOT, _FIRST = 1, 1000
_PAUSE_S: Final = 0.001  # between requests: a worker computes meanwhile
_STORED_PER_S: Final = 1e9  # bytes: as fast as it is let, the storing process would take the other core for itself

Bytes = npt.NDArray[np.uint8]


def run(plan: Plan, progress: Progress, folder: Path) -> dict[str, float]:
    """Further figures of `disk`. folder: on the file system to measure."""
    environ = {"PREFIXCACHE_DISK": str(folder / "data"), "PREFIXCACHE_DISK_BYTES": str(4 << 30)}
    progress("disk: a daemon that writes to it")
    with running(_HOST_PROMPTS * BLOCKS * plan.block_bytes, environ) as daemon:
        options = ClientOptions(timeout_s=_TIMEOUT_S, store_timeout_s=_TIMEOUT_S, load_timeout_s=_TIMEOUT_S)
        with Client(daemon.address, options) as client:
            told = _foreground(client, daemon, plan)
            progress("disk: the way back")
            told |= _way_back(client, plan, folder)
        stats = _counters(daemon)
    told["write_amplification"] = stats.get("disk_write_amplification_permille", 0) / 1000
    return told


def _namespace(client: Client) -> Namespace:
    return cached.namespace(client, LAYERS, KV_HEADS, HEAD_DIM)


def _tokens(ns: Namespace, prompt: int) -> npt.NDArray[np.uint32]:
    return np.full(BLOCKS * ns.block_tokens, prompt, np.uint32)


def _store(client: Client, prompt: int, blocks: Bytes) -> bool:
    ns = _namespace(client)
    return client.store(ns, _tokens(ns, prompt), Blocks(blocks)).stored_blocks == BLOCKS


def _blocks(plan_bytes: int) -> Bytes:
    return np.random.default_rng(1).integers(256, size=(BLOCKS, plan_bytes), dtype=np.uint8)


# --- requests while blocks are written --------------------------------------------------------------------------------


def _foreground(client: Client, daemon: BenchDaemon, plan: Plan) -> dict[str, float]:
    """99th percentiles of acquiring what is in memory, alone and beside writes, and how much was written a second."""
    if not _store(client, _HOT, _blocks(plan.block_bytes)):
        raise CliError("the daemon stored nothing", reason="not_stored")
    alone = _acquires(client, plan)
    with _storing(daemon, plan.block_bytes):
        _wait_for_writes(daemon)
        before, began = _counters(daemon)["disk_device_bytes"], time.monotonic()
        beside = _acquires(client, plan)
        took_s = time.monotonic() - began
        after = _counters(daemon)["disk_device_bytes"]
    return {
        "acquire_p99_idle_us": _p99_us(alone),
        "acquire_p99_demoting_us": _p99_us(beside),
        "demoted_gb_per_s": (after - before) / took_s / 1e9,
    }


def _acquires(client: Client, plan: Plan) -> list[float]:
    """Seconds of each acquire that found the prompt in memory; where it left, it is loaded or stored again."""
    ns, blocks = _namespace(client), _blocks(plan.block_bytes)
    tokens = _tokens(ns, _HOT)
    seconds: list[float] = []
    until = time.monotonic() + 2 * _TIMEOUT_S
    while len(seconds) < 4 * plan.acquire_rounds:
        time.sleep(_PAUSE_S)
        began = time.perf_counter()
        lease = client.acquire(ns, tokens, load_timeout_s=0.0)
        took_s = time.perf_counter() - began
        hit = lease.blocks
        lease.release(0)
        if hit == BLOCKS:
            seconds.append(took_s)
        elif time.monotonic() > until:
            raise CliError("a prompt that is asked for all the time does not stay in memory", reason="not_cached")
        else:
            with client.acquire(ns, tokens) as lease:
                there = bool(lease.copy_to(Blocks(np.empty_like(blocks)))) if lease.blocks == BLOCKS else False
            if not there:
                _store(client, _HOT, blocks)
    return seconds


def _p99_us(seconds: list[float]) -> float:
    return float(np.quantile(seconds, 0.99)) * 1e6


@contextmanager
def _storing(daemon: BenchDaemon, block_bytes: int) -> Iterator[None]:
    """A process that stores prompt after prompt."""
    command = [sys.executable, "-m", __name__, daemon.address, str(block_bytes)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.kill()


def _wait_for_writes(daemon: BenchDaemon) -> None:
    """Until memory was full once."""
    until = time.monotonic() + _TIMEOUT_S
    while _counters(daemon).get("disk_written_bytes", 0) < _HOST_PROMPTS * BLOCKS * (1 << 20):
        if time.monotonic() > until:
            raise CliError("the daemon writes nothing to its disk", reason="not_written")
        time.sleep(0.01)


def _counters(daemon: BenchDaemon) -> dict[str, int]:
    with connect(daemon.address) as admin:
        return {each.name: each.value for each in admin.stats().counters if not each.label}


def store_for_ever(address: str, block_bytes: int) -> None:
    """Runs in a process of its own until it is killed."""
    blocks = _blocks(block_bytes)
    with Client(address, ClientOptions(timeout_s=_TIMEOUT_S, store_timeout_s=_TIMEOUT_S)) as client:
        prompt, due = _FIRST, time.monotonic()
        while True:
            _store(client, prompt, blocks)
            prompt += 1
            due = max(due + blocks.nbytes / _STORED_PER_S, time.monotonic() - 1.0)  # a second may be caught up with
            time.sleep(max(0.0, due - time.monotonic()))


# --- the way back -----------------------------------------------------------------------------------------------------


def _way_back(client: Client, plan: Plan, folder: Path) -> dict[str, float]:
    """Milliseconds until the first block of a prompt on disk was copied, and of a plain read of one block."""
    ns = _namespace(client)
    target = np.zeros((1, plan.block_bytes), np.uint8)
    ours, plain = [], []
    with _file(folder / "plain", plan.block_bytes) as read:
        for prompt in range(_FIRST, _FIRST + 4 * plan.disk_rounds):
            on_disk = client.lookup(ns, _tokens(ns, prompt))
            if on_disk.tokens < BLOCKS * ns.block_tokens:
                continue
            plain.append(read())
            began = time.perf_counter()
            with client.acquire(ns, _tokens(ns, prompt), max_tokens=ns.block_tokens) as lease:
                if lease.blocks and lease.copy_to(Blocks(target)):
                    ours.append(time.perf_counter() - began)
    if not ours:
        raise CliError("no prompt came back from disk", reason="not_cached")
    return {"first_block_ms": statistics.median(ours) * 1e3, "plain_read_ms": statistics.median(plain) * 1e3}


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


if __name__ == "__main__":
    store_for_ever(sys.argv[1], int(sys.argv[2]))
