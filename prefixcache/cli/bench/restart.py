"""`bench restart`: how long a daemon that was killed with -9 takes until it knows again what is on its disk.

A process of its own writes a log of small blocks in chains, in as many segments as blocks of 2 MiB would take, and
kills itself; then a daemon is started over it. `seconds` is from the moment at which the daemon begins to read until
every block is known, as the daemon tells it; `first_hit_s` from the same moment until a worker has copied a prompt of
100 blocks, of which every byte was compared. The start of the process itself is in neither. Payloads are not read by a
restart, so their size does not matter to it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from prefixcache.cli.bench.daemon import BenchDaemon, running
from prefixcache.cli.bench.disk import folder_on
from prefixcache.cli.bench.plan import Plan, Progress
from prefixcache.cli.daemon import connect
from prefixcache.cli.errors import CliError
from prefixcache.identity.keys import KEY_BYTES, block_keys
from prefixcache.identity.layout import GroupKind, LayerGroup, Layout
from prefixcache.v1 import admin_pb2
from prefixcache_client import Blocks, Client, ClientOptions, Namespace
from prefixcache_offload.disk import ENTRY, DiskOptions, Outcome
from prefixcache_offload.disk.shared import Ended
from prefixcache_offload.disk.tier import DiskTier

BLOCK_TOKENS: Final = 16
BLOCK_BYTES: Final = 4096
CHAIN: Final = 100
"""Blocks of one prompt."""
_SEGMENT_BYTES: Final = 1 << 20  # 127 records, as a segment of the default size has of 2 MiB blocks
_RECORD_BYTES: Final = 2 * BLOCK_BYTES
_HOST_BYTES: Final = 64 << 20
_LONGEST_S: Final = 120.0
_PAUSE_S: Final = 0.001
_ASK_S: Final = 0.1  # between questions how far it is: each takes time of the daemon that is being measured
_LABEL: Final = "bench restart"
_LAYOUT: Final = Layout.of(LayerGroup(GroupKind.FULL, (0,), 1, 32, 32, "float32"))


def run(plan: Plan, progress: Progress, where: Path | None = None) -> dict[str, Any]:
    """`restart` of the result. where: a directory of the file system to measure, by default the current one."""
    blocks = plan.restart_blocks // CHAIN * CHAIN
    with folder_on(where, _cap_bytes(blocks)) as folder:
        _build(folder / "data", blocks, progress)
        environ = {
            "PREFIXCACHE_DISK": str(folder / "data"),
            "PREFIXCACHE_DISK_BYTES": str(_cap_bytes(blocks)),
            "PREFIXCACHE_DISK_SEGMENT_BYTES": str(_SEGMENT_BYTES),
        }
        progress(f"restart: a daemon over {blocks:,} blocks")
        with running(_HOST_BYTES, environ) as daemon:
            hit_at = _first_hit(daemon, blocks)
            progress("restart: until every block is known")
            told, started_at = _whole(daemon)
    found = _counter(told, "blocks_recovered")
    if found != blocks:
        raise CliError(f"{found:,} of {blocks:,} blocks came back", reason="blocks_lost")
    began_s = _counter(told, "disk_recovery_us", "began") / 1e6
    return {
        "restart": {
            "blocks": blocks,
            "seconds": _counter(told, "disk_recovery_us", "took") / 1e6,
            "first_hit_s": hit_at - started_at - began_s,
        }
    }


def _cap_bytes(blocks: int) -> int:
    return 2 * blocks * _RECORD_BYTES + (64 << 20)


def _namespace(client: Client) -> Namespace:
    return client.namespace(_LAYOUT, b"r" * 32, block_tokens=BLOCK_TOKENS)


def _tokens(prompt: int) -> npt.NDArray[np.uint32]:
    return np.full(CHAIN * BLOCK_TOKENS, prompt + 1, np.uint32)


def _bytes(prompt: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(prompt).integers(256, size=(CHAIN, BLOCK_BYTES), dtype=np.uint8)


# --- what an earlier run left -----------------------------------------------------------------------------------------


def _build(data: Path, blocks: int, progress: Progress) -> None:
    """Another process fills the directory; it ends by kill -9."""
    command = [sys.executable, "-m", "prefixcache.cli.bench.restart", str(data), str(blocks)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        for line in child.stdout:
            progress(f"restart: {int(line):,} of {blocks:,} blocks written")
        text = child.stderr.read()
    if child.returncode != -signal.SIGKILL:
        raise CliError(f"the log could not be written: {text[-2000:]}", reason="disk_failed")


def write_and_die(data: Path, blocks: int) -> None:
    """Fill a data directory as a daemon does, and kill this process."""
    from prefixcache.server.disk_specs import pack_spec
    from prefixcache.server.layouts import check, value_bytes

    ns = _namespace(Client("unix:///nowhere"))  # never called
    message = ns.form.spec(ns.epoch.fingerprint, _LABEL)
    options = DiskOptions(_cap_bytes(blocks), _SEGMENT_BYTES, queue_bytes=1 << 30)
    tier = DiskTier(str(data), options)
    name = tier.register(ns.epoch.fingerprint, pack_spec(_LABEL, check(message), value_bytes(message)))
    for prompt in range(blocks // CHAIN):
        entries = np.zeros(CHAIN, ENTRY)
        keys = block_keys(ns.epoch.root, _tokens(prompt).tobytes(), BLOCK_TOKENS)
        entries["namespace"], entries["length"] = name, BLOCK_BYTES
        entries["key"] = np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES)
        entries["parent"][1:] = entries["key"][:-1]
        entries["depth"] = np.arange(CHAIN)
        _write(tier, _bytes(prompt).reshape(-1), entries)
        if prompt % 100 == 99:
            print((prompt + 1) * CHAIN, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def _write(tier: DiskTier, memory: npt.NDArray[np.uint8], entries: npt.NDArray[np.void]) -> None:
    finished = threading.Event()

    def done(ended: Ended) -> None:
        if (ended.outcomes != Outcome.OK).any():
            print(Outcome(int(ended.outcomes.max())).name, file=sys.stderr, flush=True)
            os._exit(1)
        if not ended.left:
            finished.set()

    tier.write(1, memory, np.arange(CHAIN) * BLOCK_BYTES, entries, done)
    finished.wait()


# --- the restart ------------------------------------------------------------------------------------------------------


def _first_hit(daemon: BenchDaemon, blocks: int) -> float:
    """When a worker had copied the prompt that was written last."""
    prompt = blocks // CHAIN - 1
    target = np.zeros((CHAIN, BLOCK_BYTES), np.uint8)
    deadline = time.monotonic() + _LONGEST_S
    with Client(daemon.address, ClientOptions(timeout_s=10.0, load_timeout_s=10.0)) as client:
        while time.monotonic() < deadline:
            with client.acquire(_namespace(client), _tokens(prompt)) as lease:
                if lease.blocks == CHAIN and lease.copy_to(Blocks(target)):
                    at = time.monotonic()
                    if not np.array_equal(target, _bytes(prompt)):
                        raise CliError("wrong bytes came back", reason="wrong_bytes")
                    return at
            time.sleep(_PAUSE_S)
    raise CliError(f"no block came back in {_LONGEST_S:g} s", reason="blocks_lost")


def _whole(daemon: BenchDaemon) -> tuple[admin_pb2.GetStatsResponse, float]:
    """(what the daemon tells when its recovery is over, when it was started)."""
    deadline = time.monotonic() + _LONGEST_S
    while time.monotonic() < deadline:
        with connect(daemon.address) as admin:
            stats = admin.stats()
        if _counter(stats, "disk_recovery_us", "took"):
            return stats, time.monotonic() - stats.uptime_s
        time.sleep(_ASK_S)
    raise CliError(f"the disk was not read in {_LONGEST_S:g} s", reason="disk_hangs")


def _counter(stats: admin_pb2.GetStatsResponse, name: str, label: str = "") -> int:
    return next((each.value for each in stats.counters if each.name == name and each.label == label), 0)


if __name__ == "__main__":
    write_and_die(Path(sys.argv[1]), int(sys.argv[2]))
