"""Memory that torch may read from but must never be given over a read-only mapping."""

import gc
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch

from prefixcache_offload import transfer, vectored
from prefixcache_offload.engine import EngineTensor, plan
from prefixcache_offload.memory import Memory, is_tensor
from prefixcache_offload.pool import HostPool, MappedPool
from prefixcache_offload.strides import PartShape, Strided

MIB = 1 << 20


@pytest.mark.parametrize("shortest", [0, 1 << 60], ids=["kernel", "torch"])
@pytest.mark.parametrize("patience_s", [1e9, -1e9])
def test_a_read_only_pool_is_read_by_every_way_and_written_by_none(
    monkeypatch: pytest.MonkeyPatch, shortest: int, patience_s: float
) -> None:
    monkeypatch.setattr(transfer, "_PATIENCE_S", patience_s)
    monkeypatch.setattr(vectored, "MIN_PIECE_BYTES", shortest)
    daemon = HostPool.create(1, MIB, MIB, writable=False)
    daemon.data[:] = np.arange(MIB, dtype=np.uint64).view(np.uint8)[:MIB]
    worker = MappedPool.attach(daemon.descriptor, *daemon.export_fds(), writable=False)
    part = PartShape(kv_heads=2, layers=1, tokens=4, k_dim=8, v_dim=8, itemsize=2)
    out = torch.zeros(1, 2, 8, 8, dtype=torch.bfloat16)
    job = plan(part, part.whole(), EngineTensor.of(out, "1htd", "k"), [4, 9], [0, 4])
    pool = Memory.of_bytes(worker.data)
    transfer.load(pool, [job])
    expected = daemon.slot(9, 128)[:64].tobytes()
    assert out[0, 0, 4:].contiguous().view(torch.uint8).numpy().tobytes() == expected
    with pytest.raises(ValueError, match="read-only memory"):
        transfer.store(pool, [job])
    with pytest.raises(ValueError, match="read-only memory"):
        pool.tensor(Strided(0, (1,), (1,)), 1, as_source=False)
    worker.close()
    transfer.load(pool, [job])  # the memory still holds the mapping
    daemon.close()


@pytest.mark.parametrize(
    "view",
    [
        Strided(0, (5,), (2,)),
        Strided(-2, (1,), (2,)),
        Strided(6, (2,), (-2,)),
        Strided(1, (1,), (2,)),
        Strided(0, (2, 2), (8, 2)),
        Strided(0, (2,), (3,)),
    ],
)
def test_views_outside_the_memory_are_refused_for_torch(view: Strided) -> None:
    memory = Memory.of_bytes(np.zeros(8, np.uint8))
    with pytest.raises(ValueError, match=r"reaches out|forward steps"):
        memory.tensor(view, 2, as_source=True)


def test_views_outside_the_memory_are_refused_for_numpy() -> None:
    memory = Memory.of_bytes(np.zeros(8, np.uint8))
    for view in (Strided(0, (5,), (2,)), Strided(0, (2, 2), (8, 2)), Strided(2**40, (1,), (2,))):
        with pytest.raises((ValueError, TypeError)):
            memory.array(view, 2)
    with pytest.raises(ValueError, match="described by"):
        Memory.of_bytes(np.zeros((2, 8), np.uint8))


@pytest.mark.parametrize("index", [np.s_[:], np.s_[::-1, ::2], np.s_[1:, 3], np.s_[0:0]])
def test_any_array_is_found_in_its_memory(index: tuple[slice, ...]) -> None:
    array = np.arange(5 * 7, dtype=np.uint16).reshape(5, 7)[index]
    memory, place = Memory.of_array(array)
    assert np.array_equal(memory.array(place, 2), array)
    if array.size:
        memory.array(place, 2)[...] = 9
        assert (array == 9).all()


def test_memory_keeps_the_array_alive_and_no_longer() -> None:
    array = np.zeros(10, np.uint16)
    gone = weakref.ref(array)
    memory, place = Memory.of_array(array)
    view = memory.array(place, 2)
    del array, memory
    gc.collect()
    assert gone() is not None
    del view
    gc.collect()
    assert gone() is None


def test_read_only_arrays_stay_read_only() -> None:
    array = np.zeros(4, np.uint16)
    array.setflags(write=False)
    memory, place = Memory.of_array(array)
    assert not memory.array(place, 2).flags.writeable


def test_tensors_are_told_from_arrays() -> None:
    assert is_tensor(torch.zeros(1))
    assert not is_tensor(np.zeros(1))


def test_nothing_that_clients_import_brings_torch_or_xxhash() -> None:
    """`disk` is the daemon's alone."""
    code = (
        "import sys, pkgutil, importlib, prefixcache_offload as p\n"
        "names = [m.name for m in pkgutil.iter_modules(p.__path__) if m.name != 'disk']\n"
        "[importlib.import_module('prefixcache_offload.' + name) for name in names]\n"
        "assert not {'torch', 'xxhash', 'prefixcache'} & set(sys.modules), 'imported too much'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
