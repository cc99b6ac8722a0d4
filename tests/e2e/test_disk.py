"""The disk tier of a real daemon: more than memory holds comes back, over restarts too, and trouble is told."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest

from prefixcache.identity import GroupKind, LayerGroup, Layout
from prefixcache.v1 import admin_pb2, common_pb2
from prefixcache_client import Blocks, Client, ClientOptions, Namespace
from tests.e2e.processes import DaemonProcess, wait_until
from tests.e2e.test_daemon_process import stats_of
from tests.issues.workers import BLOCK_BYTES, BLOCK_TOKENS, bytes_of, namespace

BLOCKS = 16
PROMPTS = 16  # of 2 MiB each: twice what memory holds
OPTIONS = ClientOptions(timeout_s=10.0, store_timeout_s=20.0, load_timeout_s=20.0)
pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def daemons(folder: Path, tmp_path: Path) -> Iterator["Daemons"]:
    made = Daemons(folder, tmp_path / "data")
    yield made
    made.kill()


class Daemons:
    """One daemon after the other over the same data directory."""

    def __init__(self, folder: Path, data: Path) -> None:
        self.folder = folder
        self.data = data
        self.module = "prefixcache.server"
        self.running: DaemonProcess | None = None

    def start(self, *flags: str) -> DaemonProcess:
        default = [f"--disk={self.data}", "--disk-bytes=256MiB", "--disk-segment-bytes=8MiB"]
        running = self.running = DaemonProcess(self.folder, *default, "--disk-retry=200ms", *flags, module=self.module)
        assert wait_until(lambda: is_whole(stats_of(running)))
        return running

    def kill(self) -> None:
        if self.running is not None:
            self.running.kill()


def is_whole(stats: admin_pb2.GetStatsResponse) -> bool:
    """Whether all of the host pool may be used."""
    host = next(tier for tier in stats.tiers if tier.tier == common_pb2.TIER_HOST)
    return host.ready_bytes == host.capacity_bytes


def tokens(prompt: int, blocks: int = BLOCKS) -> list[int]:
    return [prompt + 1] * (blocks * BLOCK_TOKENS)


def store(client: Client, prompt: int) -> None:
    ns = namespace(client)
    stored = client.store(ns, tokens(prompt), Blocks(bytes_of(prompt, BLOCKS)))
    assert stored.stored_blocks == BLOCKS, stored


def load(client: Client, prompt: int) -> bool:
    """Whether the prompt came back whole; if it did, its bytes are those that were stored."""
    target = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
    with client.acquire(namespace(client), tokens(prompt)) as lease:
        if lease.blocks < BLOCKS:
            return False
        copied = lease.copy_to(Blocks(target))
        if not copied:
            return False
    assert np.array_equal(target, bytes_of(prompt, BLOCKS))
    return True


def tier(stats: admin_pb2.GetStatsResponse) -> admin_pb2.TierStats:
    return next(tier for tier in stats.tiers if tier.tier == common_pb2.TIER_DISK)


def counter(stats: admin_pb2.GetStatsResponse, name: str, label: str = "") -> int:
    return next((each.value for each in stats.counters if each.name == name and each.label == label), 0)


def address(daemon: DaemonProcess) -> str:
    return f"unix://{daemon.socket}"


def flush(daemon: DaemonProcess) -> int:
    """Blocks that were written by it."""
    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        method = channel.unary_unary(
            "/prefixcache.v1.AdminService/Flush",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=admin_pb2.FlushResponse.FromString,
        )
        return int(method(admin_pb2.FlushRequest(), timeout=40).blocks)


def clear(daemon: DaemonProcess) -> None:
    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        method = channel.unary_unary(
            "/prefixcache.v1.AdminService/Evict",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=admin_pb2.EvictResponse.FromString,
        )
        method(admin_pb2.EvictRequest(), timeout=40)


def disk_usage(data: Path) -> int:
    """Bytes of all files, of which some may go at any moment."""
    total = 0
    for path in data.iterdir():
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def written(daemon: DaemonProcess, blocks: int) -> bool:
    return wait_until(lambda: tier(stats_of(daemon)).blocks >= blocks)


def fill(client: Client, daemon: DaemonProcess) -> None:
    """Twice what memory holds: the first prompts are on disk only after it."""
    for prompt in range(PROMPTS):
        store(client, prompt)
        assert written(daemon, (prompt - 6) * BLOCKS)
    flush(daemon)


@pytest.mark.parametrize(("local", "policy"), [(True, "lru"), (False, "lru"), (True, "tg"), (True, "arc")])
def test_what_memory_cannot_hold_comes_back_from_disk(daemons: Daemons, local: bool, policy: str) -> None:
    daemon = daemons.start(f"--policy={policy}")
    options = ClientOptions(timeout_s=10, store_timeout_s=20, load_timeout_s=20, local_channel=local)
    with Client(address(daemon), options) as client:
        for prompt in range(PROMPTS):
            # Memory takes 8 of them; the next one finds room that is free or on disk already.
            store(client, prompt)
            assert written(daemon, (prompt - 6) * BLOCKS)
        flush(daemon)
        back = [load(client, prompt) for prompt in range(PROMPTS)]
        stats = stats_of(daemon)
    assert all(back)
    assert stats.tokens.hit.disk > 0
    assert stats.tokens.hit.disk + stats.tokens.hit.host == PROMPTS * BLOCKS * BLOCK_TOKENS
    assert stats.tokens.looked_up == stats.tokens.hit.disk + stats.tokens.hit.host
    assert tier(stats).state == "on"
    assert stats.health == "serving"
    assert counter(stats, "disk_read_bytes") >= stats.tokens.hit.disk // BLOCK_TOKENS * BLOCK_BYTES


def test_after_kill_9_the_next_daemon_has_every_block_that_was_written(daemons: Daemons) -> None:
    daemon = daemons.start()
    with Client(address(daemon), OPTIONS) as client:
        for prompt in range(6):
            store(client, prompt)
        flush(daemon)
    os.kill(daemon.pid, signal.SIGKILL)
    daemon.wait()
    daemon = daemons.start()
    with Client(address(daemon), OPTIONS) as client:
        began = time.monotonic()
        first = wait_until(lambda: load(client, 0))
        first_hit_s = time.monotonic() - began
        rest = [wait_until(lambda prompt=prompt: load(client, prompt)) for prompt in range(6)]
        stats = stats_of(daemon)
    assert first
    assert all(rest)
    assert first_hit_s < 10
    assert stats.tokens.hit.disk >= 6 * BLOCKS * BLOCK_TOKENS
    assert counter(stats, "blocks_recovered") == 6 * BLOCKS


def test_a_graceful_stop_writes_what_only_memory_holds(daemons: Daemons) -> None:
    daemon = daemons.start()
    with Client(address(daemon), OPTIONS) as client:
        store(client, 0)
    assert daemon.terminate() == 0
    daemon = daemons.start()
    with Client(address(daemon), OPTIONS) as client:
        assert wait_until(lambda: load(client, 0))


def test_what_was_cleared_stays_away_over_a_restart(daemons: Daemons) -> None:
    daemon = daemons.start()
    with Client(address(daemon), OPTIONS) as client:
        store(client, 0)
        flush(daemon)
        store(client, 1)
        flush(daemon)
        clear(daemon)
    daemons.kill()  # right behind the answer
    daemon = daemons.start()
    with Client(address(daemon), OPTIONS) as client:
        store(client, 2)
        flush(daemon)
        assert not load(client, 0)
        assert not load(client, 1)
    daemons.kill()
    daemon = daemons.start()
    with Client(address(daemon), OPTIONS) as client:
        assert wait_until(lambda: load(client, 2))
        assert not load(client, 1)


def test_a_directory_in_use_or_of_somebody_else_is_refused(daemons: Daemons, folder: Path, tmp_path: Path) -> None:
    daemons.start()
    with pytest.raises(RuntimeError, match="another daemon uses"):
        DaemonProcess(tmp_path / "other", f"--disk={daemons.data}", "--disk-bytes=256MiB")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "photo.jpg").touch()
    with pytest.raises(RuntimeError, match="not a prefixcache data directory"):
        DaemonProcess(tmp_path / "other", f"--disk={foreign}", "--disk-bytes=256MiB")
    with pytest.raises(RuntimeError, match="smaller than one segment"):
        DaemonProcess(
            tmp_path / "other", f"--disk={tmp_path / 'small'}", "--disk-bytes=1MiB", "--disk-segment-bytes=8MiB"
        )


def test_the_cap_holds_and_the_service_goes_on(daemons: Daemons) -> None:
    daemon = daemons.start("--disk-bytes=24MiB", "--disk-segment-bytes=2MiB")
    with Client(address(daemon), OPTIONS) as client:
        for prompt in range(3 * PROMPTS):
            store(client, prompt)
            assert disk_usage(daemons.data) <= 24 << 20
        flush(daemon)
        newest = load(client, 3 * PROMPTS - 1)
        stats = stats_of(daemon)
    assert newest
    assert counter(stats, "disk_segments_freed") > 0
    assert stats.health == "serving"


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    place = tmp_path / "full"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", place], check=False).returncode:
        pytest.skip("mounting is not allowed here")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_a_full_file_system_degrades_the_tier_and_not_the_service(daemons: Daemons, small_tmpfs: Path) -> None:
    daemons.data = small_tmpfs / "data"
    daemon = daemons.start()
    with Client(address(daemon), OPTIONS) as client:
        store(client, 0)
        flush(daemon)
        assert wait_until(lambda: stats_of(daemon).health == "degraded")
        stats = stats_of(daemon)
        assert "no_space" in stats.health_detail
        assert tier(stats).state == "failing"
        assert "no_space" in tier(stats).detail
        for prompt in range(1, PROMPTS):  # memory alone, as without a disk
            store(client, prompt)
        assert load(client, PROMPTS - 1)
    assert counter(stats_of(daemon), "disk_drops", "dropped_unwritten") > 0


def test_a_directory_that_cannot_be_used_turns_the_tier_off_until_it_can(daemons: Daemons, tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.touch()  # a file where the folder above the data directory should be
    daemons.data = blocked / "data"
    daemon = daemons.start()
    with Client(address(daemon), OPTIONS) as client:
        stats = stats_of(daemon)
        assert stats.health == "degraded"
        assert "disk tier off" in stats.health_detail
        assert tier(stats).state == "off"
        store(client, 0)
        assert load(client, 0)
        blocked.unlink()
        blocked.mkdir()
        assert wait_until(lambda: stats_of(daemon).health == "serving")
        assert wait_until(lambda: flush(daemon) >= BLOCKS or tier(stats_of(daemon)).blocks >= BLOCKS)


def test_a_directory_that_vanishes_turns_the_tier_off_and_blocks_are_misses(daemons: Daemons) -> None:
    daemon = daemons.start()
    with Client(address(daemon), OPTIONS) as client:
        for prompt in range(PROMPTS):
            store(client, prompt)
            assert written(daemon, (prompt - 6) * BLOCKS)
        flush(daemon)
        shutil.rmtree(daemons.data)
        assert wait_until(lambda: "directory_gone" in stats_of(daemon).health_detail)
        assert wait_until(lambda: client.lookup(namespace(client), tokens(0)).reason == "tier_off")
        with client.acquire(namespace(client), tokens(0)) as lease:
            assert (lease.blocks, lease.reason) == (0, "tier_off")
        store(client, PROMPTS)
        assert load(client, PROMPTS)
        stats = stats_of(daemon)
    assert stats.health == "degraded"
    assert tier(stats).state == "off"


def test_a_worker_that_will_not_wait_gets_what_is_in_memory(daemons: Daemons) -> None:
    daemon = daemons.start()
    with Client(address(daemon), OPTIONS) as client:
        for prompt in range(PROMPTS):
            store(client, prompt)
            assert written(daemon, (prompt - 6) * BLOCKS)
        flush(daemon)
        with client.acquire(namespace(client), tokens(0), load_timeout_s=0.0) as lease:
            assert (lease.blocks, lease.reason) == (0, "deadline")
        with client.acquire(namespace(client), tokens(0), recompute_s_per_token=1e-9) as lease:
            assert (lease.blocks, lease.reason) == (0, "slower_than_recompute")
        with Client(address(daemon), replace(OPTIONS, recompute_s_per_token=1e-9)) as fast:
            with fast.acquire(namespace(fast), tokens(1)) as lease:
                assert (lease.blocks, lease.reason) == (0, "slower_than_recompute")
            with fast.acquire(namespace(fast), tokens(1), recompute_s_per_token=0.0) as lease:
                assert lease.blocks == BLOCKS, "said for this lease"
        assert load(client, 0)


def bell_curves(seed: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """u8[blocks, block bytes] of float16 numbers, which shrink."""
    values = np.random.default_rng(seed).standard_normal((BLOCKS, BLOCK_BYTES // 2)).astype(np.float16)
    return values.view(np.uint8)


@pytest.mark.parametrize("later", ["lossless", "raw", "auto"])
def test_smaller_records_survive_a_restart_with_whatever_codec(daemons: Daemons, later: str) -> None:
    """float16 blocks written losslessly, killed, and read by daemons that write in other ways: one log, both forms."""
    layout = Layout.of(LayerGroup(GroupKind.FULL, (0,), 1, 512, 512, "float16"))
    block_tokens = BLOCK_BYTES // 2 // 1024

    def namespace_of(client: Client) -> Namespace:
        return client.namespace(layout, b"s" * 32, block_tokens=block_tokens)

    def prompt_of(number: int) -> list[int]:
        return [number + 1] * (BLOCKS * block_tokens)

    def store_prompt(client: Client, number: int) -> None:
        stored = client.store(namespace_of(client), prompt_of(number), Blocks(bell_curves(number)))
        assert stored.stored_blocks == BLOCKS

    def check(client: Client, number: int) -> None:
        target = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
        with client.acquire(namespace_of(client), prompt_of(number)) as lease:
            assert lease.blocks == BLOCKS
            assert lease.copy_to(Blocks(target)).ok
        assert np.array_equal(target, bell_curves(number))

    daemon = daemons.start("--disk-codec=lossless")
    with Client(address(daemon), OPTIONS) as client:
        store_prompt(client, 0)
        flush(daemon)
        stats = stats_of(daemon)
        packed = counter(stats, "disk_packed")
        assert packed + counter(stats, "disk_kept_raw", "behind") == BLOCKS, "a machine without idle time writes raw"
        before, after = (counter(stats, "disk_packed_bytes", label) for label in ("before", "after"))
        assert before == packed * BLOCK_BYTES
        assert before >= 1.1 * after
        assert "lossless" in tier(stats).detail
    daemon.kill()
    daemon = daemons.start(f"--disk-codec={later}")
    with Client(address(daemon), OPTIONS) as client:
        assert written(daemon, BLOCKS)
        check(client, 0)
        store_prompt(client, 1)
        flush(daemon)
    daemon.kill()
    daemon = daemons.start("--disk-codec=raw")
    with Client(address(daemon), OPTIONS) as client:
        assert written(daemon, 2 * BLOCKS)
        check(client, 0)
        check(client, 1)
