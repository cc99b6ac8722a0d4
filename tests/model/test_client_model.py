"""The SDK under random operations and faults, beside a dict that says what must be found and what must not."""

import gc
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prefixcache_client import Blocks, Client, ClientOptions, Lease
from tests.unit.client.conftest import BLOCK_TOKENS, DIGEST, LAYOUT
from tests.unit.client.fake_daemon import FakeDaemon, wait_until

# A prompt is a path in a small tree, so that prompts share prefixes.
paths = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)
Path_ = tuple[int, ...]


class ClientModel(RuleBasedStateMachine):
    """What the fake daemon holds is the model; what the client says of it is under test."""

    local = True

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.daemon = FakeDaemon(str(Path(self.folder.name) / "d.sock"), pool_bytes=64 << 20)
        options = ClientOptions(timeout_s=20, store_timeout_s=20, local_channel=self.local)
        self.client = Client(f"unix://{self.daemon.path}", options)
        self.ns = self.client.namespace(LAYOUT, DIGEST, block_tokens=BLOCK_TOKENS)
        self.held: dict[Path_, bytes] = {}
        self.leases: list[tuple[Lease, Path_]] = []

    def teardown(self) -> None:
        for lease, _ in self.leases:
            lease.release()
        self.client.close()
        self.daemon.stop()
        self.folder.cleanup()

    def tokens(self, path: Path_) -> list[int]:
        return [step * 1000 + n for step in path for n in range(BLOCK_TOKENS)] + [7, 7]

    def block(self, path: Path_) -> bytes:
        """The bytes of a path's last block; they follow from the path and the epoch."""
        return np.random.default_rng([self.ns.epoch.number, *path]).bytes(self.ns.block_bytes)

    def known(self, path: Path_) -> int:
        length = 0
        while length < len(path) and path[: length + 1] in self.held:
            length += 1
        return length

    @rule(path=paths, skip=st.integers(0, 3))
    def store(self, path: Path_, skip: int) -> None:
        first = min(skip, self.known(path))
        data = np.frombuffer(b"".join(self.block(path[: n + 1]) for n in range(first, len(path))), np.uint8)
        rows = data.reshape(-1, self.ns.block_bytes)
        fresh = sum(path[: n + 1] not in self.held for n in range(first, len(path)))
        result = self.client.store(self.ns, self.tokens(path), Blocks(rows, first_block=first))
        assert result.reason == ""
        assert result.stored_blocks == fresh
        for n in range(first, len(path)):
            self.held[path[: n + 1]] = self.block(path[: n + 1])

    @rule(path=paths, limit=st.none() | st.integers(0, 100))
    def acquire(self, path: Path_, limit: int | None) -> None:
        lease = self.client.acquire(self.ns, self.tokens(path), max_tokens=limit)
        usable = len(path) if limit is None else min(len(path), limit // BLOCK_TOKENS)
        assert lease.blocks == min(self.known(path), usable)
        self.leases.append((lease, path))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def copy_and_release(self, data: st.DataObject) -> None:
        lease, path = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        target = np.zeros((len(path), self.ns.block_bytes), np.uint8)
        with lease:
            result = lease.copy_to(target)
        assert result.ok == bool(lease.tokens)
        for n in range(lease.blocks):
            assert target[n].tobytes() == self.block(path[: n + 1])

    @precondition(lambda self: self.leases)
    @rule()
    def forget_a_lease(self) -> None:
        self.leases.pop()
        gc.collect()

    @precondition(lambda self: not self.leases)
    @rule()
    def restart(self) -> None:
        self.daemon.restart()
        self.held.clear()

    @precondition(lambda self: not self.leases)
    @rule()
    def new_weights(self) -> None:
        self.ns.invalidate()
        self.held.clear()

    @rule()
    def forget_namespaces(self) -> None:
        """The server has forgotten the numbers of its namespaces, not their blocks."""
        with self.daemon.lock:
            self.daemon.specs = {number + 1000: spec for number, spec in self.daemon.specs.items()}

    @precondition(lambda self: self.local and not self.leases)
    @rule(fault=st.sampled_from(["truncate", "garbage", "wrong_method"]), path=paths)
    def a_lying_answer(self, fault: str, path: Path_) -> None:
        """The session is given up and the call made again: the answer is right or a miss."""
        setattr(self.daemon.faults, fault, True)
        with self.client.acquire(self.ns, self.tokens(path)) as lease:
            assert lease.blocks in (0, self.known(path))
        for name in ("truncate", "garbage", "wrong_method"):
            setattr(self.daemon.faults, name, False)

    @precondition(lambda self: self.local)
    @rule(path=paths)
    def slots_are_stolen(self, path: Path_) -> None:
        """Between grant and copy the slots get other owners: never data. The fake keeps the blocks, which are stale."""
        if not self.known(path) or self.leases:
            return
        self.daemon.faults.steal = True
        with self.client.acquire(self.ns, self.tokens(path)) as lease:
            assert not lease.copy_to(np.zeros((len(path), self.ns.block_bytes), np.uint8)).ok
        with self.daemon.lock:
            self.daemon.blocks.clear()
        self.held.clear()

    @invariant()
    def accounts_are_closed(self) -> None:
        stats = self.client.stats()
        assert stats.looked_up == stats.hit + sum(stats.missed.values())
        assert all(count >= 0 for count in stats.missed.values())
        assert stats.breaker == "closed"

    @precondition(lambda self: not self.leases)
    @invariant()
    def nothing_is_leased(self) -> None:
        self.client.lookup(self.ns, [1] * BLOCK_TOKENS)
        wait_until(lambda: not self.daemon.leases)


class GrpcClientModel(ClientModel):
    """The same over gRPC."""

    local = False


TestLocal = ClientModel.TestCase
TestLocal.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestGrpc = GrpcClientModel.TestCase
TestGrpc.settings = settings(max_examples=12, stateful_step_count=20, deadline=None)
