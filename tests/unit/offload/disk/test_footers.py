"""Footers are asked for ahead; what has come is told before anything is waited for."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from prefixcache_offload.disk import seam
from prefixcache_offload.disk.records import PAGE
from prefixcache_offload.disk.seam import Buffer
from tests.unit.offload.disk.fake_disk import FakeDisk, File
from tests.unit.offload.disk.log import SMALL, Log, numbers_of


class LateDisk(FakeDisk):
    """Bytes are there once they were asked for ahead, but for files whose names end in one of `late`. `waited`: reads
    that would have waited, or may have. Looking at a file that ends in one of `failing` fails."""

    def __init__(self, files: dict[str, File], late: str = "", failing: str = "") -> None:
        super().__init__(files)
        self.late, self.failing = late, failing
        self.asked: list[tuple[str, int, int]] = []
        self.waited = 0
        self._names: dict[int, str] = {}

    def open(self, path: str, *, create: bool = False, direct: bool = False, write: bool = True) -> int:
        fd = super().open(path, create=create, direct=direct, write=write)
        self._names[fd] = path
        return fd

    def read_ahead(self, fd: int, offset: int, size_bytes: int) -> None:
        self.asked.append((self._names[fd], offset, offset + size_bytes))

    def pread(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        self.waited += 1
        return super().pread(fd, buffers, offset)

    def pread_now(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        name = self._names[fd]
        if name[-1] in self.failing:
            raise OSError(errno.EIO, "injected")
        end = offset + sum(each.nbytes for each in buffers)
        there = any(name == file and first <= offset and end <= last for file, first, last in self.asked)
        return 0 if name[-1] in self.late or not there else super().pread(fd, buffers, offset)

    @property
    def descriptors(self) -> int:
        return len(self._open)


def numbers_in(disk: FakeDisk) -> list[int]:
    return sorted(each.number for each in Log(disk.after_kill()).tier.segments())


def several_segments() -> FakeDisk:
    disk = FakeDisk()
    log = Log(disk)
    log.write(range(30))
    log.tier.close()
    return disk.after_kill()


def test_what_has_come_is_told_before_a_late_footer_is_waited_for() -> None:
    before = several_segments()
    numbers = numbers_in(before)
    assert len(numbers) > 3
    told = [each.segments for each in Log(LateDisk(before.files, late=f"{numbers[-3]:x}"[-1])).tier.recovery]
    assert told[0] == numbers[:-3:-1], "not the late one, which is behind them"
    assert told[1][0] == numbers[-3]
    assert [number for each in told for number in each] == numbers[::-1]


def test_a_segment_without_a_footer_holds_up_none_that_is_newer() -> None:
    """It has to be scanned, which takes long and may hang."""
    before = several_segments()
    numbers = numbers_in(before)
    name = next(name for name in before.files if name.endswith(f"{numbers[-3]:08x}"))
    before.files[name].data[-PAGE:] = bytes(PAGE)
    log = Log(LateDisk(before.files))
    told = [each.segments for each in log.tier.recovery]
    assert told[0] == numbers[:-3:-1]
    assert told[1][0] == numbers[-3]
    assert [number for each in told for number in each] == numbers[::-1]
    assert log.tier.recovery.counters.scanned == 1


def test_a_segment_with_a_clear_holds_up_none_that_is_newer() -> None:
    """What was cleared has to be read."""
    log = Log(disk := FakeDisk())
    log.write(range(20))
    log.clear([3])
    log.write(range(100, 120))
    log.tier.close()
    again = Log(LateDisk(disk.after_kill().files))
    told = list(again.tier.recovery)
    assert len(told) > 1
    assert {int(n) for each in told for n in each.entries["depth"]} == {*range(20), *range(100, 120)} - {3}


def test_of_long_footers_only_the_first_of_those_told_together_is_waited_for() -> None:
    options = replace(SMALL, cap_bytes=64 << 20, segment_bytes=4 << 20)
    log = Log(disk := FakeDisk(), options)
    log.write(range(2000))
    log.tier.close()
    late = LateDisk(disk.after_kill().files)
    again = Log(late, options)
    segments = len(again.tier.segments())
    assert segments > 4
    late.waited, groups, found = 0, 0, 0
    for told in again.tier.recovery:
        groups, found = groups + 1, found + len(told.entries)
        assert late.waited <= groups + 1, "one of them is in two pieces: until then nobody knows how long they are"
    assert found == 2000
    assert again.tier.recovery.counters.scanned == 0


def test_many_are_asked_for_before_the_first_is_read() -> None:
    disk = LateDisk(several_segments().files)
    log = Log(disk)
    wanted = len(log.tier.segments())
    next(iter(log.tier.recovery))
    assert len(disk.asked) == wanted


def test_a_footer_that_fails_when_it_is_looked_for_is_one_segment_that_cannot_be_read() -> None:
    before = several_segments()
    log = Log(LateDisk(before.files, failing=f"{numbers_in(before)[-2]:x}"[-1]))
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


@pytest.mark.parametrize("segments", [1, 2, 1000])
def test_no_descriptor_is_left_open_however_far_it_is_read(segments: int) -> None:
    disk = LateDisk(several_segments().files)
    log = Log(disk)
    disk.errors["open"] = errno.EACCES, 1
    told = iter(log.tier.recovery)
    for _, _ in zip(range(segments), told, strict=False):
        pass
    told.close()  # type: ignore[attr-defined]  # it is a generator
    log.tier.close()
    assert disk.descriptors == 0


def recovered(folder: Path, monkeypatch: pytest.MonkeyPatch, preadv: Callable[..., int]) -> tuple[Log, set[int]]:
    """What a start finds with another `os.preadv`."""
    log = Log(None, SMALL, str(folder))
    log.write(range(30))
    log.tier.close()
    again = Log(None, SMALL, str(folder))
    monkeypatch.setattr(os, "preadv", preadv)
    told = set(numbers_of(again.recover()))
    again.tier.close()
    return again, told


@pytest.mark.parametrize("failure", [
    OSError(errno.EAGAIN, "not there"), OSError(errno.EOPNOTSUPP, "not offered"),
    OSError(errno.EPERM, "sandbox"), NotImplementedError(),
])  # fmt: skip
def test_a_kernel_that_cannot_answer_now_is_one_that_has_nothing_yet(
    failure: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv = os.preadv

    def cannot(fd: int, buffers: Sequence[Buffer], offset: int, flags: int = 0) -> int:
        if flags:
            raise failure
        return preadv(fd, buffers, offset)

    assert recovered(tmp_path, monkeypatch, cannot)[1] == set(range(30))


def test_a_kernel_without_the_question_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seam, "_NOWAIT", 0)
    assert recovered(tmp_path, monkeypatch, os.preadv)[1] == set(range(30))


def test_a_hint_that_a_kernel_refuses_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOSYS, "injected")

    monkeypatch.setattr(os, "posix_fadvise", refused)
    assert recovered(tmp_path, monkeypatch, os.preadv)[1] == set(range(30))
