"""A worker that is stopped in mid-fill, past its reservation, and then goes on writing into slots it has lost."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from prefixcache.v1 import common_pb2, local_pb2
from prefixcache_offload.export import PoolDescriptor
from prefixcache_offload.pool import MappedPool
from tests.contract.conftest import Worker, new_id
from tests.contract.drivers import LocalDriver
from tests.e2e.processes import DaemonProcess, wait_until
from tests.e2e.test_daemon_process import stats_of

pytestmark = pytest.mark.slow
SIZE = 4096

WRITER = """
import sys, os
from tests.contract.conftest import Worker, new_id, new_keys
from tests.contract.drivers import LocalDriver
from tests.e2e.processes import wait_until
from tests.e2e.test_stopped_writer import map_pool, slots_of
driver = LocalDriver(sys.argv[1])
worker = Worker(driver)
pool = map_pool(driver, worker)
keys = new_keys(4)
granted = []
def reserved():
    granted[:] = worker.reserve(new_id(), keys, ttl_ms=300).grants
    return bool(granted)
assert wait_until(reserved)
slots = slots_of(granted[0])
print(keys.hex(), worker.spec.SerializeToString().hex(), flush=True)
sys.stdin.readline()
for _ in range(100):
    for slot in slots:
        pool.slot(slot, 4096)[:] = 1
print("written", flush=True)
sys.stdin.readline()
"""


def map_pool(driver: LocalDriver, worker: Worker) -> MappedPool:
    """The daemon's pool, writable."""
    answer = driver.call("MapPool", local_pb2.MapPoolRequest(pool=0)).pool
    about = PoolDescriptor(0, "host", answer.size_bytes, answer.size_bytes, writable=True)
    pool = MappedPool.attach(about, *driver.fds[-2:], writable=True)
    for fd in driver.fds:
        os.close(fd)
    driver.fds.clear()
    assert worker.welcome.pools[0].writable
    return pool


def slots_of(grant: object) -> list[int]:
    slots: list[int] = np.frombuffer(grant.slots, "<u4").tolist()  # type: ignore[attr-defined]  # a PartGrant or PartRun
    return slots


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    daemon = DaemonProcess(tmp_path)
    yield daemon
    daemon.kill()


@pytest.fixture
def writer(daemon: DaemonProcess) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", WRITER, str(daemon.local)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        yield child
        child.kill()


def test_the_bytes_of_another_are_unchanged(daemon: DaemonProcess, writer: "subprocess.Popen[str]") -> None:
    assert writer.stdout is not None
    assert writer.stdin is not None
    keys_hex, spec_hex = writer.stdout.readline().split()
    writer.send_signal(signal.SIGSTOP)
    assert wait_until(lambda: stats_of(daemon).tiers[0].quarantined_bytes == 4 * SIZE)
    other = Worker(LocalDriver(str(daemon.local)), common_pb2.NamespaceSpec.FromString(bytes.fromhex(spec_hex)))
    assert isinstance(other.driver, LocalDriver)
    pool = map_pool(other.driver, other)
    keys, reservation, lease = bytes.fromhex(keys_hex), new_id(), new_id()
    for slot in slots_of(other.reserve(reservation, keys).grants[0]):
        pool.slot(slot, SIZE)[:] = 2
    assert other.commit(reservation).committed_blocks == 4
    writer.send_signal(signal.SIGCONT)
    writer.stdin.write("\n")
    writer.stdin.flush()
    assert writer.stdout.readline() == "written\n"
    run = other.acquire(keys, lease=lease).runs[0]
    assert all((pool.slot(slot, SIZE) == 2).all() for slot in slots_of(run))
    assert pool.check_generations(np.frombuffer(run.slots, "<u4"), np.frombuffer(run.generations, "<u8")).all()
    other.release(lease, 4)
    writer.kill()
    assert wait_until(lambda: stats_of(daemon).tiers[0].quarantined_bytes == 0, 5)
    pool.close()
    other.driver.close()
