"""Damage of every kind to the files of a log: each record is read right or is a counted miss, and the others stay.

Bits are flipped, pages zeroed, files cut, records swapped and copied over each other, segments doubled, footers broken;
before a restart and under a running tier.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from prefixcache_offload.disk import Entries, Outcome
from prefixcache_offload.disk.directory import NAMESPACES
from prefixcache_offload.disk.records import PAGE, RECORD_MAGIC, headers_over
from tests.unit.offload.disk.fake_disk import FakeDisk, File
from tests.unit.offload.disk.log import PATH, Log, numbers_of

COUNT = 40
ROUNDS = 24
Damage = Callable[[FakeDisk, random.Random], None]


def stored(*, sealed: bool) -> FakeDisk:
    """A disk with a log of COUNT blocks."""
    disk = FakeDisk()
    log = Log(disk)
    assert set(log.write(range(COUNT)).told) == {Outcome.OK}
    if sealed:
        log.tier.close()
    return disk.after_kill()


def segments(disk: FakeDisk) -> list[bytearray]:
    return [file.data for name, file in sorted(disk.files.items()) if "segment" in name]


def record_starts(data: bytearray) -> list[int]:
    pages = np.frombuffer(bytes(data), np.uint8)
    return [int(i) * PAGE for i in np.flatnonzero(headers_over(pages)["magic"] == RECORD_MAGIC)]


def flip_a_bit(disk: FakeDisk, chance: random.Random) -> None:
    data = chance.choice(segments(disk))
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def flip_many_bits(disk: FakeDisk, chance: random.Random) -> None:
    for _ in range(chance.randrange(2, 40)):
        flip_a_bit(disk, chance)


def zero_a_page(disk: FakeDisk, chance: random.Random) -> None:
    data = chance.choice(segments(disk))
    at = chance.randrange(len(data) // PAGE) * PAGE
    data[at : at + PAGE] = bytes(PAGE)


def cut(disk: FakeDisk, chance: random.Random) -> None:
    data = chance.choice(segments(disk))
    del data[chance.randrange(len(data)) :]


def swap_records(disk: FakeDisk, chance: random.Random) -> None:
    """Two pages that begin records, or whole stretches from there, change places, maybe across files."""
    left, right = chance.choice(segments(disk)), chance.choice(segments(disk))
    a, b = chance.choice(record_starts(left)), chance.choice(record_starts(right))
    size = chance.choice([1, 2, 3, 4]) * PAGE
    first, second = bytes(left[a : a + size]), bytes(right[b : b + size])
    left[a : a + len(second)] = second
    right[b : b + len(first)] = first


def copy_a_record(disk: FakeDisk, chance: random.Random) -> None:
    """One record lies twice, over another or in the free room at the end."""
    source, target = chance.choice(segments(disk)), chance.choice(segments(disk))
    start, size = chance.choice(record_starts(source)), chance.choice([2, 3, 4]) * PAGE
    at = chance.randrange(len(target) // PAGE) * PAGE
    piece = bytes(source[start : start + size])
    target[at : at + len(piece)] = piece


def double_a_segment(disk: FakeDisk, chance: random.Random) -> None:
    disk.files[f"{PATH}/segment-000000{chance.randrange(16, 255):02x}"] = File(bytearray(chance.choice(segments(disk))))


def exchange_segments(disk: FakeDisk, chance: random.Random) -> None:
    names = [name for name in disk.files if "segment" in name]
    one, other = chance.sample(names, 2)
    disk.files[one], disk.files[other] = disk.files[other], disk.files[one]


FOREIGN = stored(sealed=True)


def add_a_foreign_segment(disk: FakeDisk, chance: random.Random) -> None:
    """A segment of another directory, with the very same blocks, under a free name."""
    disk.files[f"{PATH}/segment-0000{chance.randrange(256, 65535):04x}"] = File(
        bytearray(chance.choice(segments(FOREIGN)))
    )


def break_namespaces(disk: FakeDisk, chance: random.Random) -> None:
    data = disk.files[f"{PATH}/{NAMESPACES}"].data
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


KINDS: list[Damage] = [
    flip_a_bit,
    flip_many_bits,
    zero_a_page,
    cut,
    swap_records,
    copy_a_record,
    double_a_segment,
    exchange_segments,
    add_a_foreign_segment,
    break_namespaces,
]


def read_and_count(log: Log, told: Entries) -> set[int]:
    """What is right; every record that is not is counted once, as a read that failed."""
    assert len(set(numbers_of(told))) == len(told), "a block was told twice"
    right = log.check(told)
    counted = log.tier.counters.reads
    assert counted[Outcome.OK] == len(right)
    assert sum(counted.values()) == len(told)
    assert set(counted) <= {Outcome.OK, Outcome.MISMATCH, Outcome.TRUNCATED, Outcome.GONE}
    return right


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "killed"])
@pytest.mark.parametrize("damage", KINDS, ids=lambda d: d.__name__)
def test_damage_before_a_restart(damage: Damage, *, sealed: bool) -> None:
    clean = stored(sealed=sealed)
    for seed in range(ROUNDS):
        disk = clean.after_kill()
        damage(disk, random.Random(seed))
        log = Log(disk)
        right = read_and_count(log, log.recover())
        assert disk.total_bytes <= log.options.cap_bytes
        if damage in (flip_a_bit, zero_a_page):
            assert len(right) >= COUNT - 1, "one damaged place costs one block"
        if damage in (double_a_segment, add_a_foreign_segment, break_namespaces):
            assert len(right) == COUNT, "what was added takes nothing away"
        assert set(log.write(range(200, 204)).told) == {Outcome.OK}
        log.tier.close()


@pytest.mark.parametrize("damage", KINDS, ids=lambda d: d.__name__)
def test_damage_under_a_running_tier(damage: Damage) -> None:
    clean = stored(sealed=True)
    for seed in range(ROUNDS // 2):
        disk = clean.after_kill()
        log = Log(disk)
        told = log.recover()
        damage(disk, random.Random(seed))
        right = read_and_count(log, told)
        assert right or damage is flip_many_bits
        for segment in {int(n) for n in told["segment"]}:
            freed = log.free(segment, told[told["segment"] == segment])
            if freed.freed:
                log.check(freed.entries[freed.outcomes == Outcome.OK])
        log.tier.close()


def test_a_cut_footer_costs_a_scan_and_no_block() -> None:
    disk = stored(sealed=True)
    for data in segments(disk):
        data[-PAGE] ^= 1
    log = Log(disk)
    assert set(numbers_of(log.recover())) == set(range(COUNT))
    assert log.tier.recovery.counters.scanned == len(segments(disk))
    log.tier.close()
    again = Log(disk.after_kill())
    assert set(numbers_of(again.recover())) == set(range(COUNT))
    assert again.tier.recovery.counters.scanned == 0, "the first restart wrote the footers again"


def test_a_record_forged_inside_a_payload_is_not_believed() -> None:
    """A worker that knows the format but not the nonce stores bytes that look like a record of another key."""
    disk = FakeDisk()
    log = Log(disk)
    job = log.write([5])
    path = next(name for name in disk.files if "segment" in name)
    whole = bytearray(disk.files[path].data)
    forged = whole[: 4 * PAGE]
    headers = headers_over(np.frombuffer(forged, np.uint8))
    headers["nonce"][0] = 7
    headers["entry"]["page"][0] = 5
    disk.files[path].data[5 * PAGE : 9 * PAGE] = forged
    again = Log(disk.after_kill())
    told = again.recover()
    assert numbers_of(told) == [5]
    assert told["page"][0] == job.entries["page"][0]


def test_a_hole_in_the_open_segment_hides_nothing_behind_it() -> None:
    disk = FakeDisk()
    log = Log(disk)
    job = log.write(range(5))
    data = segments(disk)[0]
    start = int(job.entries["page"][2]) * PAGE
    data[start : start + PAGE] = bytes(PAGE)
    again = Log(disk.after_kill())
    assert set(numbers_of(again.recover())) == {0, 1, 3, 4}
    assert again.tier.recovery.counters.holes == 1


def test_a_damaged_tombstone_forgets_more_rather_than_less() -> None:
    disk = FakeDisk()
    log = Log(disk)
    log.write(range(4))
    log.clear([2])
    log.write([4])
    log.tier.close()
    found = disk.after_kill()
    data = segments(found)[0]
    tombstone = next(
        s
        for s in record_starts(data)
        if headers_over(np.frombuffer(bytes(data[s : s + PAGE]), np.uint8))["entry"]["kind"][0] == 2
    )
    data[tombstone + PAGE] ^= 1
    again = Log(found)
    assert set(numbers_of(again.recover())) == {4}
    assert again.tier.recovery.counters.torn == 1
