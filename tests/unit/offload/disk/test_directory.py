"""Whose a data directory is: new, ours, another daemon's, another program's, of another format, broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from prefixcache_offload.disk import DiskOptions, DiskRefused, Refusal
from prefixcache_offload.disk.directory import FORMAT, LOCK, Directory, open_directory
from prefixcache_offload.disk.seam import RealDisk
from prefixcache_offload.disk.tier import DiskTier
from tests.unit.offload.disk.fake_disk import Crash, Crashed, FakeDisk
from tests.unit.offload.disk.log import PATH, SMALL, Log


def refused(path: Path | str, disk: FakeDisk | None = None) -> DiskRefused:
    with pytest.raises(DiskRefused) as told:
        open_directory(disk or RealDisk(), str(path))
    return told.value


def reopened(path: Path) -> Directory:
    directory = open_directory(RealDisk(), str(path))
    directory.close()
    return directory


def test_a_new_directory_is_made_and_keeps_its_nonce(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "data"
    first, second = reopened(path), reopened(path)
    assert first.nonce == second.nonce
    assert (first.epoch, second.epoch) == (1, 2)
    assert path.stat().st_mode & 0o777 == 0o700
    assert all(file.stat().st_mode & 0o077 == 0 for file in path.iterdir())
    assert reopened(tmp_path / "other").nonce != first.nonce


def test_a_second_daemon_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    code = (
        "import sys; from prefixcache_offload.disk.directory import open_directory; "
        "from prefixcache_offload.disk.seam import RealDisk; "
        "d = open_directory(RealDisk(), sys.argv[1]); print('open', flush=True); sys.stdin.read()"
    )
    line = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        told = refused(tmp_path)
        assert told.reason is Refusal.IN_USE
        assert str(tmp_path) in str(told)
        child.kill()
    assert reopened(tmp_path).epoch == 2


def test_a_foreign_directory_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    told = refused(tmp_path)
    assert told.reason is Refusal.FOREIGN
    assert "thesis.txt" in str(told)
    assert os.listdir(tmp_path) == ["thesis.txt"]


def test_a_format_file_of_another_program(tmp_path: Path) -> None:
    (tmp_path / FORMAT).write_text('{"magic": "something else"}')
    assert refused(tmp_path).reason is Refusal.FOREIGN


@pytest.mark.parametrize(("version", "reason"), [(2, Refusal.NEWER_FORMAT), (0, Refusal.OTHER_FORMAT)])
def test_another_format(version: int, reason: Refusal, tmp_path: Path) -> None:
    reopened(tmp_path)
    told = json.loads((tmp_path / FORMAT).read_text())
    (tmp_path / FORMAT).write_text(json.dumps(told | {"format": version}))
    error = refused(tmp_path)
    assert error.reason is reason
    assert f"format {version}" in str(error)


@pytest.mark.parametrize("text", ["", "not json", "[]", '{"magic": "prefixcache-disk", "format": 1}'])
def test_a_damaged_format_file(text: str, tmp_path: Path) -> None:
    reopened(tmp_path)
    (tmp_path / FORMAT).write_text(text)
    assert refused(tmp_path).reason is Refusal.DAMAGED_FORMAT


def test_a_changed_nonce_is_damage(tmp_path: Path) -> None:
    """Believing it would make every record a stranger's, and their files would be removed as empty."""
    reopened(tmp_path)
    told = json.loads((tmp_path / FORMAT).read_text())
    (tmp_path / FORMAT).write_text(json.dumps(told | {"nonce": "00" * 16}))
    assert refused(tmp_path).reason is Refusal.DAMAGED_FORMAT


def test_what_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert refused(tmp_path / "file").reason is Refusal.UNUSABLE
    assert refused(tmp_path / "file" / "below").reason is Refusal.UNUSABLE


def test_an_opening_that_was_cut_short_is_taken_up(tmp_path: Path) -> None:
    for at in range(12):
        disk = FakeDisk()
        disk.crash = Crash(at)
        try:
            open_directory(disk, PATH)
        except Crashed:
            open_directory(disk.after_kill(), PATH)
            continue
        break
    assert at > 4
    (tmp_path / LOCK).write_text("")
    (tmp_path / (FORMAT + ".new")).write_text("half")
    assert reopened(tmp_path).epoch == 1


def test_a_refusal_lets_the_lock_go(tmp_path: Path) -> None:
    reopened(tmp_path)
    good = (tmp_path / FORMAT).read_text()
    (tmp_path / FORMAT).write_text("broken")
    refused(tmp_path)
    (tmp_path / FORMAT).write_text(good)
    reopened(tmp_path)


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"cap_bytes": (256 << 20) - 1}, Refusal.CAP_TOO_SMALL),
        ({"cap_bytes": 0}, Refusal.CAP_TOO_SMALL),
        ({"cap_bytes": 1 << 30, "segment_bytes": 4096}, Refusal.BAD_OPTIONS),
        ({"cap_bytes": 1 << 30, "segment_bytes": (1 << 20) + 1}, Refusal.BAD_OPTIONS),
        ({"cap_bytes": 1 << 30, "readers": 0}, Refusal.BAD_OPTIONS),
    ],
)
def test_sizes_that_cannot_work(sizes: dict[str, int], reason: Refusal) -> None:
    with pytest.raises(DiskRefused) as told:
        DiskOptions(**sizes)
    assert told.value.reason is reason


@pytest.mark.parametrize("segments", [1, 2, 3, 7])
def test_the_cap_holds_for_all_files_together(segments: int, tmp_path: Path) -> None:
    options = replace(SMALL, cap_bytes=segments * SMALL.segment_bytes)
    log = Log(None, options, str(tmp_path / "data"))
    log.write(range(20 * segments))
    used = sum(file.stat().st_size for file in (tmp_path / "data").iterdir())
    assert options.cap_bytes - 2 * SMALL.segment_bytes < used <= options.cap_bytes
    log.tier.close()


def test_a_smaller_cap_drops_the_oldest(tmp_path: Path) -> None:
    path = str(tmp_path)
    log = Log(None, SMALL, path)
    job = log.write(range(40))
    log.tier.close()
    small = replace(SMALL, cap_bytes=192 << 10)
    again = Log(None, small, path)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= small.cap_bytes
    told = again.recover()
    assert again.tier.counters.over_cap_segments > 0
    newest = int(job.entries["segment"].max())
    assert newest in told["segment"]
    assert again.check(told) == {int(n) for n in told["depth"]}
    again.tier.close()


def test_a_used_tier_says_where_it_is_closed(tmp_path: Path) -> None:
    tier = DiskTier(str(tmp_path), SMALL)
    assert tier.close()
    DiskTier(str(tmp_path), SMALL).close()
