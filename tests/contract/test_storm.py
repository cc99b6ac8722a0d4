"""Many workers at once, on every transport, in a pool too small for them: a hit is always the bytes that were stored.

Each thread is a worker with random operations from a seeded generator. A block's bytes follow from its key, so whatever
is read can be judged. Sessions are dropped in the middle of things; leases run out while they are read.
"""

import hashlib
import random
import threading
from pathlib import Path

import numpy as np
import pytest

from prefixcache.server.app import Daemon
from prefixcache.v1 import cache_pb2 as pb
from prefixcache.v1 import common_pb2 as common
from tests.contract.conftest import Worker, namespace_spec, start_daemon, stop_daemon
from tests.contract.drivers import Failure, GrpcDriver, LocalDriver
from tests.contract.test_streams import read, write

SIZE = 4096
OPERATIONS = 150
EXPECTED = {
    common.REASON_LEASE_UNKNOWN, common.REASON_LEASE_LOST, common.REASON_RESERVATION_UNKNOWN,
    common.REASON_RESERVATION_EXPIRED,
}  # fmt: skip


def content(key: bytes) -> bytes:
    """The bytes of the block of a key."""
    return hashlib.sha256(key).digest() * (SIZE // 32)


def prompts() -> list[bytes]:
    """Keys of prompts that share beginnings."""
    chains = []
    for branch in range(12):
        key, keys = b"", b""
        for depth in range(20):
            key = hashlib.sha256(key + bytes([branch % 3 if depth < 6 else branch, depth])).digest()
            keys += key
        chains.append(keys)
    return chains


class Storm:
    """One worker's life."""

    def __init__(self, daemon: Daemon, transport: str, seed: int, spec: common.NamespaceSpec) -> None:
        self.daemon = daemon
        self.transport = transport
        self.random = random.Random(seed)
        self.spec = spec
        self.chains = prompts()
        self.hits = 0
        self.lost = 0
        self.problem: BaseException | None = None
        self.worker = self.connect()

    def connect(self) -> Worker:
        if self.transport == "local":
            return Worker(LocalDriver(self.daemon.place.local_path), self.spec)
        return Worker(GrpcDriver(f"unix:{self.daemon.config.socket}"), self.spec)

    def run(self) -> None:
        try:
            for _ in range(OPERATIONS):
                self.step()
        except BaseException as problem:
            self.problem = problem
            raise
        finally:
            self.worker.driver.close()

    def step(self) -> None:
        keys = self.random.choice(self.chains)[: 32 * self.random.randint(1, 20)]
        try:
            if self.random.random() < 0.5:
                self.load(keys)
            else:
                self.store(keys)
        except Failure as failure:
            if failure.reason not in EXPECTED:
                raise
            self.lost += 1
        if self.random.random() < 0.03:
            self.worker.driver.close()
            self.worker = self.connect()

    def load(self, keys: bytes) -> None:
        lease = self.random.randbytes(16)
        answer = self.worker.acquire(keys, lease=lease, ttl_ms=self.random.choice([1, 50, 5000]))
        if not answer.planned_blocks:
            return
        found = self.read_mapped(answer) if self.transport == "local" else self.read_streamed(lease)
        for block, data in found.items():
            assert data == content(keys[32 * block : 32 * block + 32]), f"wrong bytes in block {block}"
        self.hits += len(found)
        if self.random.random() < 0.8:
            self.worker.release(lease, answer.planned_blocks)

    def read_mapped(self, answer: pb.AcquireResponse) -> dict[int, bytes]:
        """Copy, then compare generations: what does not match is a miss."""
        pool, found = self.daemon.memory.pool, {}
        for run in answer.runs:
            slots, generations = np.frombuffer(run.slots, "<u4"), np.frombuffer(run.generations, "<u8")
            copies = [pool.slot(slot, SIZE).tobytes() for slot in slots.tolist()]
            good = pool.check_generations(slots, generations)
            found.update({run.first_block + i: data for i, data in enumerate(copies) if good[i]})
        return found

    def read_streamed(self, lease: bytes) -> dict[int, bytes]:
        assert isinstance(self.worker.driver, GrpcDriver)
        request = pb.ReadBlocksRequest(session=self.worker.session, lease=lease)
        return {block: data for (_, block), data in read(self.worker.driver, request).items()}

    def store(self, keys: bytes) -> None:
        reservation = self.random.randbytes(16)
        granted = self.worker.reserve(reservation, keys, ttl_ms=self.random.choice([1, 5000]))
        for grant in granted.grants:
            blocks = np.frombuffer(grant.blocks, "<u4").tolist()
            data = {block: content(keys[32 * block : 32 * block + 32]) for block in blocks}
            if self.transport == "local":
                for block, slot in zip(blocks, np.frombuffer(grant.slots, "<u4").tolist(), strict=True):
                    self.daemon.memory.pool.slot(slot, SIZE)[:] = np.frombuffer(data[block], np.uint8)
            else:
                assert isinstance(self.worker.driver, GrpcDriver)
                first = pb.WriteBlocksRequest(session=self.worker.session, reservation=reservation)
                pieces = [pb.WriteBlocksRequest(part=0, block=block, data=data[block]) for block in blocks]
                write(self.worker.driver, [first, *pieces])
        if granted.grants and self.random.random() < 0.9:
            self.worker.commit(reservation)
        elif granted.grants and self.random.random() < 0.5:
            self.worker.abort(reservation)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_a_hit_is_always_what_was_stored(tmp_path: Path, seed: int) -> None:
    daemon = start_daemon(tmp_path, host_bytes="512KiB", host_slab_bytes="64KiB")
    spec = namespace_spec()
    storms = [
        Storm(daemon, transport, seed * 100 + number, spec)
        for number, transport in enumerate(["local", "grpc", "local", "grpc"])
    ]
    threads = [threading.Thread(target=storm.run) for storm in storms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [storm.problem for storm in storms] == [None] * 4
    assert all(storm.hits > 100 for storm in storms)
    stats = daemon.statistics.snapshot()
    assert stats.tiers[0].evicted_blocks > 0
    stop_daemon(daemon)
