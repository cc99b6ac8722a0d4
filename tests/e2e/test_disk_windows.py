"""Models with sliding layers on the disk of a real daemon: more than memory holds comes back, at any length that was
stored with its window, over a restart too."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from prefixcache.identity.layout import GroupKind, LayerGroup, Layout
from prefixcache_client import Blocks, Client, ClientOptions, Namespace
from tests.e2e.processes import wait_until
from tests.e2e.test_daemon_process import stats_of
from tests.e2e.test_disk import Daemons, address, counter, flush, written

LAYOUT = Layout.of(
    LayerGroup(GroupKind.FULL, (0, 2), 4, 64, 64, "float32"),
    LayerGroup(GroupKind.SLIDING, (1, 3), 4, 64, 64, "float32", 33),
)
BLOCK_TOKENS = 16
PART_BYTES = 2 * 4 * BLOCK_TOKENS * 128 * 4
BLOCKS, WINDOW = 16, 2
PROMPTS = 16  # of 2 MiB each: twice what memory holds
OPTIONS = ClientOptions(timeout_s=10.0, store_timeout_s=20.0, load_timeout_s=20.0)
pytestmark = pytest.mark.slow


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Daemons]:
    made = Daemons(tmp_path / "run", tmp_path / "data")
    yield made
    made.kill()


def namespace(client: Client) -> Namespace:
    return client.namespace(LAYOUT, b"w" * 32, block_tokens=BLOCK_TOKENS)


def tokens(prompt: int, blocks: int = BLOCKS) -> list[int]:
    return [prompt + 1] * (blocks * BLOCK_TOKENS)


def bytes_of(prompt: int, part: int) -> npt.NDArray[np.uint8]:
    """u8[blocks, part bytes]."""
    return np.random.default_rng([prompt, part]).integers(0, 256, (BLOCKS, PART_BYTES), dtype=np.uint8)


def store(client: Client, prompt: int) -> None:
    parts = [Blocks(bytes_of(prompt, part), part) for part in range(2)]
    assert client.store(namespace(client), tokens(prompt), parts).stored_blocks == BLOCKS


def load(client: Client, prompt: int, blocks: int = BLOCKS) -> bool:
    """Whether a prefix came back whole; if it did, its bytes are those that were stored."""
    with client.acquire(namespace(client), tokens(prompt, blocks)) as lease:
        if lease.blocks < blocks:
            return False
        assert lease.parts(0) == range(blocks)
        assert lease.parts(1) == range(blocks - WINDOW, blocks)
        full = np.zeros((blocks, PART_BYTES), np.uint8)
        window = np.zeros((WINDOW, PART_BYTES), np.uint8)
        if not lease.copy_to([Blocks(full), Blocks(window, 1, blocks - WINDOW)]):
            return False
    assert np.array_equal(full, bytes_of(prompt, 0)[:blocks])
    assert np.array_equal(window, bytes_of(prompt, 1)[blocks - WINDOW : blocks])
    return True


@pytest.mark.parametrize("local", [True, False], ids=["mapped", "grpc"])
def test_windows_come_back_from_disk_at_every_length(daemons: Daemons, *, local: bool) -> None:
    daemon = daemons.start()
    options = ClientOptions(timeout_s=10, store_timeout_s=20, load_timeout_s=20, local_channel=local)
    with Client(address(daemon), options) as client:
        for prompt in range(PROMPTS):
            store(client, prompt)
            assert written(daemon, (prompt - 6) * BLOCKS)
        flush(daemon)
        before = counter(stats_of(daemon), "disk_read_bytes")
        assert load(client, 0)
        read = counter(stats_of(daemon), "disk_read_bytes") - before
        assert all(load(client, 0, blocks) for blocks in (4, 9, 15))
        assert all(load(client, prompt) for prompt in range(PROMPTS))
        stats = stats_of(daemon)
    assert 0 < read <= (BLOCKS + WINDOW) * PART_BYTES, "of the window no more than the prefix needs"
    assert stats.tokens.hit.disk > 0
    assert stats.tokens.looked_up == stats.tokens.hit.disk + stats.tokens.hit.host


def test_windows_survive_kill_9(daemons: Daemons) -> None:
    daemon = daemons.start()
    with Client(address(daemon), OPTIONS) as client:
        for prompt in range(3):
            store(client, prompt)
        flush(daemon)
    os.kill(daemon.pid, signal.SIGKILL)
    daemon.wait()
    daemon = daemons.start()
    with Client(address(daemon), OPTIONS) as client:
        assert wait_until(lambda: load(client, 2))
        assert wait_until(lambda: load(client, 0, 5))
        stats = stats_of(daemon)
    assert stats.tokens.hit.host < stats.tokens.hit.disk
    assert counter(stats, "blocks_recovered") == 3 * BLOCKS
