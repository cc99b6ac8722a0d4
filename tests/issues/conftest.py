"""A daemon process with room for 16 of the workers' blocks, and a client of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixcache_client import Client, ClientOptions, Namespace
from tests.e2e.processes import DaemonProcess, wait_until
from tests.issues.workers import BLOCK_BYTES, TOKENS, bytes_of, namespace

POOL_BLOCKS = 16
PATIENT = ClientOptions(timeout_s=20, store_timeout_s=20, breaker_open_s=0.02, breaker_max_open_s=0.1)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    running = DaemonProcess(tmp_path, host_bytes=str(POOL_BLOCKS * BLOCK_BYTES))
    yield running
    running.kill()


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[Client]:
    with Client(f"unix://{daemon.socket}", PATIENT) as made:
        yield made


@pytest.fixture
def ns(client: Client) -> Namespace:
    return namespace(client)


def store_soon(client: Client, ns: Namespace, tokens: list[int], seed: int) -> bool:
    """Store whole blocks of `tokens` until all of them are cached: memory may not be ready, slots may still be held."""
    data = bytes_of(seed, len(tokens) // ns.block_tokens)

    def stored() -> bool:
        client.store(ns, tokens, data)
        return client.lookup(ns, tokens).tokens == len(tokens)

    return wait_until(stored)


__all__ = ["PATIENT", "POOL_BLOCKS", "TOKENS", "store_soon"]
