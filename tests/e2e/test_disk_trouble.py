"""A real daemon over a disk in trouble: it hangs, fails, is slow, read-only, damaged or of another version. The tier
turns itself off with a reason, tries again, and no worker waits longer than it said."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixcache_client import Blocks, Client
from prefixcache_client.paths import MappedPath
from prefixcache_client.reasons import reason_name
from tests.e2e.processes import DaemonProcess, wait_until
from tests.e2e.test_daemon_process import stats_of
from tests.e2e.test_disk import (
    BLOCKS,
    OPTIONS,
    PROMPTS,
    Daemons,
    address,
    counter,
    fill,
    flush,
    load,
    store,
    tier,
    tokens,
)
from tests.issues.workers import BLOCK_BYTES, BLOCK_TOKENS, bytes_of, namespace

PAGE = 4096
pytestmark = pytest.mark.slow


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "faults"
    folder.mkdir()
    monkeypatch.setenv("DISK_FAULTS", str(folder))
    return folder


@pytest.fixture
def daemons(tmp_path: Path, faults: Path) -> Iterator[Daemons]:
    made = Daemons(tmp_path / "run", tmp_path / "data")
    made.module = "tests.e2e.faulty_daemon"
    yield made
    made.kill()


def killed(daemon: DaemonProcess) -> None:
    os.kill(daemon.pid, signal.SIGKILL)
    daemon.wait()


def test_after_kill_9_the_first_hit_is_served_while_older_segments_are_not_read_yet(
    daemons: Daemons, faults: Path
) -> None:
    daemon = daemons.start("--disk-segment-bytes=4MiB")
    with Client(address(daemon), OPTIONS) as client:
        for prompt in range(4):
            store(client, prompt)
            flush(daemon)
    killed(daemon)
    (faults / "hang_reads").write_text("1")  # the oldest segment
    daemon = daemons.start("--disk-segment-bytes=4MiB", "--disk-stall=60s")
    with Client(address(daemon), OPTIONS) as client:
        assert wait_until(lambda: load(client, 3))
        assert counter(stats_of(daemon), "disk_recovery_us", "took") == 0, "the scan is not over"
        assert not load(client, 0)
        (faults / "hang_reads").unlink()
        assert wait_until(lambda: load(client, 0))
        assert wait_until(lambda: counter(stats_of(daemon), "disk_recovery_us", "took") > 0)


@pytest.mark.parametrize("local", [True, False], ids=["local", "grpc"])
def test_a_read_that_hangs_costs_a_worker_no_more_than_it_would_wait(
    daemons: Daemons, faults: Path, *, local: bool
) -> None:
    daemon = daemons.start("--disk-stall=60s")  # nobody has noticed yet that it hangs
    with Client(address(daemon), replace(OPTIONS, local_channel=local)) as client:
        fill(client, daemon)
        (faults / "hang_reads").touch()
        began = time.monotonic()
        target = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
        with client.acquire(namespace(client), tokens(0), load_timeout_s=0.5) as lease:
            assert lease.blocks == BLOCKS
            copied = lease.copy_to(Blocks(target))
        took_s = time.monotonic() - began
        assert (bool(copied), copied.reason) == (False, "deadline")
        assert took_s < 0.5 + 2.0, "on two busy cores a thread may get its turn late"
        store(client, PROMPTS)
        assert load(client, PROMPTS)
        (faults / "hang_reads").unlink()
        assert wait_until(lambda: load(client, 0))


def test_a_disk_that_hangs_turns_the_tier_off_and_it_comes_back(daemons: Daemons, faults: Path) -> None:
    daemon = daemons.start("--disk-stall=300ms")
    with Client(address(daemon), OPTIONS) as client:
        fill(client, daemon)
        (faults / "hang_reads").touch()
        began = time.monotonic()
        assert not load(client, 0)
        assert time.monotonic() - began < 10, "its load timeout is 20 s, the tier was off sooner"
        assert wait_until(lambda: "stalled" in stats_of(daemon).health_detail)
        assert tier(stats_of(daemon)).state == "off"
        assert client.lookup(namespace(client), tokens(1)).reason == "tier_off"
        store(client, PROMPTS)
        (faults / "hang_reads").unlink()
        assert wait_until(lambda: stats_of(daemon).health == "serving")
        assert wait_until(lambda: load(client, 1))
    assert counter(stats_of(daemon), "disk_stalls") >= 1


@pytest.mark.parametrize("fault", ["eio_reads", "eio_writes"])
def test_a_disk_that_fails_turns_the_tier_off_and_it_comes_back(daemons: Daemons, faults: Path, fault: str) -> None:
    daemon = daemons.start()
    with Client(address(daemon), OPTIONS) as client:
        fill(client, daemon)
        (faults / fault).touch()
        for prompt in range(4):
            load(client, prompt)
        store(client, PROMPTS)
        flush(daemon)
        assert wait_until(lambda: "io_error" in stats_of(daemon).health_detail)
        assert stats_of(daemon).health == "degraded"
        assert load(client, PROMPTS), "memory goes on"
        (faults / fault).unlink()
        assert wait_until(lambda: stats_of(daemon).health == "serving")
        assert wait_until(lambda: load(client, 5))


@pytest.mark.parametrize(("record_s", "loads"), [(2.4, False), (0.4, True)], ids=["slower", "faster"])
def test_a_slow_disk_never_makes_a_request_slower_than_computing(
    daemons: Daemons, faults: Path, record_s: float, *, loads: bool
) -> None:
    """Computing a prompt takes 1.6 s; `record_s`: reading it."""
    block_s = 0.1
    daemon = daemons.start("--disk-stall=60s")
    with Client(address(daemon), OPTIONS) as client:
        fill(client, daemon)
        (faults / "record_s").write_text(str(record_s))
        load(client, 0)  # now the daemon knows how fast it is
        costs = []
        for prompt in (1, 2, 3):
            began = time.monotonic()
            got = 0
            with client.acquire(
                namespace(client), tokens(prompt), recompute_s_per_token=block_s / BLOCK_TOKENS
            ) as lease:
                if lease.blocks:
                    got = lease.blocks if lease.copy_to(Blocks(np.zeros((BLOCKS, BLOCK_BYTES), np.uint8))) else 0
                elif not loads:
                    assert lease.reason == "slower_than_recompute"
            costs.append(time.monotonic() - began + (BLOCKS - got) * block_s)
            assert bool(got) is loads
        stats = stats_of(daemon)
    assert max(costs) <= 1.05 * BLOCKS * block_s
    counted = {reason_name(each.reason): each.count for each in stats.tokens.miss}
    assert counted.get("slower_than_recompute", 0) == (0 if loads else 3 * BLOCKS * BLOCK_TOKENS)


@pytest.mark.parametrize(("record_s", "loads"), [(2.4, False), (0.4, True)], ids=["slower", "faster"])
def test_the_first_request_after_a_start_knows_how_fast_the_disk_is(
    daemons: Daemons, faults: Path, record_s: float, *, loads: bool
) -> None:
    """Nothing was read in earnest before it. Computing a prompt takes 1.6 s; `record_s`: reading it."""
    block_s = 0.1
    daemon = daemons.start()
    with Client(address(daemon), OPTIONS) as client:
        for prompt in range(4):
            store(client, prompt)
            flush(daemon)
    assert daemon.terminate() == 0
    (faults / "record_s").write_text(str(record_s))
    daemon = daemons.start("--disk-stall=60s")
    with Client(address(daemon), OPTIONS) as client:
        assert wait_until(lambda: counter(stats_of(daemon), "disk_recovery_us", "took") > 0)
        measured = counter(stats_of(daemon), "disk_probed_bytes_per_s")
        assert 0.5 < measured * record_s / (BLOCKS * BLOCK_BYTES) < 1.1
        began = time.monotonic()
        with client.acquire(namespace(client), tokens(1), recompute_s_per_token=block_s / BLOCK_TOKENS) as lease:
            got = 0
            if lease.blocks:
                got = lease.blocks if lease.copy_to(Blocks(np.zeros((BLOCKS, BLOCK_BYTES), np.uint8))) else 0
        cost_s = time.monotonic() - began + (BLOCKS - got) * block_s
        assert bool(got) is loads
        assert lease.reason == ("" if loads else "slower_than_recompute")
    assert cost_s <= 1.05 * BLOCKS * block_s


def test_blocks_are_copied_while_later_ones_are_still_read(
    daemons: Daemons, faults: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a prompt of 6 MiB the first 2 MiB are read alone, then the rest. On a busy machine the reader of the rest may
    be first at the disk, so of three prompts one has to show it."""
    long, record_s = 3 * BLOCKS, 0.4
    daemon = daemons.start("--disk-stall=60s")
    copied_at: list[float] = []
    copy = MappedPath.load

    def timed(self: MappedPath, *asked: Any) -> int:
        size = copy(self, *asked)
        copied_at.append(time.monotonic())
        return size

    monkeypatch.setattr(MappedPath, "load", timed)
    with Client(address(daemon), OPTIONS) as client:
        ns = namespace(client)
        for prompt in (101, 102, 103):
            assert client.store(ns, tokens(prompt, long), Blocks(bytes_of(prompt, long))).stored_blocks == long
            flush(daemon)
        fill(client, daemon)
        (faults / "record_s").write_text(str(record_s))
        early_s = []
        for prompt in (101, 102, 103):
            target = np.zeros((long, BLOCK_BYTES), np.uint8)
            copied_at.clear()
            with client.acquire(ns, tokens(prompt, long)) as lease:
                assert lease.tokens_by_tier["disk"] == long * BLOCK_TOKENS
                assert lease.copy_to(Blocks(target))
            assert np.array_equal(target, bytes_of(prompt, long))
            early_s.append(copied_at[-1] - copied_at[0])
    assert max(early_s) > 1.5 * record_s, "the rest takes twice that to read"


def test_another_format_version_is_refused(daemons: Daemons, tmp_path: Path) -> None:
    daemon = daemons.start()
    assert daemon.terminate() == 0
    told = json.loads((daemons.data / "format").read_text())
    (daemons.data / "format").write_text(json.dumps(told | {"format": told["format"] + 1}))
    with pytest.raises(RuntimeError, match="use a newer program or another directory"):
        DaemonProcess(tmp_path / "other", f"--disk={daemons.data}", "--disk-bytes=256MiB")


def test_a_hole_in_a_segment_costs_the_blocks_in_it(daemons: Daemons) -> None:
    daemon = daemons.start("--disk-segment-bytes=64MiB")
    with Client(address(daemon), OPTIONS) as client:
        for prompt in range(4):
            store(client, prompt)
            flush(daemon)
    killed(daemon)
    (segment,) = sorted(daemons.data.glob("segment-*"))
    record = BLOCK_BYTES + PAGE
    start = (BLOCKS + 8) * record  # block 8 of the second prompt and the two after it
    with segment.open("r+b") as file:
        file.seek(start)
        file.write(bytes(3 * record))
    daemon = daemons.start("--disk-segment-bytes=64MiB")
    with Client(address(daemon), OPTIONS) as client:
        assert all(wait_until(lambda prompt=prompt: load(client, prompt)) for prompt in (0, 2, 3))
        assert client.lookup(namespace(client), tokens(1)).tokens == 8 * BLOCK_TOKENS
        stats = stats_of(daemon)
    assert counter(stats, "disk_drops", "orphaned") == BLOCKS - 8 - 3
    assert stats.health == "serving"


@pytest.fixture
def mount(tmp_path: Path) -> Iterator["Mount"]:
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    mounted = Mount(tmp_path / "mounted")
    yield mounted
    mounted.end()


class Mount:
    """A file system in memory."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._is_there = False
        place.mkdir()

    def make(self, kind: str, *options: str) -> None:
        if subprocess.run(["mount", "-t", kind, *options, "none", self.place], check=False).returncode:
            pytest.skip("mounting is not allowed here")
        self._is_there = True

    def again(self, option: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{option}", self.place], check=True)

    def end(self) -> None:
        if self._is_there:
            subprocess.run(["umount", "-l", self.place], check=True)


def test_a_file_system_without_direct_calls_works(daemons: Daemons, mount: Mount) -> None:
    mount.make("ramfs")
    daemons.data = mount.place / "data"
    daemon = daemons.start("--disk-bytes=128MiB")
    with Client(address(daemon), OPTIONS) as client:
        fill(client, daemon)
        assert all(load(client, prompt) for prompt in range(PROMPTS))
    assert tier(stats_of(daemon)).state == "on"


def test_a_read_only_file_system_is_tried_again(daemons: Daemons, mount: Mount) -> None:
    mount.make("tmpfs", "-o", "size=160m")
    daemons.data = mount.place / "data"
    mount.again("ro")
    daemon = daemons.start("--disk-bytes=128MiB")
    with Client(address(daemon), OPTIONS) as client:
        assert stats_of(daemon).health == "degraded"
        store(client, PROMPTS)
        assert load(client, PROMPTS)
        mount.again("rw")
        assert wait_until(lambda: stats_of(daemon).health == "serving")
        fill(client, daemon)
        assert load(client, 1)
    assert tier(stats_of(daemon)).state == "on"
