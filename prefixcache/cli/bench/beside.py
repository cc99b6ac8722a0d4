"""What `bench disk` tells of requests beside other work: who makes a request for what is in memory wait, and how long.

A worker acquires a prompt that is in memory, in turns, with nothing beside it; while the daemon writes to its disk and
nobody stores; while another process stores at 1 GB/s and there is no disk; and while both happens. The limit is an echo
of two bare processes, alone and beside a third that writes as much to the same file system and does nothing else.
It must not know the way back from disk (`demotion`).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from prefixcache.cli.bench import cached
from prefixcache.cli.bench.daemon import BenchDaemon, running
from prefixcache.cli.bench.echo import local_echo
from prefixcache.cli.bench.plan import Plan
from prefixcache.cli.bench.transfer import HEAD_DIM, KV_HEADS, LAYERS
from prefixcache.cli.daemon import connect
from prefixcache.cli.errors import CliError
from prefixcache_client import Blocks, Client, ClientOptions, Namespace

BLOCKS: Final = 8
"""Of one prompt, 2 MiB each."""
TIMEOUT_S: Final = 20.0
OPTIONS: Final = ClientOptions(timeout_s=TIMEOUT_S, store_timeout_s=TIMEOUT_S, load_timeout_s=TIMEOUT_S)
HOST_PROMPTS: Final = 16
"""Fit in memory."""
_HOT, _FIRST, _FLUSHED = 1, 1000, 1 << 20
_FLUSHED_AT_ONCE: Final = 12
_TURNS: Final = 4
_PAUSE_S: Final = 0.001  # between requests: a worker computes meanwhile
_STORED_PER_S: Final = 1e9  # bytes: as fast as it is let, the storing process would take the other core for itself
_REQUEST_BYTES: Final = 400  # as an Acquire of 8 blocks
_PLAIN_BLOCKS: Final = 64

Bytes = npt.NDArray[np.uint8]
Samples = dict[str, list[float]]


def namespace(client: Client) -> Namespace:
    """What all of this is stored in."""
    return cached.namespace(client, LAYERS, KV_HEADS, HEAD_DIM)


def tokens_of(ns: Namespace, prompt: int) -> npt.NDArray[np.uint32]:
    """Tokens of prompt `prompt`."""
    return np.full(BLOCKS * ns.block_tokens, prompt, np.uint32)


def counters(daemon: BenchDaemon) -> dict[str, int]:
    """The daemon's own, by name."""
    with connect(daemon.address) as admin:
        return {each.name: each.value for each in admin.stats().counters if not each.label}


def measure(daemon: BenchDaemon, plan: Plan, folder: Path) -> dict[str, float]:
    """99th percentiles of each, and how much was written a second. daemon: one with a disk; folder: on its system."""
    with ExitStack() as stack:
        diskless = stack.enter_context(running(HOST_PROMPTS * BLOCKS * plan.block_bytes))
        ours, theirs = (stack.enter_context(_worker(each, plan.block_bytes)) for each in (daemon, diskless))
        echo = stack.enter_context(local_echo(folder))
        size = str(plan.block_bytes)
        storing = stack.enter_context(_stopped("store", daemon.address, size))
        storing_only = stack.enter_context(_stopped("store", diskless.address, size))
        writing = stack.enter_context(_stopped("write", str(folder / "written"), size))
        samples: Samples = {}
        rates: dict[str, list[float]] = {}

        def add(name: str, seconds: list[float], rate: float = 0.0) -> None:
            samples.setdefault(name, []).extend(seconds)
            rates.setdefault(name, []).append(rate)

        count = max(1, 4 * plan.acquire_rounds // _TURNS)
        for _ in range(_TURNS):
            add("idle", ours.acquires(count))
            add("demotion", *_while_flushing(ours, daemon, count))
            with _continued(storing_only):
                add("storing", theirs.acquires(count))
            with _continued(storing):
                _wait_for_writes(daemon)
                add("demoting", *_rated(daemon, lambda: ours.acquires(count)))
            settle(daemon)
            add("echo idle", _echoes(echo, count))
            with _continued(writing):
                add("echo writing", _echoes(echo, count))
    told = {f"acquire_p99_{name}_us": _p99_us(samples[name]) for name in ("idle", "demotion", "storing", "demoting")}
    told |= {f"echo_p99_{name}_us": _p99_us(samples[f"echo {name}"]) for name in ("idle", "writing")}
    told["demotion_gb_per_s"] = float(np.mean(rates["demotion"])) / 1e9
    told["demoted_gb_per_s"] = float(np.mean(rates["demoting"])) / 1e9
    return told


def _p99_us(seconds: list[float]) -> float:
    return float(np.quantile(seconds, 0.99)) * 1e6


# --- the worker that is looked at -------------------------------------------------------------------------------------


class Worker:
    """Acquires one prompt over and over, and sees to it that it is in memory."""

    def __init__(self, client: Client, block_bytes: int) -> None:
        self._client = client
        self._ns = namespace(client)
        self._tokens = tokens_of(self._ns, _HOT)
        shape = (BLOCKS, block_bytes)
        self._blocks: Bytes = np.random.default_rng(1).integers(256, size=shape, dtype=np.uint8)
        self._next = _FLUSHED
        self.store(_HOT)

    def store(self, prompt: int) -> None:
        """Store a whole prompt. Raises CliError."""
        cached.store(self._client, self._ns, tokens_of(self._ns, prompt), Blocks(self._blocks))

    def store_more(self, prompts: int) -> None:
        """Store prompts that nobody has."""
        for _ in range(prompts):
            self.store(self._next)
            self._next += 1

    def acquires(self, count: int) -> list[float]:
        """Seconds of each of so many acquires that found the prompt in memory."""
        return self.acquires_until(lambda taken: taken >= count)

    def acquires_until(self, is_over: Callable[[int], bool]) -> list[float]:
        """The same until `is_over(how many)`; where the prompt left memory, it is loaded or stored again."""
        seconds: list[float] = []
        until = time.monotonic() + 2 * TIMEOUT_S
        while not is_over(len(seconds)):
            time.sleep(_PAUSE_S)
            began = time.perf_counter()
            lease = self._client.acquire(self._ns, self._tokens, load_timeout_s=0.0)
            took_s = time.perf_counter() - began
            hit = lease.blocks
            lease.release(0)
            if hit == BLOCKS:
                seconds.append(took_s)
            elif time.monotonic() > until:
                raise CliError("a prompt that is asked for all the time does not stay in memory", reason="not_cached")
            else:
                self._bring_back()
        return seconds

    def _bring_back(self) -> None:
        with self._client.acquire(self._ns, self._tokens) as lease:
            target = Blocks(np.empty_like(self._blocks))
            there = lease.blocks == BLOCKS and bool(lease.copy_to(target))
        if not there:
            self._client.store(self._ns, self._tokens, Blocks(self._blocks))


@contextmanager
def _worker(daemon: BenchDaemon, block_bytes: int) -> Iterator[Worker]:
    with Client(daemon.address, OPTIONS) as client:
        yield Worker(client, block_bytes)


def _echoes(echo: Callable[[bytes], bytes], count: int) -> list[float]:
    seconds, request = [], bytes(_REQUEST_BYTES)
    for _ in range(count):
        time.sleep(_PAUSE_S)
        began = time.perf_counter()
        echo(request)
        seconds.append(time.perf_counter() - began)
    return seconds


# --- what is beside it ------------------------------------------------------------------------------------------------


def _while_flushing(worker: Worker, daemon: BenchDaemon, count: int) -> tuple[list[float], float]:
    """Acquires while the daemon writes what was stored before, with nobody storing; bytes written a second."""
    seconds: list[float] = []
    written = took_s = 0.0
    while len(seconds) < count:
        worker.store_more(_FLUSHED_AT_ONCE)
        before = counters(daemon)["disk_device_bytes"]
        began, flush = time.monotonic(), _Flush(daemon)
        seconds += worker.acquires_until(flush.is_over)
        took_s += flush.ended_at - began
        written += counters(daemon)["disk_device_bytes"] - before
    return seconds, written / took_s


class _Flush:
    """One Flush on a thread of its own, which sleeps in the call."""

    def __init__(self, daemon: BenchDaemon) -> None:
        self._daemon = daemon
        self.ended_at = 0.0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            with connect(self._daemon.address) as admin:
                admin.flush()
        finally:
            self.ended_at = time.monotonic()

    def is_over(self, _: int) -> bool:
        """Whether everything is written."""
        return self.ended_at > 0.0


def _rated(daemon: BenchDaemon, act: Callable[[], list[float]]) -> tuple[list[float], float]:
    """What `act` answers, and bytes written to the disk a second meanwhile."""
    before, began = counters(daemon)["disk_device_bytes"], time.monotonic()
    seconds = act()
    took_s = time.monotonic() - began
    return seconds, (counters(daemon)["disk_device_bytes"] - before) / took_s


def _wait_for_writes(daemon: BenchDaemon) -> None:
    """Until the storing process is at it and the daemon writes what it stores."""
    before, until = counters(daemon).get("disk_written_bytes", 0), time.monotonic() + TIMEOUT_S
    while counters(daemon).get("disk_written_bytes", 0) < before + HOST_PROMPTS * BLOCKS * (1 << 20):
        if time.monotonic() > until:
            raise CliError("the daemon writes nothing to its disk", reason="not_written")
        time.sleep(0.01)


def settle(daemon: BenchDaemon) -> None:
    """Until nothing is being written any more."""
    with connect(daemon.address) as admin:
        admin.flush()


@contextmanager
def _stopped(*what: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that works for ever, and only while it is let (`_continued`)."""
    command = [sys.executable, "-m", __name__, *what]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()  # it has imported what it needs
            process.send_signal(signal.SIGSTOP)
            yield process
        finally:
            process.kill()


@contextmanager
def _continued(process: subprocess.Popen[bytes]) -> Iterator[None]:
    process.send_signal(signal.SIGCONT)
    try:
        yield
    finally:
        process.send_signal(signal.SIGSTOP)


class _Pace:
    """Makes a loop move so many bytes a second; up to a tenth of a second may be caught up with."""

    def __init__(self) -> None:
        self._due = time.monotonic()

    def wait(self, size_bytes: int) -> None:
        """So many bytes were moved."""
        self._due = max(self._due + size_bytes / _STORED_PER_S, time.monotonic() - 0.1)
        time.sleep(max(0.0, self._due - time.monotonic()))


def store_for_ever(address: str, block_bytes: int) -> None:
    """Runs in a process of its own until it is killed."""
    with Client(address, OPTIONS) as client:
        ns, prompt = namespace(client), _FIRST
        blocks = np.random.default_rng(2).integers(256, size=(BLOCKS, block_bytes), dtype=np.uint8)
        print("ready", flush=True)
        pace = _Pace()
        while True:
            client.store(ns, tokens_of(ns, prompt), Blocks(blocks))
            prompt += 1
            pace.wait(blocks.nbytes)


def write_for_ever(path: str, block_bytes: int) -> None:
    """Plain writes over and over of one file, direct where that is offered; until the process is killed."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError:
        fd = os.open(path, flags, 0o600)
    with contextlib.suppress(OSError):
        os.posix_fallocate(fd, 0, _PLAIN_BLOCKS * block_bytes)
    buffer: Any = mmap.mmap(-1, block_bytes)
    buffer.write(os.urandom(block_bytes))
    print("ready", flush=True)
    pace, place = _Pace(), 0
    while True:
        os.pwritev(fd, [buffer], place * block_bytes)
        place = (place + 1) % _PLAIN_BLOCKS
        pace.wait(block_bytes)


if __name__ == "__main__":
    {"store": store_for_ever, "write": write_for_ever}[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
