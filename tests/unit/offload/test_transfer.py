"""How a transfer is done: numpy while the interpreter is free, in one go when it proves busy, torch for devices."""

import errno
import sys
from typing import Any

import numpy as np
import pytest

from prefixcache_offload import transfer, vectored
from prefixcache_offload.engine import EngineTensor, Job, plan
from prefixcache_offload.memory import Memory
from prefixcache_offload.strides import PartShape

PART = PartShape(kv_heads=2, layers=1, tokens=16, k_dim=64, v_dim=64, itemsize=2)
BLOCKS = 6


class Case:
    """One tensor of six blocks whose slots are in no order, so that every block is a move of its own."""

    def __init__(self) -> None:
        self.tensor = np.random.default_rng(1).integers(0, 60000, (1, 2, 16 * BLOCKS, 64), dtype=np.uint16)
        self.pool = np.zeros(20 * PART.part_bytes, np.uint8)
        self.slots = [9, 1, 14, 4, 12, 6]
        places = [16 * i for i in range(BLOCKS)]
        self.job: Job = plan(PART, PART.whole(), EngineTensor.of(self.tensor, "1htd", "k"), self.slots, places)

    def stored(self) -> bool:
        for i, slot in enumerate(self.slots):
            view = PART.view("k", PART.whole()).moved(slot * 4096)
            wanted = self.tensor[0, :, None, 16 * i : 16 * i + 16]
            if not np.array_equal(Memory.of_bytes(self.pool).array(view, 2), wanted):
                return False
        return True


def count(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[int]:
    calls: list[int] = []
    real = getattr(module, name)

    def counting(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        return real(*arguments, **named)

    monkeypatch.setattr(module, name, counting)
    return calls


def slow_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock by which every move takes a second, as beside a busy interpreter."""
    ticks = iter(range(10**6))
    monkeypatch.setattr(transfer._by_numpy, "__kwdefaults__", {"clock": lambda: float(next(ticks))})


def test_a_free_interpreter_is_left_to_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_PATIENCE_S", 1e9)
    case = Case()
    kernel, torch_calls = count(monkeypatch, vectored, "copy"), count(monkeypatch, transfer, "_by_torch")
    assert transfer.store(Memory.of_bytes(case.pool), [case.job]) == case.tensor.nbytes
    assert case.stored()
    assert (kernel, torch_calls) == ([], [])


def test_a_busy_interpreter_is_asked_once_more_only(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_clock(monkeypatch)
    monkeypatch.setattr(vectored, "MIN_PIECE_BYTES", 16 * 64 * 2)
    case = Case()
    kernel, copies = count(monkeypatch, vectored, "copy"), count(monkeypatch, np, "copyto")
    transfer.store(Memory.of_bytes(case.pool), [case.job])
    assert case.stored()
    assert (kernel, copies) == ([1], [1])


def test_short_stretches_go_by_torch_if_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_clock(monkeypatch)
    monkeypatch.setattr(vectored, "MIN_PIECE_BYTES", 16 * 64 * 2 + 1)
    import torch

    assert torch.get_num_threads() > 0
    case = Case()
    kernel, torch_calls = count(monkeypatch, vectored, "copy"), count(monkeypatch, transfer, "_by_torch")
    transfer.store(Memory.of_bytes(case.pool), [case.job])
    assert case.stored()
    assert (kernel, torch_calls) == ([], [1])
    monkeypatch.delitem(sys.modules, "torch")
    other = Case()
    transfer.store(Memory.of_bytes(other.pool), [other.job])
    assert other.stored()
    assert (kernel, torch_calls) == ([], [1])


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
def test_a_sandbox_that_forbids_the_call_costs_only_time(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    slow_clock(monkeypatch)

    def forbidden(*arguments: object) -> None:
        raise OSError(code, "not here")

    monkeypatch.setattr(vectored, "copy", forbidden)
    case = Case()
    transfer.store(Memory.of_bytes(case.pool), [case.job])
    assert case.stored()


def test_thousands_of_pieces_in_a_few_calls() -> None:
    source = np.random.default_rng(2).integers(0, 256, 3000 * 8, dtype=np.uint8)
    target = np.zeros_like(source)
    order = np.random.default_rng(3).permutation(3000)
    base_from, base_to = source.ctypes.data, target.ctypes.data
    vectored.copy(base_to + np.arange(3000) * 8, base_from + order * 8, np.full(3000, 8))
    assert np.array_equal(target.reshape(-1, 8), source.reshape(-1, 8)[order])
    vectored.copy(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64))


def test_memory_that_may_not_be_touched_is_an_error_and_no_signal() -> None:
    target = np.zeros(8, np.uint8)
    with pytest.raises(OSError, match="Bad address"):
        vectored.copy(np.array([target.ctypes.data]), np.array([4096]), np.array([8]))
