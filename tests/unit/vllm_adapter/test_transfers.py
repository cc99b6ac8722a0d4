"""Loads and saves behind the steps: each ends once, letting go waits for no daemon, drops are counted."""

import threading
from collections.abc import Iterator

import pytest

from prefixcache_client import CopyResult, StoreResult
from prefixcache_client.errors import Failure
from prefixcache_vllm.transfers import CALLED_OFF, SaveTask, Transfers
from tests.e2e.processes import wait_until

OK = CopyResult(ok=True, tokens=64, size_bytes=10)


@pytest.fixture
def transfers() -> Iterator[Transfers]:
    made = Transfers(2, lambda: None)
    yield made
    made.close(5.0)


def ended(transfers: Transfers, count: int) -> dict[str, CopyResult]:
    found: dict[str, CopyResult] = {}
    assert wait_until(lambda: found.update(transfers.ended()) or len(found) >= count)
    return found


def stored(task: SaveTask) -> StoreResult:
    """What the SDK does: the copy inside of `hold`, whose failure is a result."""
    try:
        with task.hold():
            return StoreResult(1, 64, 10)
    except Failure as failure:
        return StoreResult(0, 0, 0, {failure.reason: task.blocks}, failure.reason)


def test_a_load_ends_once_whatever_happens(transfers: Transfers) -> None:
    def broken() -> CopyResult:
        raise ValueError("tensors that do not fit")

    transfers.load("a", lambda: OK)
    transfers.load("b", broken)
    found = ended(transfers, 2)
    assert found["a"] is OK
    assert not found["b"].ok
    counts = transfers.take_counts()
    assert (counts.loads, counts.load_bytes, counts.loads_failed) == (2, 10, {"internal": 1})
    assert transfers.take_counts().loads == 0


def test_letting_go_waits_for_a_copy_and_for_nothing_else(transfers: Transfers) -> None:
    copying, let = threading.Event(), threading.Event()

    def slow(task: SaveTask) -> StoreResult:
        with task.hold():
            copying.set()
            assert let.wait(10)
        return StoreResult(1, 64, 10)

    transfers.save("a", 1, slow)
    transfers.save("b", 3, stored)
    assert copying.wait(10)
    transfers.let_go("b")  # has not begun: called off at once, though the daemon keeps the thread busy
    waiting = threading.Thread(target=transfers.let_go, args=["a"])
    waiting.start()
    assert waiting.is_alive()
    let.set()
    waiting.join(10)
    assert wait_until(lambda: not transfers.saving("a") and not transfers.saving("b"))
    counts = transfers.take_counts()
    assert (counts.saved_blocks, counts.not_saved_blocks) == (1, {CALLED_OFF: 3})


def test_too_many_saves_are_dropped(transfers: Transfers) -> None:
    let = threading.Event()

    def waiting(task: SaveTask) -> StoreResult:
        assert let.wait(10)
        return stored(task)

    for name in ("a", "a", "b"):
        transfers.save(name, 5, waiting)
    assert transfers.saving("a")
    assert not transfers.saving("b")
    let.set()
    assert wait_until(lambda: not transfers.saving("a"))
    assert transfers.take_counts().not_saved_blocks == {"queue_full": 5}


def test_a_save_that_breaks_ends(transfers: Transfers) -> None:
    def broken(task: SaveTask) -> StoreResult:
        raise RuntimeError("no memory")

    transfers.save("a", 4, broken)
    assert wait_until(lambda: not transfers.saving("a"))
    assert transfers.take_counts().not_saved_blocks == {"internal": 4}


def test_numbers_that_nobody_takes_do_not_grow_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixcache_vllm.transfers.MAX_VISIBLE", 4)
    transfers = Transfers(8, lambda: None)
    for number in range(10):
        assert transfers.save("r", 1, lambda task: StoreResult(1, 0, 0, {}), number)
        assert wait_until(lambda: not transfers.busy)
    assert transfers.take_visible() == [6, 7, 8, 9]
    transfers.close(1.0)
