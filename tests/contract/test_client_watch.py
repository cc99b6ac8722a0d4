"""The SDK's watch and its router's calls on a real daemon: over a restart, beside real stores and evictions."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from prefixcache.server.app import Daemon
from prefixcache_client import Client, KnownBlocks, Namespace, Watch
from prefixcache_client.events import EventKind, WatchEvent
from tests.contract.conftest import start_daemon, stop_daemon
from tests.e2e.processes import wait_until
from tests.unit.client.conftest import BLOCK_TOKENS, DIGEST, FAST, LAYOUT


class Follower:
    """A thread that follows a watch, as a router would."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.known = KnownBlocks()
        self.events: queue.Queue[WatchEvent] = queue.Queue()
        self.lock = threading.Lock()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        for event in self.watch:
            with self.lock:
                self.known.apply(event)
            self.events.put(event)

    def knows(self, ns: Namespace, tokens: list[int]) -> int:
        with self.lock:
            return self.known.leading(ns.epoch.fingerprint, ns.hash(tokens).keys) * BLOCK_TOKENS

    def close(self) -> None:
        self.watch.close()
        self.thread.join(20)
        assert not self.thread.is_alive()


def prompt(seed: int, blocks: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(1, 50_000, blocks * BLOCK_TOKENS)]


def store(client: Client, ns: Namespace, tokens: list[int]) -> None:
    blocks = len(tokens) // BLOCK_TOKENS
    data = np.zeros((blocks, ns.block_bytes), np.uint8)
    assert wait_until(lambda: client.store(ns, tokens, data).reason == "")


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with Client(f"unix://{daemon.config.socket}", FAST) as made:
        yield made


def test_what_a_router_knows_is_what_a_lookup_answers(tmp_path: Path) -> None:
    """In a pool that is too small for all of it."""
    daemon = start_daemon(tmp_path, host_bytes="1MiB", host_slab_bytes="64KiB")
    with Client(f"unix://{daemon.config.socket}", FAST) as client:
        ns = client.namespace(LAYOUT, DIGEST, block_tokens=BLOCK_TOKENS)
        follower = Follower(client.watch([ns]))
        prompts = [prompt(seed, 12) for seed in range(40)]
        for tokens in prompts:
            store(client, ns, tokens)
        found = [client.lookup(ns, tokens).tokens for tokens in prompts]
        assert wait_until(lambda: [follower.knows(ns, tokens) for tokens in prompts] == found)
        assert 0 < sum(found) < sum(len(tokens) for tokens in prompts)
        assert follower.known.synced
        follower.close()
    stop_daemon(daemon)


def test_a_watch_goes_on_over_a_restart_of_the_daemon(tmp_path: Path) -> None:
    daemon = start_daemon(tmp_path)
    with Client(f"unix://{daemon.config.socket}", FAST) as client:
        ns = client.namespace(LAYOUT, DIGEST, block_tokens=BLOCK_TOKENS)
        follower = Follower(client.watch([ns], keepalive_s=0.5))
        old, new = prompt(1, 4), prompt(2, 4)
        store(client, ns, old)
        assert wait_until(lambda: follower.knows(ns, old) == len(old))
        stop_daemon(daemon)
        daemon = start_daemon(tmp_path)
        store(client, ns, new)
        assert wait_until(lambda: follower.knows(ns, new) == len(new))
        assert follower.knows(ns, old) == 0
        kinds = [event.kind for event in follower.events.queue]
        assert EventKind.GAP in kinds
        assert follower.watch.connections == 2
        follower.close()
    stop_daemon(daemon)


def test_a_router_without_a_model_finds_the_namespaces(client: Client) -> None:
    ns = client.namespace(LAYOUT, b"r" * 32, block_tokens=BLOCK_TOKENS, label="Llama", cache_salt=b"salt")
    tokens = prompt(3, 5)
    store(client, ns, tokens)
    (served,) = [each for each in client.served_namespaces(cache_salt=b"salt") if each.label == "Llama"]
    assert (served.fingerprint, served.block_tokens) == (ns.epoch.fingerprint, BLOCK_TOKENS)
    found = client.lookup(served, [*tokens, 1, 2, 3])
    assert (found.tokens, found.tiers, found.load_s) == (len(tokens), {"host": len(tokens)}, 0.0)
    chain = ns.chain()
    chain.append(tokens)
    assert client.lookup(served, chain).tokens == len(tokens)
    (unsalted,) = [each for each in client.served_namespaces() if each.label == "Llama"]
    assert client.lookup(unsalted, tokens).tokens == 0


def test_without_a_daemon_a_router_learns_nothing_and_nothing_is_raised(tmp_path: Path) -> None:
    with Client(f"unix://{tmp_path}/nobody.sock", FAST) as client:
        assert client.served_namespaces() == []
        with client.watch() as watch:
            assert watch.next(0.1) is None
