"""A real daemon in this process, and clients of it on every transport."""

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prefixcache.core import invariants
from prefixcache.server.app import Daemon
from prefixcache.server.config import load
from prefixcache.v1 import cache_pb2 as pb
from prefixcache.v1 import common_pb2 as common
from tests.contract.drivers import Driver, GrpcDriver, LocalDriver

BLOCK_TOKENS = 16
TRANSPORTS = ("uds", "tcp", "local")


def start_daemon(folder: Path, **flags: object) -> Daemon:
    """A daemon with a small pool, listening everywhere, ports chosen by the system."""
    chosen = {
        "socket": str(folder / "d.sock"), "listen": "127.0.0.1:0", "http": "127.0.0.1:0", "host_bytes": "8MiB",
        "drain_timeout": "1ms",
    }  # fmt: skip
    daemon = Daemon(load({**chosen, **flags}, environ={}))
    daemon.start()
    assert daemon.memory.wait_whole(20)
    return daemon


def stop_daemon(daemon: Daemon) -> None:
    """Stop it, having checked that every rule of the planner still holds."""
    with daemon.owner.lock:
        invariants.check(daemon.planner)
        state, holdings = daemon.planner.state, daemon.shell.holdings
        assert set(holdings.leases) == set(state.leases)
        filling = {key for key, each in state.reservations.items() if not (each.expired or each.ended)}
        assert set(holdings.reservations) == filling
    assert not daemon.owner.failure
    daemon.stop()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon for a file's tests; each test uses a namespace and keys of its own."""
    daemon = start_daemon(tmp_path_factory.mktemp("daemon"))
    yield daemon
    stop_daemon(daemon)


@pytest.fixture(params=TRANSPORTS)
def connect(request: pytest.FixtureRequest, daemon: Daemon) -> Iterator[Callable[[], Driver]]:
    """Makes clients on the transport of this run; they hang up with the test."""
    made: list[Driver] = []

    def make() -> Driver:
        if request.param == "uds":
            driver: Driver = GrpcDriver(f"unix:{daemon.config.socket}")
        elif request.param == "tcp":
            driver = GrpcDriver(daemon.addresses[1])
        else:
            driver = LocalDriver(daemon.place.local_path)
        made.append(driver)
        return driver

    yield make
    for driver in made:
        driver.close()


class Worker:
    """A client with a session and a namespace, and short words for the usual calls."""

    def __init__(self, driver: Driver, spec: common.NamespaceSpec | None = None) -> None:
        self.driver = driver
        self.spec = spec or namespace_spec()
        hello = pb.OpenSessionRequest(client_name="test", protocol_min=1, protocol_max=1)
        self.welcome: pb.OpenSessionResponse = driver.call("OpenSession", hello)
        self.session = self.welcome.session
        opened = driver.call("OpenNamespace", pb.OpenNamespaceRequest(session=self.session, spec=self.spec))
        self.namespace = opened.namespace_id
        self.opened: pb.OpenNamespaceResponse = opened

    def acquire(self, keys: bytes, **fields: Any) -> pb.AcquireResponse:
        fields.setdefault("lease", new_id())
        fields.setdefault("namespace_id", self.namespace)
        answer: pb.AcquireResponse = self.driver.call(
            "Acquire", pb.AcquireRequest(session=self.session, keys=keys, **fields)
        )
        return answer

    def release(self, lease: bytes, used_blocks: int, **fields: Any) -> None:
        request = pb.ReleaseRequest(session=self.session, lease=lease, used_blocks=used_blocks, **fields)
        self.driver.call("Release", request)

    def reserve(self, reservation: bytes, keys: bytes, **fields: Any) -> pb.ReserveResponse:
        fields.setdefault("namespace_id", self.namespace)
        request = pb.ReserveRequest(session=self.session, reservation=reservation, keys=keys, **fields)
        answer: pb.ReserveResponse = self.driver.call("Reserve", request)
        return answer

    def commit(self, reservation: bytes, **fields: Any) -> pb.CommitResponse:
        request = pb.CommitRequest(session=self.session, reservation=reservation, **fields)
        answer: pb.CommitResponse = self.driver.call("Commit", request)
        return answer

    def abort(self, reservation: bytes) -> None:
        self.driver.call("Abort", pb.AbortRequest(session=self.session, reservation=reservation))


@pytest.fixture
def worker(connect: Callable[[], Driver]) -> Worker:
    """A worker in a fresh namespace."""
    return Worker(connect())


def new_id() -> bytes:
    """A lease or reservation id."""
    return secrets.token_bytes(16)


def new_keys(count: int) -> bytes:
    """Keys nobody has used."""
    return secrets.token_bytes(32 * count)


def namespace_spec(**changes: Any) -> common.NamespaceSpec:
    """One full group of 2 layers with 2 heads: 4 KiB a block in one part."""
    group = common.LayerGroup(kind=common.GROUP_KIND_FULL, layers=2, kv_heads=2, k_bytes=32, v_bytes=32)
    part = common.Part(group=0, first_layer=0, layers=2, size_bytes=2 * 2 * BLOCK_TOKENS * 64)
    fields: dict[str, Any] = {
        "fingerprint": secrets.token_bytes(32), "block_tokens": BLOCK_TOKENS, "groups": [group], "parts": [part],
        "label": "test",
    }  # fmt: skip
    return common.NamespaceSpec(**{**fields, **changes})
