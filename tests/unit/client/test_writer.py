"""The background writer: bounded, in order, and gone when it has nothing to do."""

import threading

import pytest

from prefixcache_client import writer as writer_module
from prefixcache_client.results import StoreResult
from prefixcache_client.writer import Writer
from tests.unit.client.fake_daemon import wait_until

RESULT = StoreResult(1, 16, 100)


def test_in_order_and_bounded() -> None:
    writer, gate, begun, order = Writer(2), threading.Event(), threading.Event(), []

    def work(number: int) -> StoreResult:
        begun.set()
        gate.wait(10)
        order.append(number)
        return RESULT

    first = writer.submit(lambda: work(0))
    assert begun.wait(10), "the first is under way and no longer waiting"
    others = [writer.submit(lambda n=n: work(n)) for n in range(1, 5)]  # type: ignore[misc] # default binds n
    assert [other is not None for other in others] == [True, True, False, False]
    assert writer.waiting == 2
    gate.set()
    assert first is not None
    assert first.result(10) == RESULT
    assert others[1] is not None
    assert others[1].result(10) == RESULT
    assert order == [0, 1, 2]


def test_a_failure_is_its_own() -> None:
    def fail() -> StoreResult:
        raise ValueError("wrong size")

    writer = Writer(4)
    bad, good = writer.submit(fail), writer.submit(lambda: RESULT)
    assert bad is not None
    assert good is not None
    with pytest.raises(ValueError, match="wrong size"):
        bad.result(10)
    assert good.result(10) == RESULT


def test_what_is_dropped_is_cancelled() -> None:
    writer, gate, begun = Writer(4), threading.Event(), threading.Event()

    def wait() -> StoreResult:
        begun.set()
        gate.wait(10)
        return RESULT

    running = writer.submit(wait)
    assert begun.wait(10)
    waiting = writer.submit(lambda: RESULT)
    writer.drain()
    assert waiting is not None
    assert waiting.cancelled()
    gate.set()
    assert running is not None
    assert running.result(10) == RESULT


def test_the_thread_ends_when_idle_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "_IDLE_S", 0.01)
    writer = Writer(4)
    for _ in range(3):
        done = writer.submit(lambda: RESULT)
        assert done is not None
        assert done.result(10) == RESULT
        wait_until(lambda: not writer._running)
