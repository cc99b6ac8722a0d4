"""Blocks of a namespace whose spec cannot be read (a newer version's, a damaged book) were not told after a restart,
and neither were their segments: nobody ever gave them back, and the disk was smaller by them for ever."""

from pathlib import Path
from typing import Any

import grpc
import numpy as np

from prefixcache.server.app import Daemon
from prefixcache.v1 import admin_pb2, admin_pb2_grpc
from prefixcache_client import Client, ClientOptions, ForeignCache, Rows
from prefixcache_offload.disk import ENTRY, DiskOptions, Outcome
from prefixcache_offload.disk.shared import Ended
from prefixcache_offload.disk.tier import DiskTier
from tests.contract.conftest import start_daemon, stop_daemon
from tests.e2e.processes import wait_until

BLOCK_BYTES, AT_ONCE, SLOTS = 512 * 1024, 6, 16
CAP_BYTES, SEGMENT_BYTES = 32 << 20, 2 << 20
OPTIONS = ClientOptions(timeout_s=20, store_timeout_s=20, load_timeout_s=20)


def fill(path: Path) -> None:
    """All of the disk, with blocks of a namespace of which only its writer knew what it is."""
    tier = DiskTier(str(path), DiskOptions(CAP_BYTES, SEGMENT_BYTES, writers=0, readers=0))
    name = tier.register(b"f" * 32, b"\xc1")
    count = CAP_BYTES // BLOCK_BYTES
    entries = np.zeros(count, ENTRY)
    entries["namespace"], entries["length"] = name, BLOCK_BYTES
    entries["key"][:, 0] = np.arange(count)
    outcomes: list[int] = []

    def done(told: Ended) -> None:
        outcomes.extend(told.outcomes.tolist())

    tier.write(1, np.ones(BLOCK_BYTES, np.uint8), np.zeros(count, np.int64), entries, done)
    tier.pump()
    assert outcomes.count(Outcome.OK) > count // 2
    assert tier.free_bytes < SEGMENT_BYTES
    assert tier.close()


def store(cache: ForeignCache, batch: int) -> bool:
    content: Any = np.random.default_rng(batch).integers(0, 256, (AT_ONCE, BLOCK_BYTES), np.uint8)
    keys = [b"page %d of %d" % (page, batch) for page in range(AT_ONCE)]
    return bool(cache.store(keys, Rows(content, np.arange(AT_ONCE))).stored.all())


def left_after_flush(daemon: Daemon) -> int:
    """How many blocks of memory are not on disk."""
    with grpc.insecure_channel(f"unix:{daemon.config.socket}") as channel:
        answer = admin_pb2_grpc.AdminServiceStub(channel).Flush(admin_pb2.FlushRequest())
        left: int = answer.left_blocks
        return left


def test_their_room_is_given_to_others(tmp_path: Path) -> None:
    fill(tmp_path / "disk")
    flags = {"disk": str(tmp_path / "disk"), "disk_bytes": str(CAP_BYTES), "disk_segment_bytes": str(SEGMENT_BYTES)}
    daemon = start_daemon(tmp_path, host_bytes=str(SLOTS * BLOCK_BYTES), **flags)
    try:
        assert wait_until(lambda: daemon.planner.state.disk.recovered)
        with Client(f"unix://{daemon.config.socket}", OPTIONS) as client:
            cache = client.foreign(client.foreign_namespace("test", b"w" * 32, (BLOCK_BYTES, 64), form={}))
            for batch in range(8):
                assert store(cache, batch)
                assert wait_until(lambda: not left_after_flush(daemon)), f"batch {batch} finds no room"
    finally:
        stop_daemon(daemon)
