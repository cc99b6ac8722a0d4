"""`namespaces.log`: specs come back after a restart, damage costs one spec, the file has a bound."""

from __future__ import annotations

import hashlib
import random

import pytest

from prefixcache_offload.disk.directory import NAMESPACES, Directory, open_directory
from prefixcache_offload.disk.namespaces import NamespaceBook, NamespaceRefused
from tests.unit.offload.disk.fake_disk import Crash, Crashed, FakeDisk
from tests.unit.offload.disk.log import PATH

CAP_BYTES = 16 << 10


def fingerprint(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def spec(number: int) -> bytes:
    return random.Random(number).randbytes(number * 83 % 1500)


def opened(disk: FakeDisk) -> Directory:
    return open_directory(disk, PATH)


def test_specs_come_back_and_knowing_one_costs_nothing() -> None:
    disk = FakeDisk()
    book = NamespaceBook(opened(disk), CAP_BYTES)
    names = {n: book.register(fingerprint(n), spec(n)) for n in range(10)}
    assert len(set(names.values())) == 10
    size = book.size_bytes
    assert book.register(fingerprint(3), spec(3)) == names[3]
    assert book.size_bytes == size == len(disk.files[f"{PATH}/{NAMESPACES}"].data)
    again = NamespaceBook(opened(disk.after_kill()), CAP_BYTES)
    assert again.specs == {names[n]: (fingerprint(n), spec(n)) for n in range(10)}
    assert again.register(fingerprint(3), b"changed") == names[3]


def test_names_that_collide_are_refused() -> None:
    book = NamespaceBook(opened(FakeDisk()), CAP_BYTES)
    book.register(b"12345678" + bytes(24), b"one")
    with pytest.raises(NamespaceRefused):
        book.register(b"12345678" + bytes(23) + b"x", b"other")
    assert book.register(bytes(8) + fingerprint(1)[:24], b"") != 0
    with pytest.raises(ValueError, match="32"):
        book.register(b"short", b"")


def test_damage_costs_the_entry_it_hits() -> None:
    disk = FakeDisk()
    book = NamespaceBook(opened(disk), CAP_BYTES)
    for n in range(10):
        book.register(fingerprint(n), spec(n))
    size = book.size_bytes
    for seed in range(60):
        broken = disk.after_kill()
        chance = random.Random(seed)
        broken.files[f"{PATH}/{NAMESPACES}"].data[chance.randrange(size)] ^= 1 << chance.randrange(8)
        again = NamespaceBook(opened(broken), CAP_BYTES)
        assert len(again.specs) >= 9
        assert set(again.specs.items()) <= set(book.specs.items())
        again.register(fingerprint(77), b"goes on")
        assert len(NamespaceBook(opened(broken.after_kill()), CAP_BYTES).specs) == len(again.specs)


def test_the_file_is_bounded_and_can_be_thinned() -> None:
    disk = FakeDisk()
    book = NamespaceBook(opened(disk), CAP_BYTES)
    fitting = CAP_BYTES // 1024
    names = [book.register(fingerprint(n), bytes(700)) for n in range(fitting)]
    with pytest.raises(NamespaceRefused, match="bound"):
        book.register(fingerprint(99), bytes(700))
    assert book.size_bytes <= CAP_BYTES
    assert book.forget_others(names[-2:]) == len(names) - 2
    assert set(NamespaceBook(opened(disk.after_kill()), CAP_BYTES).specs) == set(names[-2:])
    book.register(fingerprint(200), b"room again")


def test_a_crash_while_thinning_leaves_the_old_or_the_new() -> None:
    for at in range(40):
        for leaves in ("nothing", "head", "whole"):
            disk = FakeDisk()
            book = NamespaceBook(opened(disk), CAP_BYTES)
            names = {book.register(fingerprint(n), spec(n)) for n in range(4)}
            kept = sorted(names)[:2]
            disk.crash = Crash(len(disk.calls) + at, leaves)
            try:
                book.forget_others(kept)
            except Crashed:
                assert set(NamespaceBook(opened(disk.after_kill()), CAP_BYTES).specs) in (names, set(kept))
                continue
            assert at >= 4
            return
