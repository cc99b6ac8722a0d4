"""The SDK's `Nodes` on real daemons: one that holds a prompt, one that holds less, one that is not there yet."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixcache.server.app import Daemon
from prefixcache_client import Client, LookupResult, Namespace, Nodes, ServedNamespace
from prefixcache_client.nodes import NAMESPACES_S, NONE_S, NOT_SERVED
from tests.contract.conftest import start_daemon, stop_daemon
from tests.contract.test_client_watch import prompt, store
from tests.unit.client.conftest import BLOCK_TOKENS, DIGEST, FAST, LAYOUT

LONG, OTHER = prompt(1, 5), prompt(2, 3)


class Clock:
    """Stands still until it is told."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[list[Daemon]]:
    running = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        running.append(start_daemon(tmp_path / name))
    yield running
    for daemon in running:
        stop_daemon(daemon)


def put(daemon: Daemon, tokens: list[int], digest: bytes = DIGEST) -> None:
    """What a worker does, with weights of its own."""
    with Client(f"unix://{daemon.config.socket}", FAST) as client:
        store(client, _namespace(client, digest), tokens)


def _namespace(client: Client, digest: bytes) -> Namespace:
    return client.namespace(LAYOUT, digest, block_tokens=BLOCK_TOKENS)


def test_each_tells_of_its_longest_match(daemons: list[Daemon], tmp_path: Path) -> None:
    one, two = daemons
    put(one, LONG)
    put(two, LONG[: 2 * BLOCK_TOKENS])
    put(two, LONG[: 3 * BLOCK_TOKENS], b"o" * 32)
    addresses = {"two": f"unix://{two.config.socket}", "gone": f"unix://{tmp_path}/gone.sock"}
    addresses["one"] = f"unix://{one.config.socket}"

    async def work() -> dict[str, LookupResult]:
        async with Nodes(addresses, FAST) as nodes:
            assert nodes.names == ["two", "gone", "one"]
            with pytest.raises((TypeError, ValueError)):
                await nodes.lookup(["no", "tokens"])  # type: ignore[arg-type] # that is the mistake
            return await nodes.lookup([*LONG, 7])

    found = asyncio.run(asyncio.wait_for(work(), 60))
    assert [(name, each.tokens) for name, each in found.items()] == [
        ("two", 3 * BLOCK_TOKENS), ("gone", 0), ("one", 5 * BLOCK_TOKENS)
    ]  # fmt: skip
    assert found["one"].tiers == {"host": 5 * BLOCK_TOKENS}
    assert found["gone"].reason == NOT_SERVED


def test_a_namespace_that_opens_later_is_found(daemons: list[Daemon]) -> None:
    one, _ = daemons

    async def work() -> None:
        clock = Clock()
        async with Nodes({"one": f"unix://{one.config.socket}"}, FAST, clock=clock) as nodes:
            assert (await nodes.lookup(LONG))["one"].reason == NOT_SERVED
            await asyncio.to_thread(put, one, LONG)
            assert (await nodes.lookup(LONG))["one"].tokens == 0, "not asked for again at once"
            clock.now += NONE_S
            assert (await nodes.lookup(LONG))["one"].tokens == 5 * BLOCK_TOKENS
            await asyncio.to_thread(put, one, OTHER, b"o" * 32)
            clock.now += NAMESPACES_S  # asked for again, and no request waits for it
            while not (await nodes.lookup(OTHER))["one"]:
                await asyncio.sleep(0)
            assert (await nodes.lookup(LONG))["one"].tokens == 5 * BLOCK_TOKENS

    asyncio.run(asyncio.wait_for(work(), 60))


def test_a_host_that_does_not_answer_takes_a_tenth_of_the_time(daemons: list[Daemon]) -> None:
    clock, asked = Clock(), []

    async def silent(**_: object) -> list[ServedNamespace]:
        asked.append(clock.now)
        clock.now += 1.0
        return []

    async def work() -> None:
        async with Nodes({"far": f"unix://{daemons[0].config.socket}"}, FAST, clock=clock) as nodes:
            nodes._nodes["far"].client.served_namespaces = silent  # type: ignore[method-assign] # a host that is gone
            while clock.now < 200:
                assert (await nodes.lookup(LONG))["far"].reason == NOT_SERVED
                clock.now += 0.5

    asyncio.run(asyncio.wait_for(work(), 60))
    assert 8 <= len(asked) <= 10
