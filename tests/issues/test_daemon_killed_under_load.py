"""The daemon is killed with -9 under load and started again: workers see misses, never an exception or a wrong byte."""

import os
import threading
from pathlib import Path

import numpy as np

from prefixcache_client import Client, Namespace
from tests.e2e.processes import DaemonProcess, wait_until
from tests.issues.conftest import PATIENT
from tests.issues.workers import BLOCK_BYTES, TOKENS, bytes_of, namespace

THREADS = 3


class Load:
    """One worker: reads what it can, checks every byte, stores what was missing."""

    def __init__(self, client: Client, ns: Namespace, number: int) -> None:
        self.tokens = [number, *TOKENS[1:]]
        self.data = bytes_of(number)
        self.hits = self.misses = 0
        self.error: BaseException | None = None
        self._client = client
        self._ns = ns
        self._stop = threading.Event()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def stop(self) -> None:
        """End it; raises what went wrong."""
        self._stop.set()
        self.thread.join(60)
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        target = np.zeros_like(self.data)
        while not self._stop.is_set():
            try:
                self._one(target)
            except BaseException as error:  # noqa: BLE001 # told to the test
                self.error = error
                return

    def _one(self, target: np.ndarray) -> None:
        with self._client.acquire(self._ns, self.tokens) as lease:
            result = lease.copy_to(target)
            if result.ok:
                blocks = result.tokens // self._ns.block_tokens
                assert np.array_equal(target[:blocks], self.data[:blocks])
                self.hits += 1
                return
        self.misses += 1
        self._client.store(self._ns, self.tokens, self.data)


def test_workers_carry_on(tmp_path: Path) -> None:
    shared = set(os.listdir("/dev/shm"))
    size = str(64 * BLOCK_BYTES)
    daemon = DaemonProcess(tmp_path, host_bytes=size)
    # Two clients, so that threads share one and so that two sessions are lost.
    clients = [Client(f"unix://{daemon.socket}", PATIENT) for _ in range(2)]
    ns = namespace(clients[0])
    loads = [Load(clients[number % 2], ns, 100 + number) for number in range(THREADS)]
    try:
        for _ in range(2):
            seen = [load.hits for load in loads]
            assert wait_until(lambda: all(load.hits > before + 5 for load, before in zip(loads, seen, strict=True)))  # noqa: B023
            missed = [load.misses for load in loads]
            daemon.kill()
            assert wait_until(lambda: all(load.misses > before for load, before in zip(loads, missed, strict=True)))  # noqa: B023
            daemon = DaemonProcess(tmp_path, host_bytes=size)
        seen = [load.hits for load in loads]
        assert wait_until(lambda: all(load.hits > before + 5 for load, before in zip(loads, seen, strict=True)))
    finally:
        for load in loads:
            load.stop()
        for client in clients:
            client.close()
        daemon.kill()
    assert set(os.listdir("/dev/shm")) <= shared
    assert [client.stats().connects for client in clients] == [3, 3]
    assert wait_until(lambda: "prefixcache-pool" not in Path("/proc/self/maps").read_text())
