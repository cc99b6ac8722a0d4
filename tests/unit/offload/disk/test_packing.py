"""Smaller records: room really freed, the same bytes back, raw where it does not pay, and nothing waits for long."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from prefixcache_offload.codecs import lossless
from prefixcache_offload.disk import ENTRY, DiskOptions, Entries, Outcome
from prefixcache_offload.disk.options import DiskCodec
from prefixcache_offload.disk.packing import judge, measure_codec
from prefixcache_offload.disk.records import PAGE, Codec, digest, headers_over, record_pages, stored_bytes
from prefixcache_offload.disk.seam import RealDisk
from prefixcache_offload.disk.tier import DiskTier
from tests.unit.offload.disk.fake_disk import FakeDisk
from tests.unit.offload.disk.log import FINGERPRINT, PATH, Job, key, memory_for, numbers_of

KIB = 1 << 10
SIZE = 32 * KIB
OPTIONS = DiskOptions(cap_bytes=4 << 20, segment_bytes=256 * KIB, writers=0, readers=0, codec=DiskCodec.LOSSLESS)


def payload(number: int) -> bytes:
    """bfloat16 numbers for even blocks; noise, which does not shrink, for every third."""
    chance = np.random.default_rng(number)
    if number % 3 == 2:
        return chance.bytes(SIZE)
    values = chance.standard_normal(SIZE // 2).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


class Packed:
    """A log whose blocks are numbers of 16 bits."""

    def __init__(self, disk: FakeDisk | None, options: DiskOptions = OPTIONS, path: str = PATH) -> None:
        self.tier = DiskTier(path, options, disk or RealDisk())
        self.pumped = not options.writers
        self.namespace = self.tier.register(FINGERPRINT, b"a spec")

    def entries(self, numbers: range) -> Entries:
        entries = np.zeros(len(numbers), ENTRY)
        entries["namespace"], entries["length"], entries["value_bytes"] = self.namespace, SIZE, 2
        entries["depth"] = list(numbers)
        entries["key"] = [np.frombuffer(key(number), np.uint8) for number in numbers]
        return entries

    def write(self, numbers: range) -> Job:
        entries = self.entries(numbers)
        memory, at = memory_for(entries)
        for start, number in zip(at, numbers, strict=True):
            memory[start : start + SIZE] = np.frombuffer(payload(number), np.uint8)
        job = Job(len(numbers))
        self.tier.write(1, memory, at, entries, job.done)
        self.pump()
        return job.wait()

    def read(self, entries: Entries) -> tuple[Job, list[bytes]]:
        """As a caller reads that knows names, places and lengths, and nothing of forms."""
        asked = entries.copy()
        asked["codec"] = asked["pages"] = asked["value_bytes"] = 0
        memory, at = memory_for(asked)
        job = Job(len(asked))
        self.tier.read(2, memory, at, asked, job.done)
        self.pump()
        job.wait()
        return job, [memory[start : start + SIZE].tobytes() for start in at]

    def check(self, entries: Entries) -> set[int]:
        job, read = self.read(entries)
        good = [i for i, told in enumerate(job.told) if told is Outcome.OK]
        assert all(read[i] == payload(int(entries["depth"][i])) for i in good), "wrong bytes"
        return {int(entries["depth"][i]) for i in good}

    def recover(self) -> Entries:
        return np.concatenate([np.zeros(0, ENTRY), *[told.entries for told in self.tier.recovery]])

    def pump(self) -> None:
        if self.pumped:
            self.tier.pump()


def test_what_shrinks_takes_less_room_and_comes_back_bit_for_bit() -> None:
    log = Packed(FakeDisk())
    told = log.write(range(30)).entries
    packed = told["codec"] == Codec.LOSSLESS
    assert packed.tolist() == [number % 3 != 2 for number in range(30)]
    assert (told["length"] == SIZE).all(), "the caller's lengths stay the caller's"
    assert SIZE / stored_bytes(told)[packed].mean() > 1.3
    ends = told["page"].astype(np.int64) + record_pages(told)
    same = told["segment"][1:] == told["segment"][:-1]
    assert (told["page"][1:][same] == ends[:-1][same]).all(), "no gap is left where a record is shorter"
    assert log.check(told[::-1]) == set(range(30))
    counted = log.tier.counters
    assert counted.packed == packed.sum()
    assert counted.kept_raw == {"does_not_shrink": 10}
    assert counted.packed_to_bytes == stored_bytes(told)[packed].sum()
    live = sum(segment.live_bytes for segment in log.tier.segments())
    assert live == stored_bytes(told).sum()
    assert counted.device_bytes < counted.written_bytes
    log.tier.drop(told)
    assert sum(segment.live_bytes for segment in log.tier.segments()) == 0


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("codec", [DiskCodec.RAW, DiskCodec.LOSSLESS])
def test_a_restart_reads_both_forms_whatever_is_written_from_now_on(codec: DiskCodec, *, sealed: bool) -> None:
    disk = FakeDisk()
    log = Packed(disk)
    log.write(range(20))
    if sealed:
        log.tier.close()
    log = Packed(disk.after_kill(), replace(OPTIONS, codec=codec))
    told = log.recover()
    assert sorted(numbers_of(told)) == list(range(20))
    assert log.check(told) == set(range(20))
    more = log.write(range(20, 29)).entries
    assert (more["codec"] == Codec.LOSSLESS).any() == (codec is DiskCodec.LOSSLESS)
    assert log.check(np.concatenate([told, more])) == set(range(29)), "one log, both forms"


def test_freeing_appends_the_stored_form_without_decoding_it() -> None:
    disk = FakeDisk()
    log = Packed(disk)
    told = log.write(range(24)).entries
    oldest = int(told["segment"].min())
    keep = told[told["segment"] == oldest]
    asked = keep.copy()
    asked["codec"] = asked["pages"] = 0
    ends = []
    log.tier.free(oldest, asked, ends.append)
    log.tier.pump()
    (freed,) = ends
    assert freed.freed
    assert (freed.outcomes == Outcome.OK).all()
    assert log.tier.counters.decoded_bytes == 0
    assert (np.sort(freed.entries["pages"]) == np.sort(keep["pages"])).all()
    assert log.check(freed.entries) == set(numbers_of(keep))
    rest = np.concatenate([freed.entries, told[told["segment"] != oldest]])
    log = Packed(disk.after_kill())
    assert set(numbers_of(log.recover())) == set(numbers_of(rest))
    assert log.check(rest) == set(range(24))


def test_the_cap_holds_and_more_blocks_fit_under_it() -> None:
    counts = {}
    for codec in (DiskCodec.RAW, DiskCodec.LOSSLESS):
        disk = FakeDisk()
        log = Packed(disk, replace(OPTIONS, codec=codec))
        told = log.write(range(0, 450, 3)).told
        counts[codec] = told.count(Outcome.OK)
        assert Outcome.NO_ROOM in told
        assert disk.total_bytes <= OPTIONS.cap_bytes
    assert counts[DiskCodec.LOSSLESS] > 1.25 * counts[DiskCodec.RAW]


def test_damage_to_packed_records_is_a_counted_miss() -> None:
    for seed in range(20):
        chance, disk = random.Random(seed), FakeDisk()
        log = Packed(disk)
        told = log.write(range(0, 30, 3)).entries
        files = [file.data for name, file in disk.files.items() if "segment" in name]
        for _ in range(3):
            data = chance.choice(files)
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        job, _ = log.read(told)
        bad = [outcome for outcome in job.told if outcome is not Outcome.OK]
        assert set(bad) <= {Outcome.MISMATCH}
        log.check(told)


def changed(disk: FakeDisk, change: dict[str, int]) -> int:
    """Rewrite fields of every packed record's header, with good checksums; how many there were."""
    count = 0
    for name, file in disk.files.items():
        if "segment" not in name:
            continue
        pages = np.frombuffer(file.data, np.uint8).copy()
        headers = headers_over(pages)
        for i in np.flatnonzero(headers["entry"]["codec"] == Codec.LOSSLESS).tolist():
            if headers["magic"][i]:
                for field, value in change.items():
                    headers["entry"][field][i] = value
                start = i * PAGE
                end = headers.dtype.itemsize - 16
                pages[start + end : start + end + 16] = np.frombuffer(digest(pages[start : start + end]), np.uint8)
                count += 1
        file.data[:] = pages.tobytes()
    return count


def test_a_codec_that_is_unknown_is_a_counted_miss_and_stays_for_those_who_know_it() -> None:
    disk = FakeDisk()
    log = Packed(disk)
    told = log.write(range(6)).entries
    assert changed(disk, {"codec": 77}) == 4
    left = disk.after_kill()
    log = Packed(left)
    assert set(numbers_of(log.recover())) == {2, 5}
    assert log.tier.recovery.counters.unknown_codec == 4
    assert log.check(told) == {2, 5}, "by place alone it is not served either"
    assert len(log.tier.segments()) >= 1
    assert sum(data.data.count(b"PfxRec\r\n") for data in left.files.values()) >= 6, "nothing was thrown away"


def test_a_codec_that_is_unknown_and_asked_for_by_name_says_so() -> None:
    disk = FakeDisk()
    log = Packed(disk)
    told = log.write(range(2)).entries
    assert changed(disk, {"codec": 77}) == 2
    asked = told.copy()
    asked["codec"] = 77
    log = Packed(disk.after_kill())
    memory, at = memory_for(asked)
    job = Job(2)
    log.tier.read(1, memory, at, asked, job.done)
    log.tier.pump()
    assert set(job.wait().told) == {Outcome.UNKNOWN_CODEC}
    assert log.tier.counters.reads[Outcome.UNKNOWN_CODEC] == 2
    assert not memory.any(), "never data"


def test_a_record_whose_form_is_of_another_length_is_a_mismatch() -> None:
    """The header is good and the payload's checksum is, but what is in it would be longer than the block."""
    disk = FakeDisk()
    log = Packed(disk)
    told = log.write(range(1)).entries
    assert changed(disk, {"length": SIZE - 2}) == 1
    shorter = told.copy()
    shorter["length"] = SIZE - 2
    log = Packed(disk.after_kill())
    (found,) = log.recover()
    job, _ = log.read(np.array([found]))
    assert job.told == [Outcome.MISMATCH]


def test_threads_pack_before_the_writers_write(tmp_path: Path) -> None:
    options = replace(OPTIONS, writers=2, readers=2, pack_patience_s=30.0)
    log = Packed(None, options, str(tmp_path / "data"))
    told = log.write(range(30)).entries
    assert (told["codec"] == Codec.LOSSLESS).sum() == 20
    assert log.check(told) == set(range(30))
    assert log.tier.status().codec.on
    assert log.tier.close()


def test_a_packer_that_is_behind_delays_nothing_for_longer_than_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = threading.Event()
    real = lossless.pack
    monkeypatch.setattr(lossless, "pack", lambda *args: held.wait(20) and real(*args))
    log = Packed(None, replace(OPTIONS, writers=1, readers=1, pack_patience_s=0.05), str(tmp_path / "data"))
    told = log.write(range(6)).entries
    assert (told["codec"] == Codec.RAW).all()
    assert log.tier.counters.kept_raw["behind"] == 6
    held.set()
    assert log.check(told) == set(range(6))
    assert log.tier.close()


def test_a_clear_waits_for_no_packer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = threading.Event()
    real = lossless.pack
    monkeypatch.setattr(lossless, "pack", lambda *args: held.wait(20) and real(*args))
    log = Packed(None, replace(OPTIONS, writers=1, readers=1, pack_patience_s=600.0), str(tmp_path / "data"))
    entries = log.entries(range(3))
    memory, at = memory_for(entries)
    job, cleared = Job(3), Job(1)
    log.tier.write(1, memory, at, entries, job.done)
    log.tier.clear(log.namespace, np.zeros(0, np.uint8), cleared.done)
    assert cleared.wait().told == [Outcome.OK]
    assert job.wait().told == [Outcome.OK] * 3
    held.set()
    assert log.tier.close()
    again = Packed(None, OPTIONS, str(tmp_path / "data"))
    assert not len(again.recover()), "cleared is cleared, in whatever form"


def test_auto_is_on_where_loads_get_faster_and_off_elsewhere() -> None:
    assert judge(0.2e9, 1.5e9, 1.45, on=False)[0]
    assert not judge(3e9, 1.5e9, 1.45, on=False)[0], "the disk is faster than the codec"
    assert not judge(0.0, 1.5e9, 1.45, on=True)[0], "nothing is known"
    assert not judge(0.2e9, 1.5e9, 1.0, on=True)[0], "nothing shrinks"
    edge = 1.5e9 * (1 - 1 / 1.45)
    assert not judge(1.1 * edge, 1.5e9, 1.45, on=False)[0]
    assert judge(1.1 * edge, 1.5e9, 1.45, on=True)[0], "it does not flap"
    assert "GB/s" in judge(3e9, 1.5e9, 1.45, on=False)[1]


class _SlowDisk(FakeDisk):
    """Reads cost time on a clock of its own."""

    now = 0.0
    rate = 50e6

    def pread(self, fd, buffers, offset):  # type: ignore[no-untyped-def]  # as its base
        got = super().pread(fd, buffers, offset)
        _SlowDisk.now += got / self.rate
        return got


@pytest.mark.parametrize(("rate", "on"), [(50e6, True), (50e12, False)])
def test_auto_measures_codec_and_disk_at_the_start(rate: float, *, on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixcache_offload.disk.packing.measure_codec", lambda clock: (0.4e9, 1.5e9, 1.45))
    disk = _SlowDisk()
    disk.rate = rate
    options = replace(OPTIONS, codec=DiskCodec.AUTO, cap_bytes=32 << 20)
    tier = DiskTier(PATH, options, disk, clock=lambda: _SlowDisk.now)
    before = disk.names(PATH)
    tier.pump()
    report = tier.status().codec
    assert report.on is on
    assert report.mode == "auto"
    assert "the disk reads" in report.why
    assert disk.names(PATH) == before, "the measuring leaves nothing behind"


def test_the_codec_is_timed_on_a_sample() -> None:
    now = iter(range(100))
    pack, unpack, ratio = measure_codec(lambda: float(next(now)))
    assert pack == unpack == lossless.sample().size
    assert ratio > 1.3
