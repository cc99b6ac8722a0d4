"""Ranks in processes of their own store one prompt together, with a real daemon; one of them is killed or stopped."""

import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from prefixcache_client import Client, ClientOptions
from prefixcache_offload.checksum import checksum
from tests.e2e.processes import DaemonProcess, wait_until
from tests.e2e.rank_worker import BLOCKS, SIZE, RankTensors, namespace, pages_of, tokens_of
from tests.e2e.test_daemon_process import stats_of

pytestmark = pytest.mark.slow


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    daemon = DaemonProcess(tmp_path)
    yield daemon
    daemon.kill()


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[Client]:
    with Client(f"unix://{daemon.socket}", ClientOptions(timeout_s=20, store_timeout_s=20)) as client:
        yield client


class RankProcess:
    """A rank that does what it is told."""

    def __init__(self, child: "subprocess.Popen[str]") -> None:
        self.child = child
        assert self.heard() == "ready"

    def tell(self, *words: object) -> None:
        assert self.child.stdin is not None
        print(*words, file=self.child.stdin, flush=True)

    def heard(self) -> str:
        assert self.child.stdout is not None
        return self.child.stdout.readline().strip()


@contextmanager
def ranks(daemon: DaemonProcess, count: int, hanging: int = -1, codec: str = "raw") -> Iterator[list[RankProcess]]:
    """All ranks of an engine; `hanging`: the one that stops between its copy and its commit."""
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.rank_worker", str(daemon.socket), str(rank), str(count), codec]
            + (["hang"] if rank == hanging else []),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(count)
    ]  # fmt: skip
    try:
        yield [RankProcess(child) for child in started]
    finally:
        for child in started:
            child.kill()
            child.communicate()


def ticket() -> str:
    return secrets.token_bytes(16).hex()


def loaded(client: Client, seed: int) -> int:
    """How many blocks are there, all with the right bytes of every head."""
    wanted = pages_of(seed)
    got = RankTensors([np.zeros_like(each) for each in wanted], 0, 1)
    with client.acquire(namespace(client), tokens_of(seed)) as lease:
        if not lease.tokens:
            return 0
        views = RankTensors(got.layers, 0, 1)
        result = lease.copy_to(views)
        assert result.ok, result.reason
        blocks = result.tokens // SIZE
    kept = [page[BLOCKS - blocks :] for page in got.layers[:2]]
    assert all(np.array_equal(a, b[BLOCKS - blocks :]) for a, b in zip(kept, wanted[:2], strict=True))
    window = slice(BLOCKS - blocks, BLOCKS - blocks + 2)
    assert np.array_equal(got.layers[2][window], wanted[2][window])
    return blocks


def canonical(client: Client, seed: int, codec: str = "raw") -> list[bytes]:
    """Digests of the first part of every stored block, as the daemon has it."""
    with client.acquire(namespace(client, codec=codec), tokens_of(seed)) as lease:
        found = []
        for block in range(lease.tokens // SIZE):
            with lease.view(block) as data:
                found.append(checksum(data))
        return found


def nothing_held(daemon: DaemonProcess) -> bool:
    tier = stats_of(daemon).tiers[0]
    return not (tier.filling_bytes or tier.quarantined_bytes)


def skipped(daemon: DaemonProcess, label: str) -> int:
    counters = stats_of(daemon).counters
    return sum(each.value for each in counters if (each.name, each.label) == ("blocks_skipped", label))


@pytest.mark.parametrize(("count", "codec"), [(2, "raw"), (4, "raw"), (8, "raw"), (4, "int8"), (8, "int4")])
def test_ranks_store_the_bytes_that_one_process_would(
    daemon: DaemonProcess, client: Client, count: int, codec: str
) -> None:
    """With 8 ranks each head is on two of them."""
    with ranks(daemon, count, codec=codec) as engine:
        name = ticket()
        for rank in engine:
            rank.tell("store", name, 1)
        told = [rank.heard().split() for rank in engine]
    assert sorted(int(each[0]) for each in told) == [0] * (count - 1) + [BLOCKS]
    assert {each[1] for each in told} == {"-"}
    if codec == "raw":
        assert loaded(client, 1) == BLOCKS
    together = canonical(client, 1, codec)
    assert len(together) == BLOCKS
    client.store(namespace(client, codec=codec), tokens_of(2), RankTensors(pages_of(1), 0, 1))
    assert canonical(client, 2, codec) == together
    assert nothing_held(daemon)


def test_a_rank_that_is_killed_in_mid_store(daemon: DaemonProcess, client: Client) -> None:
    with ranks(daemon, 2, hanging=1) as (first, second):
        name = ticket()
        second.tell("store", name, 3)
        assert second.heard() == "copied"
        first.tell("store", name, 3)
        assert first.heard() == "0 -"
        second.child.kill()
        assert wait_until(lambda: nothing_held(daemon))
        assert skipped(daemon, "worker_gone") == BLOCKS
        assert loaded(client, 3) == 0
        first.tell("store", name, 3)
        assert first.heard().split()[:2] == ["0", "reservation_expired"]
    client.store(namespace(client), tokens_of(3), RankTensors(pages_of(3), 0, 1))
    assert loaded(client, 3) == BLOCKS


def test_a_rank_that_is_stopped_in_mid_store(daemon: DaemonProcess, client: Client) -> None:
    """It goes on writing afterwards: its slots wait for it, the keys do not."""
    with ranks(daemon, 2, hanging=0) as (first, second):
        name = ticket()
        first.tell("store", name, 3)
        assert first.heard() == "copied"
        second.tell("store", name, 3)
        assert second.heard() == "0 -"
        first.child.send_signal(signal.SIGSTOP)
        assert wait_until(lambda: stats_of(daemon).tiers[0].quarantined_bytes > 0), "its time is over"
        assert skipped(daemon, "reservation_expired") == BLOCKS
        client.store(namespace(client), tokens_of(3), RankTensors(pages_of(3), 0, 1))
        first.child.send_signal(signal.SIGCONT)
        first.tell("go on")
        assert first.heard().split()[:2] == ["0", "reservation_expired"]
        assert wait_until(lambda: nothing_held(daemon))
        assert loaded(client, 3) == BLOCKS


def test_a_rank_that_gives_up(daemon: DaemonProcess, client: Client) -> None:
    with ranks(daemon, 2) as (first, second):
        for order in ((first, second), (second, first)):
            name = ticket()
            order[0].tell("give_up", name)
            assert order[0].heard() == "given up"
            order[1].tell("store", name, 4)
            said = order[1].heard().split()
            assert said[0] == "0"
            assert said[1] in ("-", "reservation_expired"), "its abort may come behind the other's commit"
            assert wait_until(lambda: nothing_held(daemon))
            assert loaded(client, 4) == 0
