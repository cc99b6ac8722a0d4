"""A short look at how fast the disk reads."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

import pytest

from prefixcache_offload.disk import DiskOptions
from prefixcache_offload.disk.probing import FEWEST, FIRST_BYTES
from prefixcache_offload.disk.seam import Buffer, RealDisk
from prefixcache_offload.disk.tier import DiskTier

MIB = 1 << 20


class SlowDisk(RealDisk):
    """Reads at a given speed, on a clock of its own."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.now = 0.0
        self.reads: list[int] = []
        self.now_and_then_s = 0.0  # how much longer the next read takes

    def pread(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        got = super().pread(fd, buffers, offset)
        self.now += got / self.bytes_per_s + self.now_and_then_s
        self.now_and_then_s = 0.0
        self.reads.append(got)
        return got


def opened(disk: SlowDisk, path: Path, cap_bytes: int = 64 * MIB) -> DiskTier:
    return DiskTier(str(path), DiskOptions(cap_bytes, 4 * MIB, writers=0, readers=0), disk, lambda: disk.now)


@pytest.mark.parametrize("segments", [0, 3])
def test_a_fast_disk_is_read_for_some_mebibytes(tmp_path: Path, segments: int) -> None:
    for number in range(segments):
        (tmp_path / f"segment-0000000{number + 1}").write_bytes(b"x" * 16 * MIB)
    if segments:  # a directory that an earlier run left
        opened(SlowDisk(1e9), tmp_path / "other").close()
        for name in ("format", "lock"):
            (tmp_path / "other" / name).rename(tmp_path / name)
        (tmp_path / "other").rmdir()
    disk = SlowDisk(2e9)
    tier = opened(disk, tmp_path)
    disk.reads.clear()
    assert tier.probe_read() == pytest.approx(2e9)
    assert FIRST_BYTES < sum(disk.reads) <= 8 * MIB
    assert set(tmp_path.iterdir()) >= {tmp_path / "format"}
    assert not [path for path in tmp_path.iterdir() if "probe" in path.name]
    tier.close()


@pytest.mark.parametrize(("bytes_per_s", "pieces"), [(1e6, FEWEST), (1e5, 1)])
def test_a_slow_disk_is_asked_for_little(tmp_path: Path, bytes_per_s: float, pieces: int) -> None:
    disk = SlowDisk(bytes_per_s)
    tier = opened(disk, tmp_path)
    disk.reads.clear()
    assert tier.probe_read() == pytest.approx(bytes_per_s)
    assert disk.reads == [FIRST_BYTES] * pieces
    tier.close()


def test_a_piece_that_took_long_for_another_reason_says_nothing(tmp_path: Path) -> None:
    disk = SlowDisk(1e9)
    tier = opened(disk, tmp_path)
    disk.now_and_then_s = 0.2
    assert tier.probe_read() == pytest.approx(1e9)
    tier.close()


def test_nothing_is_written_beyond_the_cap(tmp_path: Path) -> None:
    disk = SlowDisk(1e9)
    tier = opened(disk, tmp_path, 4 * MIB)
    tier._shared.table.used_bytes = 3 * MIB
    assert tier.probe_read() == 0.0
    tier.close()


def test_a_disk_that_fails_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SlowDisk(1e9)
    tier = opened(disk, tmp_path)

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "injected")

    monkeypatch.setattr(disk, "pwrite", fail)
    assert tier.probe_read() == 0.0
    tier.close()
