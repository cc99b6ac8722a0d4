"""The host pool as the daemon keeps it."""

import errno
import threading
from pathlib import Path

import pytest

from prefixcache.server.config import Config, load
from prefixcache.server.memory import HostMemory, slab_bytes, warm_place

MIB = 1 << 20


def config(tmp_path: Path, **flags: object) -> Config:
    return load({"socket": str(tmp_path / "d.sock"), "host_bytes": "4MiB", **flags}, environ={}).config


@pytest.mark.parametrize(
    ("pool", "slab"),
    [("4GiB", 64 * MIB), ("256MiB", 16 * MIB), ("8MiB", 2 * MIB), ("1MiB", MIB), ("64GiB", 64 * MIB)],
)
def test_a_pool_is_cut_into_slabs_of_its_size(tmp_path: Path, pool: str, slab: int) -> None:
    assert slab_bytes(config(tmp_path, host_bytes=pool)) == slab
    assert slab_bytes(config(tmp_path, host_bytes=pool, host_slab_bytes="128KiB")) == 128 << 10


def test_it_becomes_ready_in_the_background(tmp_path: Path) -> None:
    memory = HostMemory(config(tmp_path, host_bytes=str(4 * MIB + 100)))
    whole = threading.Event()
    memory.start(lambda ready: whole.set() if ready == memory.size_bytes else None)
    assert whole.wait(20)
    assert memory.wait_whole(20)
    assert memory.size_bytes == 4 * MIB
    assert memory.state() == ("on", "")
    assert not memory.is_growing()
    memory.close()


def test_memory_that_runs_out_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr("prefixcache_offload.prefault.populate", refuse)
    memory = HostMemory(config(tmp_path))
    memory.start(lambda _: None)
    assert not memory.wait_whole(20)
    state, detail = memory.state()
    assert state == "failing"
    assert "smaller host_bytes" in detail
    memory.close()


def test_each_socket_has_a_warm_place_of_its_own(tmp_path: Path) -> None:
    one = warm_place(config(tmp_path, warm_dir="/dev/shm"))
    other = warm_place(config(tmp_path, socket=str(tmp_path / "e.sock"), warm_dir="/dev/shm"))
    assert one.pool_path != other.pool_path
    assert one == warm_place(config(tmp_path, warm_dir="/dev/shm"))
