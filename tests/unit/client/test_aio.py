"""AsyncClient: the same answers, a loop that never waits, and nothing left behind by a cancelled task."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from prefixcache_client import AsyncClient, ClientOptions, LeaseEndedError, Namespace
from tests.unit.client.conftest import BLOCK_TOKENS, BLOCKS, DIGEST, LAYOUT, TOKENS, block_data
from tests.unit.client.fake_daemon import FakeDaemon, wait_until


@asynccontextmanager
async def opened(daemon: FakeDaemon, **options: Any) -> AsyncIterator[tuple[AsyncClient, Namespace]]:
    async with AsyncClient(f"unix://{daemon.path}", ClientOptions(**({"timeout_s": 10.0} | options))) as client:
        yield client, client.namespace(LAYOUT, DIGEST, block_tokens=BLOCK_TOKENS)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


@pytest.mark.parametrize("local", [True, False])
def test_the_same_surface(daemon: FakeDaemon, *, local: bool) -> None:
    async def work() -> None:
        async with opened(daemon, local_channel=local) as (client, ns):
            data = block_data(ns)
            async with await client.acquire(ns, TOKENS) as lease:
                assert (lease.tokens, lease.reason, bool(lease)) == (0, "not_cached", False)
            assert (await client.store(ns, TOKENS, data)).stored_blocks == BLOCKS
            assert (await client.lookup(ns, TOKENS)).tokens == 96
            target = np.zeros_like(data)
            async with await client.acquire(ns, TOKENS, max_tokens=90, from_token=16) as lease:
                assert (lease.tokens, lease.blocks, lease.parts()) == (80, 5, range(1, 5))
                assert (await lease.copy_to(target)).tokens == 80
                assert await lease.valid()
                async with lease.view(2) as array:
                    assert np.array_equal(array, data[2])
                late = lease.view(3)
            assert np.array_equal(target[1:5], data[1:5])
            wait_until(lambda: daemon.released)
            with pytest.raises(LeaseEndedError):
                await late.__aenter__()
            assert (await asyncio.wrap_future(client.store_later(ns, TOKENS, data))).refused == {
                "already_stored": BLOCKS
            }
            assert client.stats().acquires == 2
            assert client.blocking.lookup(ns, TOKENS).tokens == 96

    run(work())


def test_the_loop_runs_on_while_a_server_is_frozen(daemon: FakeDaemon) -> None:
    async def work() -> None:
        async with opened(daemon, timeout_s=0.5) as (client, ns):
            await client.lookup(ns, TOKENS)
            daemon.faults.thaw.clear()
            call = asyncio.create_task(client.acquire(ns, TOKENS))
            longest, before = 0.0, time.monotonic()
            while not call.done():
                await asyncio.sleep(0)
                now = time.monotonic()
                longest, before = max(longest, now - before), now
            assert (await call).reason == "deadline"
            assert longest < 0.4, "the loop stood still"
            daemon.faults.thaw.set()

    run(work())


def test_a_cancelled_acquire_gives_its_lease_back(daemon: FakeDaemon) -> None:
    async def work() -> None:
        async with opened(daemon) as (client, ns):
            await client.store(ns, TOKENS, block_data(ns))
            daemon.faults.thaw.clear()
            call = asyncio.create_task(client.acquire(ns, TOKENS))
            await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            daemon.faults.thaw.set()
            await client.lookup(ns, TOKENS)
            await asyncio.to_thread(wait_until, lambda: not daemon.leases)
            assert client.stats().leases_left_open == 0

    run(work())


def test_close_before_the_lease_is_left(daemon: FakeDaemon) -> None:
    async def work() -> None:
        async with opened(daemon) as (client, ns):
            await client.store(ns, TOKENS, block_data(ns))
            lease = await client.acquire(ns, TOKENS)
            await client.close()
            lease.release()
            assert not lease._lease.valid()

    run(work())


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_has_threads_of_its_own(daemon: FakeDaemon) -> None:
    client = AsyncClient(f"unix://{daemon.path}", ClientOptions(timeout_s=10.0))
    ns = client.namespace(LAYOUT, DIGEST, block_tokens=BLOCK_TOKENS)

    async def store_and_look() -> int:
        await client.store(ns, TOKENS, block_data(ns))
        return (await client.lookup(ns, TOKENS)).tokens

    assert asyncio.run(store_and_look()) == 96
    pid = os.fork()
    if pid == 0:
        os._exit(0 if asyncio.run(asyncio.wait_for(store_and_look(), 20)) == 96 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    asyncio.run(client.close())
