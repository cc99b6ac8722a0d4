"""Pins over a restart: the file is whole or not there, times go by the wall clock, namespaces are waited for."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest

from prefixcache.core.events import NamespaceOpened
from prefixcache.core.ids import GroupKind
from prefixcache.core.pin_messages import PinRequested
from prefixcache.core.planner import Planner
from prefixcache.core.spec import GroupSpec, NamespaceSpec, PartSpec, PlannerConfig, PoolSpec
from prefixcache.server.config import Config
from prefixcache.server.loop import Owner
from prefixcache.server.pinbook import FILE, Entry, PinBook, pack, unpack
from prefixcache.server.service import Shell

SPEC = NamespaceSpec(16, (GroupSpec(GroupKind.FULL),), (PartSpec(0, 1, 4096),))
FINGERPRINT = b"f" * 32
KEYS = b"k" * 32 + b"l" * 32
PIN = b"p" * 16


class Run:
    """One run of a daemon, as far as pins go."""

    def __init__(self, folder: Path | None, slots: int = 4) -> None:
        self.planner = Planner(PlannerConfig((PoolSpec(64 * 4096, 16 * 4096),), pin_bytes=slots * 4096))
        self.shell = Shell(Config(), "test", Owner(self.planner, {}), {})
        self.book = PinBook(self.shell, self.planner, None if folder is None else lambda: folder)
        self.book.start()

    def open(self) -> None:
        with self.shell.owner.lock:
            self.shell.owner.call(NamespaceOpened(1, FINGERPRINT, SPEC))
            self.shell.add_namespace(1, FINGERPRINT, SPEC, "")

    def pin(self, ttl_s: float | None = None) -> None:
        self.shell.owner.call(PinRequested(PIN, 1, KEYS, "label", ttl_s))

    def keep(self) -> None:
        self.book.keep().result(20)

    def end(self) -> list[bytes]:
        self.book.close()
        return list(self.planner.state.prefix_pins)


def test_what_was_kept_is_pinned_again_under_its_name(tmp_path: Path) -> None:
    first = Run(tmp_path)
    first.open()
    first.pin()
    first.keep()
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
    assert first.end() == [PIN]
    second = Run(tmp_path)
    second.open()
    second.book.read()
    assert second.end() == [PIN]
    assert second.planner.state.prefix_pins[PIN].label == "label"


def test_a_namespace_that_is_not_open_yet_is_waited_for_and_not_forgotten(tmp_path: Path) -> None:
    first = Run(tmp_path)
    first.open()
    first.pin(3600.0)
    first.keep()
    first.end()
    second = Run(tmp_path)
    second.keep()  # before anything was read: what the file holds must not be lost
    assert second.planner.state.prefix_pins == {}
    second.open()
    assert second.end() == [PIN]
    left = second.planner.state.prefix_pins[PIN].term.deadline - second.shell.owner.now
    assert 3500 < left < 3600


def test_a_pin_whose_time_is_over_does_not_come_back(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.open()
    run.book.restore([Entry(PIN, FINGERPRINT, KEYS, "", time.time() - 1)])
    assert run.end() == []
    assert run.book.faults() == {"pins_not_kept": 0, "pins_not_restored": 0}


def test_a_pin_that_does_not_fit_any_more_is_told_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(tmp_path, slots=1)
    run.open()
    with caplog.at_level(logging.WARNING):
        run.book.restore([Entry(PIN, FINGERPRINT, KEYS, "v3", 0.0)])
    assert run.end() == []
    assert run.book.faults()["pins_not_restored"] == 1
    assert "could not be restored" in caplog.text


@pytest.mark.parametrize("damage", [b"", b"short", b"x" * 200])
def test_a_damaged_file_is_not_believed(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / FILE).write_bytes(damage)
    run = Run(tmp_path)
    run.open()
    run.book.read()
    assert run.end() == []


def test_a_folder_that_cannot_be_written_is_counted(tmp_path: Path) -> None:
    run = Run(tmp_path / "gone")
    run.open()
    run.pin()
    run.keep()
    assert run.end() == [PIN]
    assert run.book.faults()["pins_not_kept"] == 1


def test_without_a_disk_nothing_is_written_and_nobody_waits() -> None:
    run = Run(None)
    run.open()
    run.pin()
    run.keep()
    assert run.end() == [PIN]
    assert run.book.faults()["pins_not_kept"] == 0


def test_pins_travel_with_a_snapshot() -> None:
    entries = [Entry(PIN, FINGERPRINT, KEYS, "label", 0.0)]
    assert unpack(pack(entries)) == entries
    assert unpack(b"nonsense") == []
    assert unpack(b"\x92\x02\x90") == []
