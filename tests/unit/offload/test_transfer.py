"""How a transfer is done: numpy while the interpreter is free, in one go when it proves busy, torch for devices."""

import errno
import sys
from typing import Any

import numpy as np
import pytest

from prefixcache_offload import transfer, vectored
from prefixcache_offload.engine import EngineTensor, Job, Move, plan
from prefixcache_offload.memory import Memory
from prefixcache_offload.strides import PartShape, Strided

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


def test_a_busy_interpreter_is_asked_a_few_times_more_only(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_clock(monkeypatch)
    monkeypatch.setattr(vectored, "MIN_PIECE_BYTES", 16 * 64 * 2)
    case = Case()
    kernel, copies = count(monkeypatch, vectored, "copy"), count(monkeypatch, np, "copyto")
    transfer.store(Memory.of_bytes(case.pool), [case.job])
    assert case.stored()
    assert (kernel, copies) == ([1], [1] * transfer._SLOW_IN_A_ROW)


def test_a_copy_that_waited_for_a_core_now_and_then_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three are slow, never three in a row."""
    ticks = (float(i - i // 3) for i in range(10**6))
    monkeypatch.setattr(transfer._by_numpy, "__kwdefaults__", {"clock": lambda: next(ticks)})
    case = Case()
    kernel, torch_calls = count(monkeypatch, vectored, "copy"), count(monkeypatch, transfer, "_by_torch")
    transfer.store(Memory.of_bytes(case.pool), [case.job])
    assert case.stored()
    assert (kernel, torch_calls) == ([], [])


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


def whole_slots(target: np.ndarray, slots: list[int], rows: list[int], size: int) -> Job:
    memory, place = Memory.of_array(target)
    moves: list[Any] = [
        Move(Strided(slot * 4096, (4, size // 8), (size // 4, 2)), Strided(row * size, (4, size // 8), (size // 4, 2)))
        for slot, row in zip(slots, rows, strict=True)
    ]
    assert place.offset == 0
    return Job(memory, moves, 2)


@pytest.mark.parametrize("slots", [[7, 3, 5], [2, 4, 6], [1, 8, 3]])
def test_whole_slots_beside_one_stretch_are_one_call(monkeypatch: pytest.MonkeyPatch, slots: list[int]) -> None:
    pool = np.random.default_rng(4).integers(0, 256, 10 * 4096, dtype=np.uint8)
    flat = np.zeros((3, 8192), np.uint8)
    copies = count(monkeypatch, np, "copyto")
    job = whole_slots(flat, slots, [0, 1, 2], 8192)
    assert transfer.load(Memory.of_bytes(pool), [job]) == 3 * 8192
    for row, slot in enumerate(slots):
        assert np.array_equal(flat[row], pool[slot * 4096 : slot * 4096 + 8192])
    flat[:] = np.arange(3, dtype=np.uint8)[:, None]
    transfer.store(Memory.of_bytes(pool), [job])
    assert [int(pool[slot * 4096 : slot * 4096 + 8192].sum()) for slot in slots] == [0, 8192, 16384]
    assert copies == []
    with pytest.raises(IndexError):
        transfer.load(Memory.of_bytes(pool), [whole_slots(flat, [0, 9], [0, 1], 8192)])


def test_whole_slots_in_another_order_are_moved_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_PATIENCE_S", 1e9)
    pool = np.random.default_rng(4).integers(0, 256, 10 * 4096, dtype=np.uint8)
    flat = np.zeros((3, 8192), np.uint8)
    copies = count(monkeypatch, np, "copyto")
    transfer.load(Memory.of_bytes(pool), [whole_slots(flat, [1, 3, 7], [2, 0, 1], 8192)])
    for row, slot in ((2, 1), (0, 3), (1, 7)):
        assert np.array_equal(flat[row], pool[slot * 4096 : slot * 4096 + 8192])
    assert len(copies) == 3


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
