"""Footers are asked for ahead; what has come is told before anything is waited for."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from prefixcache_offload.disk.seam import Buffer
from tests.unit.offload.disk.fake_disk import FakeDisk, File
from tests.unit.offload.disk.log import SMALL, Log, numbers_of


class LateDisk(FakeDisk):
    """Some files' bytes have not come when somebody looks; `late` are their names' last digits."""

    def __init__(self, files: dict[str, File], late: str) -> None:
        super().__init__(files)
        self.late = late
        self.asked: list[str] = []
        self._names: dict[int, str] = {}
        self.failing = ""

    def open(self, path: str, *, create: bool = False, direct: bool = False, write: bool = True) -> int:
        fd = super().open(path, create=create, direct=direct, write=write)
        self._names[fd] = path
        return fd

    def read_ahead(self, fd: int, offset: int, size_bytes: int) -> None:
        self.asked.append(self._names[fd])

    def pread_now(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        if self._names[fd][-1] in self.failing:
            raise OSError(errno.EIO, "injected")
        return 0 if self._names[fd][-1] in self.late else super().pread_now(fd, buffers, offset)


def several_segments() -> FakeDisk:
    disk = FakeDisk()
    log = Log(disk)
    log.write(range(30))
    log.tier.close()
    return disk.after_kill()


def test_what_has_come_is_told_before_a_late_footer_is_waited_for() -> None:
    before = several_segments()
    numbers = [each.number for each in Log(before.after_kill()).tier.segments()]
    assert len(numbers) > 3
    newest, late = max(numbers), sorted(numbers)[-3]
    disk = LateDisk(before.files, f"{late:x}"[-1])
    told = [each.segments for each in Log(disk).tier.recovery]
    assert told[0] == [newest, newest - 1], "not the late one, which is behind them"
    assert told[1][0] == late
    assert [number for each in told for number in each] == sorted(numbers, reverse=True)


def test_many_are_asked_for_before_the_first_is_read() -> None:
    disk = LateDisk(several_segments().files, "")
    log = Log(disk)
    wanted = len(log.tier.segments())
    next(iter(log.tier.recovery))
    assert len(disk.asked) == wanted


def test_a_footer_that_fails_when_it_is_looked_for_is_one_segment_that_cannot_be_read() -> None:
    before = several_segments()
    numbers = [each.number for each in Log(before.after_kill()).tier.segments()]
    disk = LateDisk(before.files, "")
    disk.failing = f"{sorted(numbers)[-2]:x}"[-1]
    log = Log(disk)
    told = log.recover()
    assert log.tier.recovery.counters.unreadable == 1
    assert 0 < len(told) < 30
    assert log.check(told) == set(numbers_of(told))


def test_a_segment_that_cannot_be_opened_is_one_that_cannot_be_read() -> None:
    before = several_segments()
    log = Log(before)
    before.errors["open"] = errno.EACCES, 1
    told = log.recover()
    assert log.tier.recovery.counters.unreadable == 1
    assert 0 < len(told) < 30


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EOPNOTSUPP, errno.EIO])
def test_a_kernel_that_cannot_answer_now_is_one_that_has_nothing_yet(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log(None, SMALL, str(tmp_path))
    log.write(range(30))
    log.tier.close()

    preadv = os.preadv

    def refuses(fd: int, buffers: Sequence[Buffer], offset: int, flags: int = 0) -> int:
        if flags:
            raise OSError(code, "injected")
        return preadv(fd, buffers, offset)

    again = Log(None, SMALL, str(tmp_path))
    monkeypatch.setattr(os, "preadv", refuses)
    told = again.recover()
    if code == errno.EIO:
        assert again.tier.recovery.counters.unreadable
    else:
        assert set(numbers_of(told)) == set(range(30))
    again.tier.close()
