"""The daemon is stopped (SIGSTOP): every call is a miss after its deadline, then at once; SIGCONT is all it takes."""

import dataclasses
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from prefixcache_client import Client, ClientOptions
from tests.e2e.processes import DaemonProcess, wait_until
from tests.issues.conftest import store_soon
from tests.issues.workers import TOKENS, bytes_of, namespace

OPTIONS = ClientOptions(timeout_s=0.3, store_timeout_s=0.3, breaker_open_s=0.2, breaker_max_open_s=0.4)


@pytest.mark.parametrize("local", [True, False])
def test_calls_end_in_time_and_come_back(daemon: DaemonProcess, *, local: bool) -> None:
    with Client(f"unix://{daemon.socket}", dataclasses.replace(OPTIONS, local_channel=local)) as client:
        ns = namespace(client)
        assert store_soon(client, ns, TOKENS, 1)
        freeze(daemon)
        try:
            began = time.monotonic()
            assert [client.acquire(ns, TOKENS).reason for _ in range(3)] == ["deadline"] * 3
            assert client.store(ns, TOKENS, bytes_of(1)).reason == "circuit_open"
            assert time.monotonic() - began < 3
            began = time.monotonic()
            assert not any(client.acquire(ns, TOKENS) for _ in range(200))
            assert time.monotonic() - began < 3, "only probes wait"
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        assert wait_until(lambda: client.lookup(ns, TOKENS).tokens == len(TOKENS))
        target = np.zeros_like(bytes_of(0))
        with client.acquire(ns, TOKENS) as lease:
            assert lease.copy_to(target).ok
        assert np.array_equal(target, bytes_of(1))


def freeze(daemon: DaemonProcess) -> None:
    """SIGSTOP, and wait until the kernel has stopped it."""
    os.kill(daemon.pid, signal.SIGSTOP)
    assert wait_until(lambda: Path(f"/proc/{daemon.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
