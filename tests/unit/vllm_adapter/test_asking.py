"""Asking a real daemon behind the scheduler's back: answers, hints, leases given back whoever comes first."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from prefixcache_client import Blocks, Client, ClientOptions
from prefixcache_vllm.asking import Ask, DaemonAsker, Hint, Question
from tests.e2e.processes import DaemonProcess, wait_until
from tests.unit.vllm_adapter.fakes import NAMESPACE, SIZE

TOKENS = list(range(1, 5 * SIZE + 10))
KEYS = NAMESPACE.hash(TOKENS).keys


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    process = DaemonProcess(tmp_path_factory.mktemp("daemon"))
    yield process
    process.kill()


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[Client]:
    with Client(f"unix://{daemon.socket}", ClientOptions(timeout_s=5.0)) as made:
        made.store(NAMESPACE, TOKENS, Blocks(np.ones((5, NAMESPACE.block_bytes), np.uint8)))
        yield made


@pytest.fixture
def asker(client: Client) -> Iterator[DaemonAsker]:
    made = DaemonAsker(client, 5.0, 1.0)
    yield made
    made.close()


def question(keys: bytes = KEYS) -> Question:
    return Question(NAMESPACE, keys, len(TOKENS), SIZE, 4 * SIZE)


def answered(ask: Ask) -> bool:
    return wait_until(lambda: ask.answer() is not None)


def leases(client: Client) -> int:
    """Tokens leased by this client and not accounted for yet show as hits that were not taken back."""
    return client.stats().hit


def test_found_and_given_back(asker: DaemonAsker, client: Client) -> None:
    ask = Ask(question())
    asker.submit(ask)
    assert answered(ask)
    found = ask.answer()
    assert found is not None
    assert found.ticket is not None
    assert (found.ticket.from_block, found.ticket.blocks) == (1, 4)
    assert asker.pool_bytes > 0
    asker.give_back(ask, 4 * SIZE)
    assert wait_until(lambda: ask.forget() is None and leases(client) == 3 * SIZE)


def test_nothing_found(asker: DaemonAsker) -> None:
    ask = Ask(question(bytes(64)))
    asker.submit(ask)
    assert answered(ask)
    found = ask.answer()
    assert found is not None
    assert found.ticket is None
    assert found.reason


def test_a_lease_nobody_waits_for_is_released(asker: DaemonAsker, client: Client) -> None:
    asks = [Ask(question()) for _ in range(20)]
    for ask in asks:
        asker.submit(ask)
        asker.give_back(ask, 0)
    assert wait_until(lambda: client.stats().acquires >= 20 and leases(client) == 0)
    assert client.stats().leases_left_open == 0


def test_hints_stop_where_there_is_no_slower_tier(asker: DaemonAsker) -> None:
    asker.hint(Hint(question(bytes(64))))
    asker.hint(Hint(question()))
    after = Ask(question())
    asker.submit(after)
    assert answered(after)


def test_prefetch_tells_what_is_in_memory(client: Client) -> None:
    found = client.prefetch(NAMESPACE, TOKENS)
    assert (found.tokens, found.ready_tokens) == (0, 5 * SIZE)
    assert not found


def test_prefetch_without_a_daemon(tmp_path: Path) -> None:
    with Client(f"unix://{tmp_path}/nobody") as lost:
        assert lost.prefetch(NAMESPACE, TOKENS).reason
