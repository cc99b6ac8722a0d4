"""How fast the disk reads and memory is filled."""

from __future__ import annotations

import pytest

from prefixcache.core.meter import FillMeter, ReadMeter

MIB = 1 << 20


def test_it_learns_the_bandwidth_of_what_it_sees() -> None:
    meter = ReadMeter(1e9, 0.0)
    now = 0.0
    for _ in range(200):
        meter.begin(8 * MIB, now)
        now += 8 * MIB / 100e6
        meter.end(8 * MIB, now, fine=True)
    assert meter.bytes_per_s == pytest.approx(100e6, rel=0.05)


def test_idle_time_does_not_count() -> None:
    meter = ReadMeter(100e6, 0.0)
    for second in range(50):
        meter.begin(MIB, float(second))
        meter.end(MIB, second + MIB / 100e6, fine=True)
    assert meter.bytes_per_s == pytest.approx(100e6, rel=0.05)


def test_what_is_queued_has_to_come_first() -> None:
    meter = ReadMeter(100e6, 0.001)
    assert meter.wait_s() == pytest.approx(0.001)
    meter.begin(100_000_000, 0.0)
    assert meter.wait_s() == pytest.approx(1.001)
    meter.end(100_000_000, 1.0, fine=False)
    assert meter.wait_s() == pytest.approx(0.001)


def test_failed_reads_say_nothing_of_the_disk() -> None:
    meter = ReadMeter(100e6, 0.0)
    meter.begin(MIB, 0.0)
    meter.end(MIB, 100.0, fine=False)
    assert meter.bytes_per_s == 100e6


def test_the_way_there_is_latency_not_bandwidth() -> None:
    meter = ReadMeter(100e6, 0.0)
    for second in range(100):
        meter.begin(4096, float(second))
        meter.end(4096, second + 0.01, fine=True)
    assert meter.latency_s == pytest.approx(0.01, rel=0.1)


def test_after_a_long_silence_one_read_says_more_than_all_before() -> None:
    meter = ReadMeter(1e6, 0.0)
    assert not meter.in_doubt(5.0)
    assert meter.in_doubt(60.0)
    meter.begin(4 * MIB, 60.0)
    assert not meter.in_doubt(60.0)
    meter.end(4 * MIB, 60.0 + 4 * MIB / 1e9, fine=True)
    assert meter.bytes_per_s > 1.9e6
    assert not meter.in_doubt(61.0)


def test_filling_is_the_most_of_this_second_and_the_last() -> None:
    meter = FillMeter()
    assert meter.per_s(0, 0.0) == 0
    assert meter.per_s(100, 0.5) == 100
    assert meter.per_s(150, 1.0) == 150
    assert meter.per_s(160, 1.9) == 150
    assert meter.per_s(160, 2.0) == 10
    assert meter.per_s(160, 3.0) == 0


def test_a_short_look_is_believed_until_something_is_read() -> None:
    meter = ReadMeter(1e9, 0.0)
    meter.believe(0.0)
    assert meter.bytes_per_s == 1e9  # nothing could be seen
    meter.believe(50e6)
    assert meter.bytes_per_s == 50e6
    meter.begin(10_000_000, 0.0)
    meter.end(10_000_000, 0.1, fine=True)
    assert meter.bytes_per_s == pytest.approx(100e6)
    meter.believe(20e6)  # another directory
    assert meter.bytes_per_s == 20e6
