"""Chunks between an engine's buffer and a real daemon, which comes and goes."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from prefixcache_client import Client, ClientOptions
from prefixcache_vllm.lanes import Outcome
from prefixcache_vllm.options import Options
from prefixcache_vllm.spilling import Spill
from tests.e2e.processes import DaemonProcess, wait_until

ROW, CHUNKS = 16384, 24
OPTIONS = Options(ask_timeout_s=0.4, load_timeout_s=0.4)


def buffer(seed: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (CHUNKS, ROW), np.uint8)


def spill_to(address: str, rows: npt.NDArray[np.uint8], digest: bytes = b"w" * 32) -> Spill:
    client = Client(address, ClientOptions(timeout_s=OPTIONS.ask_timeout_s, breaker_max_open_s=0.5))
    ns = client.foreign_namespace("vllm", digest, (ROW, 32), form={})
    return Spill(client, client.foreign(ns), rows, OPTIONS)


@pytest.fixture
def spill(daemon: DaemonProcess) -> Iterator[Spill]:
    made = spill_to(f"unix://{daemon.socket}", buffer(1))
    yield made
    made.close()


KEYS = [b"key %d" % number for number in range(8)]
_numbers = iter(range(1_000_000))


def ended(spill: Spill, number: int) -> Outcome:
    found: list[Outcome] = []
    assert wait_until(lambda: found.extend(spill.finished()) or any(each.job.number == number for each in found))
    return next(each for each in found if each.job.number == number)


def stored(spill: Spill, keys: list[bytes], rows: list[int], parents: list[bytes] | None = None) -> Outcome:
    number = next(_numbers)
    spill.store(number, keys, np.array(rows), parents or [])
    return ended(spill, number)


def loaded(spill: Spill, keys: list[bytes], rows: list[int]) -> Outcome:
    number = next(_numbers)
    spill.load(number, keys, np.array(rows))
    return ended(spill, number)


def known(spill: Spill, keys: list[bytes], request: str) -> list[bool | None]:
    def look() -> list[bool | None]:
        answers = [spill.lookups.lookup(key, request) for key in keys]
        spill.lookups.flush()
        return answers

    assert wait_until(lambda: None not in look())
    return look()


def test_there_and_back_into_other_rows(spill: Spill, daemon: DaemonProcess) -> None:
    outcome = stored(spill, KEYS, [9, 3, 0, 22, 5, 7, 8, 1], [b"", *KEYS[:7]])
    assert (outcome.ok, outcome.size_bytes) == (True, 8 * ROW)
    assert stored(spill, KEYS[:2], [9, 3]).ok, "stored already is stored"
    other = spill_to(f"unix://{daemon.socket}", np.zeros((CHUNKS, ROW), np.uint8))
    assert other._rows is not None
    try:
        assert known(other, [*KEYS[:3], b"nobody's"], "r") == [True, True, True, False]
        assert loaded(other, KEYS[:3], [20, 4, 11]).ok
        assert np.array_equal(other._rows[[20, 4, 11]], buffer(1)[[9, 3, 0]])
        assert np.count_nonzero(other._rows.any(axis=1)) == 3
        counts = other.take_counts()
        assert counts == {("loaded", ""): 3, ("not_found", "not_cached"): 1}
        assert not other.take_counts()
    finally:
        other.close()


def test_what_went_away_is_told_key_by_key_and_not_tried_again(spill: Spill) -> None:
    assert stored(spill, KEYS[:2], [0, 1]).ok
    outcome = loaded(spill, [KEYS[1], b"gone", KEYS[0]], [10, 11, 12])
    assert (outcome.ok, outcome.done, outcome.not_done) == (False, [KEYS[1], KEYS[0]], {"not_cached": 1})
    assert spill._rows is not None
    assert np.array_equal(spill._rows[[10, 12]], buffer(1)[[1, 0]])
    assert np.array_equal(spill._rows[11], buffer(1)[11])
    assert known(spill, [KEYS[0]], "r") == [True]
    spill.lookups.missed([KEYS[0]])
    assert known(spill, [KEYS[0]], "r") == [False]
    assert stored(spill, [KEYS[0]], [0]).ok
    assert known(spill, [KEYS[0]], "r") == [True], "a store corrects it"


def test_a_reset_forgets_everything(spill: Spill) -> None:
    assert stored(spill, KEYS, list(range(8))).ok
    assert known(spill, KEYS, "r") == [True] * 8
    spill.reset()
    assert known(spill, KEYS, "r") == [False] * 8
    assert not loaded(spill, KEYS, list(range(8))).done


def test_a_full_daemon_stores_some_and_says_why_not_the_others(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    daemon = DaemonProcess(tmp_path / "small", host_bytes="2MiB")
    spill = spill_to(f"unix://{daemon.socket}", np.ones((400, ROW), np.uint8))
    try:
        keys = [b"%d" % number for number in range(400)]
        outcome = stored(spill, keys, list(range(400)))
        assert not outcome.ok
        assert 0 < len(outcome.done) < 400
        assert outcome.not_done == {"pool_full": 400 - len(outcome.done)}
        assert loaded(spill, outcome.done, list(range(len(outcome.done)))).ok
    finally:
        spill.close()
        daemon.kill()


def test_what_a_restarted_daemon_has_on_disk(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    disk = f"--disk={tmp_path / 'data'}"
    daemon = DaemonProcess(tmp_path / "d", disk)
    spill = spill_to(f"unix://{daemon.socket}", buffer(1))
    try:
        assert stored(spill, KEYS, list(range(8)), [b"", *KEYS[:7]]).ok
        daemon.terminate()  # writes what only memory has
        daemon = DaemonProcess(tmp_path / "d", disk)

        def asked_anew() -> list[bool | None]:
            spill.lookups.finished("r")
            return known(spill, KEYS, "r")

        assert wait_until(lambda: asked_anew() == [True] * 8)
        assert wait_until(lambda: loaded(spill, KEYS, list(range(8, 16))).ok)
        assert spill._rows is not None
        assert np.array_equal(spill._rows[8:16], buffer(1)[:8])
    finally:
        spill.close()
        daemon.kill()


def test_a_daemon_that_comes_and_goes(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    spill = spill_to(f"unix://{folder}/d.sock", buffer(1))
    daemon: DaemonProcess | None = None
    requests = iter(f"request {number}" for number in range(10_000))

    def all_fail_in_time() -> None:
        for _ in range(3):
            began = time.monotonic()
            spill.lookups.lookup(KEYS[0], name := next(requests))
            spill.lookups.flush()
            assert known(spill, [KEYS[0]], name) == [False]
            assert not loaded(spill, KEYS[:2], [0, 1]).done
            assert time.monotonic() - began <= 2 * 0.4 + 1.0  # a busy machine is no metronome
            spill.lookups.finished(name)
        assert not stored(spill, KEYS, list(range(8))).done

    def works() -> bool:
        spill.lookups.finished("works")
        return stored(spill, KEYS, list(range(8))).ok and loaded(spill, KEYS[:2], [10, 11]).ok

    try:
        all_fail_in_time()  # never started
        daemon = DaemonProcess(folder)
        assert wait_until(works)
        os.kill(daemon.pid, signal.SIGSTOP)
        all_fail_in_time()
        os.kill(daemon.pid, signal.SIGCONT)
        assert wait_until(works)
        daemon.kill()
        all_fail_in_time()
        daemon = DaemonProcess(folder)
        assert wait_until(works)
        assert spill._rows is not None
        assert np.array_equal(spill._rows[[10, 11]], buffer(1)[[0, 1]])
    finally:
        spill.close()
        if daemon is not None:
            daemon.kill()
