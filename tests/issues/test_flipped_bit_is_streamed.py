"""A byte that changed in the daemon's memory after the commit went to remote workers as if it were the one stored."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from prefixcache.core.table import DIGEST_KNOWN
from prefixcache.identity.layout import GroupKind, LayerGroup, Layout
from prefixcache.server.app import Daemon
from prefixcache_client import Client, ClientOptions
from tests.contract.conftest import start_daemon, stop_daemon

LAYOUT = Layout.of(LayerGroup(GroupKind.FULL, (0, 1), 2, 8, 8, "float16"))
TOKENS = list(range(4 * 64))


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    started = start_daemon(tmp_path)
    yield started
    stop_daemon(started)


def wait_until(condition: Callable[[], bool], deadline_s: float = 20.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def test_a_changed_byte_is_a_counted_miss_for_a_remote_worker(daemon: Daemon) -> None:
    options = ClientOptions(local_channel=False, timeout_s=10.0)
    with Client(f"unix://{daemon.config.socket}", options) as client:
        ns = client.namespace(LAYOUT, bytes(range(32)))
        stored = np.random.default_rng(7).integers(0, 256, (4, ns.block_bytes), np.uint8)
        assert client.store(ns, TOKENS, stored).stored_blocks == 4
        column = next(iter(daemon.planner.state.namespaces.values())).table.parts[0]
        wait_until(lambda: bool((column.flags[:4] & DIGEST_KNOWN).all()))
        loaded = np.zeros_like(stored)
        with client.acquire(ns, TOKENS) as lease:
            assert lease.copy_to(loaded).ok
        assert (loaded == stored).all()
        daemon.memory.pool.slot(int(column.slots[2]), ns.block_bytes)[11] ^= 1
        with client.acquire(ns, TOKENS) as lease:
            result = lease.copy_to(loaded)
        assert (result.ok, result.reason) == (False, "checksum_mismatch")
        assert client.stats().missed["checksum_mismatch"] == len(TOKENS)
