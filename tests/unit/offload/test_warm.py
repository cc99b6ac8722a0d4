"""Warm restart: survives exactly one graceful stop, exactly once, and is refused clearly when it does not fit."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixcache_offload import warm
from prefixcache_offload.export import PoolDescriptor
from prefixcache_offload.pool import HostPool, MappedPool
from prefixcache_offload.warm import WarmPlace, WarmRefusal, WarmRefused

MIB = 1 << 20
SIZES = (2 * MIB, MIB)
DESCRIPTOR = PoolDescriptor(1, "host", *SIZES, writable=True, sealed=False)


@pytest.fixture
def place() -> Iterator[WarmPlace]:
    with tempfile.TemporaryDirectory(prefix="prefixcache-test-", dir="/dev/shm") as folder:
        yield WarmPlace("one", folder)


def names(place: WarmPlace) -> list[str]:
    return sorted(os.listdir(place.directory))


def saved(place: WarmPlace, snapshot: bytes = b"index") -> None:
    file = warm.create(place, *SIZES)
    pool = HostPool.over(DESCRIPTOR, os.dup(file.fd))
    pool.slot(3, 4096)[:] = 42
    pool.close()
    file.save(snapshot)
    file.close()


def test_bytes_and_snapshot_survive_stop_after_stop(place: WarmPlace) -> None:
    assert warm.attach(place, *SIZES) is None
    file = warm.create(place, *SIZES)
    for round_number in range(3):
        pool = HostPool.over(DESCRIPTOR, os.dup(file.fd))
        worker = MappedPool.attach(DESCRIPTOR, *pool.export_fds(), writable=True, accept_unsealed=True)
        assert int(pool.slot(3, 1)[0]) == round_number
        assert worker.read_generations([3]).tolist() == [0], "generations start anew"
        worker.slot(3, 4096)[:] = round_number + 1
        pool.close()
        file.save(f"snapshot {round_number}".encode())
        file.close()
        assert names(place) == ["one.clean", "one.pool"]
        again = warm.attach(place, *SIZES)
        assert again is not None
        file = again
        assert file.snapshot == f"snapshot {round_number}".encode()
        assert names(place) == ["one.pool"], "the clean mark is used up before a byte is used"
        worker.close()
    file.discard()
    file.close()
    assert names(place) == []


def test_the_mark_is_used_exactly_once(place: WarmPlace) -> None:
    saved(place)
    first = warm.attach(place, *SIZES)
    assert first is not None
    with pytest.raises(WarmRefused) as refused:
        warm.attach(place, *SIZES)
    assert refused.value.reason is WarmRefusal.IN_USE
    first.close()  # as a crash would
    assert warm.attach(place, *SIZES) is None
    assert names(place) == [], "what a crash left is removed by the next start"


OWNER = """
import os, sys
from prefixcache_offload import warm
place = warm.WarmPlace("one", sys.argv[1])
file = warm.attach(place, 2 << 20, 1 << 20) or warm.create(place, 2 << 20, 1 << 20)
print("up", file.snapshot, flush=True)
sys.stdin.readline()
"""


def start_owner(place: WarmPlace) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", OWNER, place.directory]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def kill(owner: "subprocess.Popen[str]") -> None:
    owner.send_signal(signal.SIGKILL)
    owner.communicate()


def test_kill_of_a_fresh_owner_leaves_nothing(place: WarmPlace) -> None:
    owner = start_owner(place)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "up None\n"
    assert names(place) == []
    kill(owner)
    assert names(place) == []


def test_kill_of_a_warm_owner_leaves_nothing_after_the_next_start(place: WarmPlace) -> None:
    saved(place, b"x")
    owner = start_owner(place)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "up b'x'\n"
    with pytest.raises(WarmRefused, match="in_use"):
        warm.attach(place, *SIZES)
    kill(owner)
    assert warm.attach(place, *SIZES) is None
    assert names(place) == []


def test_a_kill_between_the_two_names_is_no_clean_stop(place: WarmPlace) -> None:
    saved(place)
    os.unlink(place.mark_path)
    assert warm.attach(place, *SIZES) is None
    assert names(place) == []
    saved(place)
    os.unlink(place.pool_path)
    assert warm.attach(place, *SIZES) is None
    assert names(place) == []


def damage(place: WarmPlace, offset: int, value: bytes) -> None:
    with open(place.mark_path, "r+b") as file:
        file.seek(offset)
        file.write(value)


def refusal(place: WarmPlace, sizes: tuple[int, int] = SIZES) -> WarmRefusal:
    with pytest.raises(WarmRefused) as refused:
        warm.attach(place, *sizes)
    return refused.value.reason


@pytest.mark.parametrize(
    ("offset", "value", "reason"),
    [
        (0, b"NOTOURS", WarmRefusal.CORRUPT),
        (8, b"\x02", WarmRefusal.BAD_VERSION),
        (16, b"\x01", WarmRefusal.WRONG_SIZE),
        (40, b"\x00\x00\x00\x00\x01", WarmRefusal.CORRUPT),
        (warm._HEAD.size, b"I", WarmRefusal.CORRUPT),
        (warm._HEAD.size + 5, b"more", WarmRefusal.CORRUPT),
    ],
)
def test_a_damaged_mark_is_refused_and_removed(
    place: WarmPlace, offset: int, value: bytes, reason: WarmRefusal
) -> None:
    saved(place)
    damage(place, offset, value)
    assert refusal(place) is reason
    assert names(place) == []


@pytest.mark.parametrize("sizes", [(4 * MIB, MIB), (2 * MIB, 2 * MIB)])
def test_other_sizes_are_refused(place: WarmPlace, sizes: tuple[int, int]) -> None:
    saved(place)
    assert refusal(place, sizes) is WarmRefusal.WRONG_SIZE


def test_a_truncated_mark_or_pool_is_refused(place: WarmPlace) -> None:
    saved(place)
    os.truncate(place.mark_path, 20)
    assert refusal(place) is WarmRefusal.CORRUPT
    saved(place)
    os.truncate(place.pool_path, MIB)
    assert refusal(place) is WarmRefusal.WRONG_SIZE


def test_files_of_others_are_neither_used_nor_removed(place: WarmPlace) -> None:
    saved(place)
    os.chmod(place.pool_path, 0o644)
    assert refusal(place) is WarmRefusal.FOREIGN
    assert names(place) == ["one.clean", "one.pool"]
    os.unlink(place.pool_path)
    os.symlink("one.clean", place.pool_path)
    assert refusal(place) is WarmRefusal.FOREIGN
    os.unlink(place.pool_path)
    os.mkfifo(place.pool_path, 0o600)
    assert refusal(place) is WarmRefusal.FOREIGN


def test_saving_over_somebody_elses_name_is_refused(place: WarmPlace) -> None:
    late = warm.create(place, *SIZES)
    saved(place)
    with pytest.raises(FileExistsError):
        late.save(b"late")
    late.close()
    late.close()
    kept = warm.attach(place, *SIZES)
    assert kept is not None
    assert kept.snapshot == b"index"
    kept.close()


def test_the_folder_must_be_tmpfs_with_room(place: WarmPlace, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no room"):
        warm.create(place, 1 << 44, MIB)
    with pytest.raises(ValueError, match="file name"):
        WarmPlace("../x")
    with open("/proc/mounts") as mounts:
        on_tmpfs = any(line.split()[1:3] == ["/tmp", "tmpfs"] for line in mounts)
    if not on_tmpfs:
        with pytest.raises(OSError):
            warm.create(WarmPlace("x", str(tmp_path)), *SIZES)
