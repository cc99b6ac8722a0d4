"""The GPU tier of a real daemon, on the CPU that stands in for a device: hot blocks are copied up, read from there, and
nothing is lost when copies, workers, pools or the daemon go."""

import os
import random
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from prefixcache.v1 import admin_pb2, common_pb2
from prefixcache_client import Blocks, Client, ClientOptions, Namespace
from tests.e2e.processes import DaemonProcess, wait_until
from tests.e2e.test_daemon_process import stats_of
from tests.e2e.test_disk import flush
from tests.issues.workers import BLOCK_BYTES, BLOCK_TOKENS, LAYOUT, bytes_of, namespace

BLOCKS = 8  # of 128 KiB: 1 MiB a prompt
ON_GPU = ClientOptions(timeout_s=10.0, store_timeout_s=20.0, device="cpu")
OFF_GPU = ClientOptions(timeout_s=10.0, store_timeout_s=20.0)
pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def daemon(folder: Path) -> Iterator[DaemonProcess]:
    running = DaemonProcess(folder, "--gpu=cpu=64MiB")
    yield running
    running.kill()


def address(daemon: DaemonProcess) -> str:
    return f"unix://{daemon.socket}"


def tokens(prompt: int) -> list[int]:
    return [prompt + 1] * (BLOCKS * BLOCK_TOKENS)


def store(client: Client, prompt: int) -> None:
    def stored() -> bool:
        answer = client.store(namespace(client), tokens(prompt), Blocks(bytes_of(prompt, BLOCKS)))
        return answer.stored_blocks == BLOCKS

    assert wait_until(stored)  # the pool may still be made ready


def load(client: Client, prompt: int) -> dict[str, int]:
    """Tokens by tier of a prompt whose bytes were compared with what was stored; empty where it is not there."""
    target = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
    with client.acquire(namespace(client), tokens(prompt)) as lease:
        if lease.blocks < BLOCKS:
            return {}
        tiers = lease.tokens_by_tier
        assert lease.copy_to(Blocks(target))
    assert np.array_equal(target, bytes_of(prompt, BLOCKS))
    return {tier: count for tier, count in tiers.items() if count}


def climb(client: Client, prompt: int) -> bool:
    """Hits a prompt until it is read from GPU memory alone."""
    return wait_until(lambda: load(client, prompt) == {"gpu": BLOCKS * BLOCK_TOKENS})


def tier(stats: admin_pb2.GetStatsResponse) -> admin_pb2.TierStats:
    return next(tier for tier in stats.tiers if tier.tier == common_pb2.TIER_GPU)


def counter(stats: admin_pb2.GetStatsResponse, name: str, label: str = "") -> int:
    return next((each.value for each in stats.counters if each.name == name and each.label == label), 0)


def test_all_tiers_together_under_a_policy_that_learns(folder: Path, tmp_path: Path) -> None:
    """The start command of the README, with the stand-in for a device."""
    flags = "--disk", str(tmp_path / "disk"), "--disk-bytes", "64MiB", "--gpu", "cpu=3MiB", "--policy", "tg"
    daemon = DaemonProcess(folder, *flags)
    try:
        with Client(address(daemon), ON_GPU) as client:
            for prompt in range(3):
                store(client, prompt)
            assert climb(client, 2)
        assert flush(daemon) == 3 * BLOCKS
        daemon.kill()
        daemon = DaemonProcess(folder, *flags)
        with Client(address(daemon), ON_GPU) as client:
            assert wait_until(lambda: load(client, 0) == {"disk": BLOCKS * BLOCK_TOKENS})
            assert climb(client, 0)
        states = {common_pb2.Tier.Name(tier.tier): tier.state for tier in stats_of(daemon).tiers}
        assert states == {"TIER_HOST": "on", "TIER_GPU": "on", "TIER_DISK": "on"}
    finally:
        daemon.kill()


def test_what_is_hit_again_is_read_from_gpu_memory(daemon: DaemonProcess) -> None:
    with Client(address(daemon), ON_GPU) as client:
        store(client, 0)
        assert load(client, 0) == {"host": BLOCKS * BLOCK_TOKENS}
        assert climb(client, 0)
        stats = stats_of(daemon)
    assert stats.tokens.hit.gpu == BLOCKS * BLOCK_TOKENS
    assert stats.tokens.looked_up == stats.tokens.hit.gpu + stats.tokens.hit.host
    row = tier(stats)
    assert (row.state, row.device, row.blocks) == ("on", "cpu", BLOCKS)
    assert row.used_bytes == BLOCKS * BLOCK_BYTES
    assert row.capacity_bytes == 64 << 20
    assert counter(stats, "blocks_promoted") == BLOCKS
    assert stats.health == "serving"


def test_a_worker_without_the_device_reads_host_memory(daemon: DaemonProcess) -> None:
    with Client(address(daemon), ON_GPU) as client, Client(address(daemon), OFF_GPU) as other:
        store(client, 0)
        assert climb(client, 0)
        assert load(other, 0) == {"host": BLOCKS * BLOCK_TOKENS}
        grpc_only = ClientOptions(timeout_s=10.0, local_channel=False, device="cpu")
        with Client(address(daemon), grpc_only) as remote:
            assert load(remote, 0) == {"host": BLOCKS * BLOCK_TOKENS}


def test_a_block_can_be_looked_at_where_it_is(daemon: DaemonProcess) -> None:
    with Client(address(daemon), ON_GPU) as client:
        store(client, 0)
        assert climb(client, 0)
        with client.acquire(namespace(client), tokens(0)) as lease:
            with lease.view(2) as seen:
                assert np.array_equal(seen, bytes_of(0, BLOCKS)[2])
                assert not seen.flags.writeable
            assert lease.valid()


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_coded_blocks_are_decoded_from_gpu_memory_as_from_the_host(daemon: DaemonProcess, codec: str) -> None:
    with Client(address(daemon), ON_GPU) as client, Client(address(daemon), OFF_GPU) as other:
        spaces = [each.namespace(LAYOUT, b"w" * 32, block_tokens=BLOCK_TOKENS, codec=codec) for each in (client, other)]
        numbers = np.random.default_rng(1).normal(size=(BLOCKS, BLOCK_BYTES // 4)).astype(np.float32).view(np.uint8)

        def stored() -> bool:
            return client.store(spaces[0], tokens(0), Blocks(numbers)).stored_blocks == BLOCKS

        def loaded(by: Client, space: Namespace) -> tuple[dict[str, int], bytes]:
            target = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
            with by.acquire(space, tokens(0)) as lease:
                tiers = lease.tokens_by_tier
                assert lease.copy_to(Blocks(target))
            return {tier: count for tier, count in tiers.items() if count}, target.tobytes()

        assert wait_until(stored)
        everywhere = BLOCKS * BLOCK_TOKENS
        assert wait_until(lambda: loaded(client, spaces[0])[0] == {"gpu": everywhere})
        (near, there), (far, here) = loaded(client, spaces[0]), loaded(other, spaces[1])
        assert (near, far) == ({"gpu": everywhere}, {"host": everywhere})
        assert there == here
        row = tier(stats_of(daemon))
        assert row.used_bytes < BLOCKS * BLOCK_BYTES // 2, "it is the smaller form that was copied up"


def test_another_process_copies_by_ticket_what_lies_in_gpu_memory(daemon: DaemonProcess) -> None:
    with Client(address(daemon), ON_GPU) as client, Client(address(daemon), ON_GPU) as other:
        store(client, 0)
        assert climb(client, 0)
        target = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
        with client.acquire(namespace(client), tokens(0)) as lease:
            ticket = lease.ticket()
            assert ticket is not None
            assert other.copy_by_ticket(namespace(other), ticket, Blocks(target))
        assert np.array_equal(target, bytes_of(0, BLOCKS))


def test_more_than_the_pool_holds_goes_up_in_turns(folder: Path) -> None:
    daemon = DaemonProcess(folder, "--gpu=cpu=3MiB")
    try:
        with Client(address(daemon), ON_GPU) as client:
            for prompt in range(6):
                store(client, prompt)
                assert climb(client, prompt)
            for prompt in range(6):
                assert load(client, prompt)
            stats = stats_of(daemon)
        assert counter(stats, "gpu_drops", "evicted") >= 3 * BLOCKS
        assert tier(stats).used_bytes <= 3 << 20
    finally:
        daemon.kill()


def test_a_prompt_longer_than_the_pool_is_read_from_both(folder: Path) -> None:
    daemon = DaemonProcess(folder, "--gpu=cpu=512KiB")
    try:
        with Client(address(daemon), ON_GPU) as client:
            store(client, 0)
            half = {"gpu": 4 * BLOCK_TOKENS, "host": 4 * BLOCK_TOKENS}
            assert wait_until(lambda: load(client, 0) == half)
            assert counter(stats_of(daemon), "promotions_skipped", "no_room") > 0
    finally:
        daemon.kill()


def test_cleared_blocks_are_not_served_from_copies(daemon: DaemonProcess) -> None:
    import grpc

    with Client(address(daemon), ON_GPU) as client:
        store(client, 0)
        assert climb(client, 0)
        with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
            method = channel.unary_unary(
                "/prefixcache.v1.AdminService/Evict",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=admin_pb2.EvictResponse.FromString,
            )
            method(admin_pb2.EvictRequest(), timeout=40)
        assert load(client, 0) == {}
        store(client, 0)
        assert load(client, 0) == {"host": BLOCKS * BLOCK_TOKENS}
        assert tier(stats_of(daemon)).blocks == 0


def test_readers_see_the_right_bytes_while_copies_come_and_go(folder: Path) -> None:
    """Three prompts of six fit; every load compares its bytes."""
    daemon = DaemonProcess(folder, "--gpu=cpu=3MiB")

    def read(seed: int) -> dict[str, int]:
        rng, total = random.Random(seed), dict.fromkeys(("gpu", "host"), 0)
        with Client(address(daemon), ON_GPU) as client:
            for _ in range(80):
                for tier, count in load(client, min(int(rng.expovariate(0.4)), 5)).items():
                    total[tier] += count
        return total

    try:
        with Client(address(daemon), ON_GPU) as client:
            for prompt in range(6):
                store(client, prompt)
        with ThreadPoolExecutor(3) as readers:
            totals = list(readers.map(read, range(3)))
        stats = stats_of(daemon)
        assert all(total["gpu"] and total["host"] for total in totals)
        assert stats.tokens.hit.gpu == sum(total["gpu"] for total in totals)
        assert counter(stats, "gpu_drops", "evicted") > 0
    finally:
        daemon.kill()


HOLDER = """
    import sys, time
    import numpy as np
    from prefixcache_client import Blocks, Client
    from tests.e2e.test_gpu import ON_GPU, climb, store, tokens
    from tests.issues.workers import namespace
    client = Client(sys.argv[1], ON_GPU)
    store(client, 0)
    assert climb(client, 0)
    lease = client.acquire(namespace(client), tokens(0))
    assert lease.tokens_by_tier["gpu"]
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_killed_worker_gives_its_copies_back(daemon: DaemonProcess) -> None:
    worker = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOLDER), address(daemon)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "held\n"
        assert tier(stats_of(daemon)).leased_bytes == BLOCKS * BLOCK_BYTES
        worker.kill()
        worker.wait()
        assert wait_until(lambda: tier(stats_of(daemon)).leased_bytes == 0)
        with Client(address(daemon), ON_GPU) as client:
            assert load(client, 0) == {"gpu": BLOCKS * BLOCK_TOKENS}
    finally:
        worker.kill()
        worker.communicate()


def test_a_killed_daemon_makes_leases_over_copies_misses(daemon: DaemonProcess, folder: Path) -> None:
    with Client(address(daemon), ON_GPU) as client:
        store(client, 0)
        assert climb(client, 0)
        target = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
        with client.acquire(namespace(client), tokens(0)) as lease:
            os.kill(daemon.pid, signal.SIGKILL)
            daemon.wait()
            copied = lease.copy_to(Blocks(target))
            # Its bytes may still be there, or its mapping gone already; never another's.
            assert not copied or np.array_equal(target, bytes_of(0, BLOCKS))
        again = DaemonProcess(folder, "--gpu=cpu=64MiB")
        try:
            assert load(client, 0) == {}
            store(client, 0)
            assert climb(client, 0)
        finally:
            again.kill()


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("cuda:99=1MiB", "cuda:99"),
        ("gpu0=1GiB", "cpu=64MiB"),
        ("cpu", "cpu=64MiB"),
        ("cpu=1MiB,cpu=2MiB", "listed twice"),
        ("cpu=lots", "a size"),
    ],
)
def test_a_device_that_cannot_be_is_told(folder: Path, value: str, told: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "prefixcache.server", f"--socket={folder}/d.sock", "--host-bytes=16MiB", "--http=",
         f"--gpu={value}"], capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert "gpu" in done.stderr
    assert told in done.stderr


def test_a_worker_that_cannot_reach_the_device_goes_on_without(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from prefixcache_offload import gpu

    with Client(address(daemon), ON_GPU) as client:
        store(client, 0)
        assert climb(client, 0)

    def refused(*_: object) -> object:
        raise gpu.DeviceError(gpu.DeviceReason.WRONG_DEVICE, "the pool is elsewhere")

    monkeypatch.setattr(gpu, "import_device_pool", refused)
    with Client(address(daemon), ON_GPU) as client:
        assert load(client, 0) == {"host": BLOCKS * BLOCK_TOKENS}
    assert "the pool is elsewhere" in caplog.text
