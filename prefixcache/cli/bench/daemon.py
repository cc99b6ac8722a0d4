"""A daemon of the benchmark's own: a folder, a socket, a process that ends with the benchmark.

It goes through `prefixcache serve`, as users do. The kernel tells it of its parent's death, so that a benchmark that
was ended with kill -9, or by a supervisor's time limit, leaves no daemon with gigabytes of memory behind.
It must not know what is measured.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from prefixcache.cli.daemon import connect
from prefixcache.cli.errors import CliError
from prefixcache.v1 import admin_pb2, common_pb2

START_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 20.0
_POLL_S: Final = 0.02
_PR_SET_PDEATHSIG: Final = 1
# Loaded here and not in the child: between fork and exec nothing may take a lock.
_prctl = ctypes.CDLL(None).prctl


@dataclass(frozen=True)
class BenchDaemon:
    """A running daemon. `folder` is for whatever else the benchmark needs, and goes with it."""

    address: str
    folder: Path
    pid: int


@contextmanager
def running(host_bytes: int, extra_environ: Mapping[str, str] | None = None) -> Iterator[BenchDaemon]:
    """Start a daemon with a pool of `host_bytes`, wait until all of it is ready, and stop it at the end."""
    with tempfile.TemporaryDirectory(prefix="prefixcache-bench-") as name:
        folder = Path(name)
        socket = folder / "daemon.sock"
        command = [
            *(sys.executable, "-m", "prefixcache.cli.main", "serve", "--socket", str(socket)),
            *("--http", "127.0.0.1:0", "--host-bytes", str(host_bytes), "--log-level", "warning"),
        ]
        with (folder / "daemon.log").open("wb") as log:
            environ = _environ(extra_environ)
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environ, preexec_fn=_end_with_parent)
        try:
            _wait_ready(process, f"unix://{socket}", folder / "daemon.log")
            yield BenchDaemon(f"unix://{socket}", folder, process.pid)
        finally:
            _stop(process)


def _end_with_parent() -> None:
    """Runs in the child before `serve` does."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _environ(extra: Mapping[str, str] | None) -> dict[str, str]:
    """The environment without the user's own prefixcache settings: the benchmark measures what it says it measures."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("PREFIXCACHE_")}
    return own | dict(extra or {})


def _wait_ready(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise CliError(f"the benchmark's daemon ended with {process.returncode}: {log.read_text()[-2000:]}")
        with contextlib.suppress(CliError), connect(address) as daemon:
            if _is_ready(daemon.stats()):
                return
        time.sleep(_POLL_S)
    raise CliError(f"the benchmark's daemon was not ready in {START_TIMEOUT_S:g} s: {log.read_text()[-2000:]}")


def _is_ready(stats: admin_pb2.GetStatsResponse) -> bool:
    host = [tier for tier in stats.tiers if tier.tier == common_pb2.TIER_HOST]
    return stats.health == "serving" and all(tier.ready_bytes >= tier.capacity_bytes for tier in host)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
