"""Real daemons in this process, and clients of them on every transport."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from prefixcache.server.app import Daemon
from prefixcache_client import Client, ClientOptions
from tests.contract.conftest import start_daemon

KINDS = ("local", "read_only", "uds", "tcp")


@contextmanager
def two_daemons(factory: pytest.TempPathFactory) -> Iterator[dict[str, Daemon]]:
    """One that workers may write to by mapping, and one that they may only read."""
    folders: dict[str, Path] = {name: factory.mktemp(name) for name in ("writable", "read_only")}
    running = {
        "writable": start_daemon(folders["writable"]),
        "read_only": start_daemon(folders["read_only"], host_writable="false"),
    }
    yield running
    for daemon in running.values():
        daemon.stop()
        assert daemon.planner.state.stats.tokens.is_closed()


@contextmanager
def client_on(kind: str, daemons: dict[str, Daemon]) -> Iterator[Client]:
    """A client on one of KINDS, which may neither fail nor connect again."""
    daemon = daemons["read_only" if kind == "read_only" else "writable"]
    address = daemon.addresses[1] if kind == "tcp" else f"unix://{daemon.config.socket}"
    options = ClientOptions(timeout_s=20, store_timeout_s=20, local_channel=kind in ("local", "read_only"))
    with Client(address, options) as made:
        yield made
        assert made.stats().connects == 1
        assert made.stats().failures == {}


def digest_of_test(request: pytest.FixtureRequest) -> bytes:
    """A weights digest of the test's own."""
    name: str = request.node.name
    return name.encode().ljust(32, b".")[:24] + random.randbytes(8)
