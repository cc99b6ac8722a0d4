"""Asking a real daemon behind the scheduler's back: answers, hints, leases given back whoever comes first."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from prefixcache_client import Blocks, Client, ClientOptions
from prefixcache_client.reasons import INTERNAL
from prefixcache_vllm.asking import Ask, DaemonAsker, Found, Hint, Question
from prefixcache_vllm.chain import RequestChain
from tests.e2e.processes import DaemonProcess, wait_until
from tests.unit.vllm_adapter.fakes import NAMESPACE, SIZE

TOKENS = list(range(1, 5 * SIZE + 10))
OTHERS = [7] * len(TOKENS)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    process = DaemonProcess(tmp_path_factory.mktemp("daemon"))
    yield process
    process.kill()


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[Client]:
    with Client(f"unix://{daemon.socket}", ClientOptions(timeout_s=5.0)) as made:
        blocks = Blocks(np.ones((5, NAMESPACE.block_bytes), np.uint8))

        def stored() -> bool:
            result = made.store(NAMESPACE, TOKENS, blocks)
            return result.stored_blocks == 5 or result.refused == {"already_stored": 5}

        assert wait_until(stored), "a daemon that has just started refuses until it has memory"
        yield made


@pytest.fixture
def asker(client: Client) -> Iterator[DaemonAsker]:
    made = DaemonAsker(client, 5.0, 1.0)
    yield made
    made.close()


def question(tokens: list[int] = TOKENS) -> Question:
    chain = RequestChain(NAMESPACE.epoch.root, NAMESPACE.epoch.fingerprint, SIZE, tokens)
    return Question(NAMESPACE, chain, len(tokens), SIZE, 4 * SIZE)


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
    ask = Ask(question(OTHERS))
    asker.submit(ask)
    assert answered(ask)
    found = ask.answer()
    assert found is not None
    assert found.ticket is None
    assert found.reason


def test_what_found_nothing_wakes_no_thread_again(asker: DaemonAsker) -> None:
    ask = Ask(question(OTHERS))
    asker.submit(ask)
    assert answered(ask)
    for thread in range(len(asker._threads)):
        asker._work.put(None)
        asker._threads[thread].join(5.0)
    while not asker._work.empty():
        asker._work.get()
    asker.give_back(ask, 0)
    assert asker._work.empty()
    lost = Ask(question())
    asker.give_back(lost, 0)
    assert not asker._work.empty(), "its answer may still come"


def test_tokens_that_are_none_end_no_thread(asker: DaemonAsker) -> None:
    for _ in range(5):
        bad = Ask(question([-1] * (2 * SIZE)))
        asker.hint(Hint(bad.question))
        asker.submit(bad)
        assert answered(bad)
        found = bad.answer()
        assert found is not None
        assert (found.ticket, found.reason) == (None, INTERNAL)
    good = Ask(question())
    asker.submit(good)
    assert answered(good)
    asker.give_back(good, 0)


def test_mistakes_end_no_thread() -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("of a kind that nobody thought of")

    client = SimpleNamespace(open=lambda: None, pool_bytes=0, acquire=broken, prefetch=broken)
    asker = DaemonAsker(cast(Client, client), 1.0, 1.0)
    for _ in range(5):  # more than there are threads
        ask = Ask(question())
        asker.hint(Hint(ask.question))
        asker.submit(ask)
        assert answered(ask)
        assert ask.answer() == Found(None, INTERNAL)
    asker.close()


def test_keys_alone_can_be_wished_for(asker: DaemonAsker, client: Client) -> None:
    before = client.stats().acquires
    hint = Hint(question(), only_keys=True)
    asker.hint(hint)
    assert wait_until(lambda: hint.question.chain.made == 5)
    assert client.stats().acquires == before


def test_a_lease_nobody_waits_for_is_released(asker: DaemonAsker, client: Client) -> None:
    asks = [Ask(question()) for _ in range(20)]
    for ask in asks:
        asker.submit(ask)
        asker.give_back(ask, 0)
    assert wait_until(lambda: client.stats().acquires >= 20 and leases(client) == 0)
    assert client.stats().leases_left_open == 0


def test_hints_stop_where_there_is_no_slower_tier(asker: DaemonAsker) -> None:
    asker.hint(Hint(question(OTHERS)))
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
