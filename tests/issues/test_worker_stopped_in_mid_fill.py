"""A worker stops (SIGSTOP) in mid-fill past its reservation, another stores the same keys, and the first goes on."""

import signal
import time

import numpy as np

from prefixcache_client import Client, Namespace
from tests.e2e.processes import DaemonProcess, wait_until
from tests.issues.conftest import store_soon
from tests.issues.workers import BLOCK_TOKENS, TOKENS, WorkerProcess, bytes_of

TTL_S = 0.3


def test_the_others_bytes_are_unchanged(daemon: DaemonProcess, client: Client, ns: Namespace) -> None:
    assert wait_until(lambda: client.store(ns, [1] * BLOCK_TOKENS, bytes_of(9, 1)).stored_blocks > 0)
    worker = WorkerProcess("fill", daemon.socket, TTL_S)
    try:
        worker.process.send_signal(signal.SIGSTOP)
        assert store_soon(client, ns, TOKENS, 1), "the keys are free when the reservation has run out"
        worker.process.send_signal(signal.SIGCONT)
        assert worker.go_on().split() in (["0", "reservation_expired"], ["0", "reservation_unknown"])
        target = np.zeros_like(bytes_of(0))
        with client.acquire(ns, TOKENS) as lease:
            assert lease.copy_to(target).tokens == len(TOKENS)
        assert np.array_equal(target, bytes_of(1))
        _all_slots_come_back(client, ns)
    finally:
        worker.process.send_signal(signal.SIGCONT)
        worker.kill()


def _all_slots_come_back(client: Client, ns: Namespace) -> None:
    """The worker aborted what it could not commit, so its slots are no longer held back although it lives."""
    whole = [5_000_000 + i for i in range(16 * BLOCK_TOKENS)]
    began = time.monotonic()
    assert store_soon(client, ns, whole, 3)
    assert time.monotonic() - began < 10
