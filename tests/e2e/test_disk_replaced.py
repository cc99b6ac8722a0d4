"""A real daemon whose data directory is taken away and replaced: it is tried again, and what is there then counts."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixcache_client import Client
from tests.e2e.processes import DaemonProcess, wait_until
from tests.e2e.test_daemon_process import stats_of
from tests.e2e.test_disk import (
    BLOCKS,
    OPTIONS,
    PROMPTS,
    Daemons,
    address,
    clear,
    counter,
    fill,
    flush,
    load,
    store,
    tier,
    tokens,
)
from tests.issues.workers import BLOCK_TOKENS, namespace

pytestmark = pytest.mark.slow


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Daemons]:
    made = Daemons(tmp_path / "run", tmp_path / "data")
    yield made
    made.kill()


def is_gone(daemon: DaemonProcess) -> bool:
    return wait_until(lambda: "disk tier off" in stats_of(daemon).health_detail)


def is_written(daemon: DaemonProcess, blocks: int) -> bool:
    """Once the planner has been told that the disk works, what was stored goes there."""
    return wait_until(lambda: flush(daemon) >= 0 and tier(stats_of(daemon)).blocks >= blocks)


def serves(daemon: DaemonProcess) -> bool:
    return wait_until(lambda: stats_of(daemon).health == "serving")


def replaced(daemon: DaemonProcess) -> int:
    return counter(stats_of(daemon), "disk_directories_replaced")


def test_an_empty_directory_in_its_place_is_used(daemons: Daemons) -> None:
    daemon = daemons.start()
    with Client(address(daemon), OPTIONS) as client:
        fill(client, daemon)
        daemons.data.rename(daemons.data.with_name("away"))
        assert is_gone(daemon)
        before = counter(stats_of(daemon), "disk_written_bytes")
        daemons.data.mkdir()
        assert serves(daemon)
        assert replaced(daemon) == 1
        assert client.lookup(namespace(client), tokens(0)).tokens == 0  # was on disk only
        assert load(client, PROMPTS - 1)  # was in memory as well
        assert tier(stats_of(daemon)).blocks < PROMPTS * BLOCKS
        fill(client, daemon)
        assert all(load(client, prompt) for prompt in range(PROMPTS))
        assert counter(stats_of(daemon), "disk_written_bytes") > before
    assert daemon.terminate() == 0
    daemon = daemons.start()  # and what it wrote there is found again
    with Client(address(daemon), OPTIONS) as client:
        assert wait_until(lambda: load(client, 3))


def test_what_an_earlier_run_left_in_it_is_recovered(daemons: Daemons) -> None:
    daemon = daemons.start()
    with Client(address(daemon), OPTIONS) as client:
        for prompt in (20, 21):
            store(client, prompt)
        flush(daemon)
    assert daemon.terminate() == 0
    other = daemons.data.rename(daemons.data.with_name("other"))
    daemon = daemons.start()
    with Client(address(daemon), OPTIONS) as client:
        fill(client, daemon)
        daemons.data.rename(daemons.data.with_name("away"))
        assert is_gone(daemon)
        other.rename(daemons.data)
        assert serves(daemon)
        assert wait_until(lambda: load(client, 20))
        assert load(client, 21)
        assert not load(client, 0)


def test_its_own_directory_comes_back_through_a_copy_and_what_was_cleared_meanwhile_does_not(daemons: Daemons) -> None:
    """As a file system that is mounted again under another device number."""
    daemon = daemons.start()
    with Client(address(daemon), OPTIONS) as client:
        fill(client, daemon)
        away = daemons.data.rename(daemons.data.with_name("away"))
        assert is_gone(daemon)
        clear(daemon)
        store(client, PROMPTS)
        shutil.copytree(away, daemons.data)
        assert serves(daemon)
        assert wait_until(lambda: counter(stats_of(daemon), "disk_recovery", "revoked") >= PROMPTS * BLOCKS)
        assert not any(load(client, prompt) for prompt in range(PROMPTS))
        assert load(client, PROMPTS)
    assert daemon.terminate() == 0
    daemon = daemons.start()
    with Client(address(daemon), OPTIONS) as client:
        assert wait_until(lambda: load(client, PROMPTS))
        assert not any(load(client, prompt) for prompt in range(PROMPTS))


def test_what_was_cleared_while_the_disk_was_off_stays_cleared_after_a_restart(daemons: Daemons) -> None:
    daemon = daemons.start()
    with Client(address(daemon), OPTIONS) as client:
        store(client, 1)
        flush(daemon)
        away = daemons.data.rename(daemons.data.with_name("away"))
        assert is_gone(daemon)
        clear(daemon)
        away.rename(daemons.data)
        assert serves(daemon)
        assert replaced(daemon) == 0  # it is the same one
        store(client, 2)
        assert is_written(daemon, BLOCKS)
    daemon.kill()
    daemon = daemons.start()
    with Client(address(daemon), OPTIONS) as client:
        assert wait_until(lambda: load(client, 2))
        assert not load(client, 1)


@pytest.mark.parametrize("what", ["foreign", "newer"])
def test_what_is_not_ours_is_refused_with_its_reason_until_it_goes(daemons: Daemons, what: str) -> None:
    daemon = daemons.start()
    with Client(address(daemon), OPTIONS) as client:
        store(client, 0)
        told = json.loads((daemons.data / "format").read_text())
        daemons.data.rename(daemons.data.with_name("away"))
        assert is_gone(daemon)
        strange = daemons.data.with_name("strange")
        strange.mkdir()
        if what == "newer":
            (strange / "format").write_text(json.dumps(told | {"format": told["format"] + 1}))
            (strange / "lock").touch()
        else:
            (strange / "thesis.doc").touch()
        before = {path.name: path.read_bytes() for path in strange.iterdir()}
        strange.rename(daemons.data)
        why = "use a newer program" if what == "newer" else "not a prefixcache data directory"
        assert wait_until(lambda: why in stats_of(daemon).health_detail)
        assert why in tier(stats_of(daemon)).detail
        assert stats_of(daemon).health == "degraded"
        store(client, 1)
        assert load(client, 1), "memory goes on"
        assert {path.name: path.read_bytes() for path in daemons.data.iterdir()} == before
        shutil.rmtree(daemons.data)
        daemons.data.mkdir()
        assert serves(daemon)
        assert is_written(daemon, 2 * BLOCKS)


def test_a_directory_that_was_emptied_is_used_again(daemons: Daemons) -> None:
    daemon = daemons.start()
    with Client(address(daemon), OPTIONS) as client:
        fill(client, daemon)
        for path in daemons.data.iterdir():
            path.unlink()
        assert is_gone(daemon)
        assert serves(daemon)
        assert client.lookup(namespace(client), tokens(0)).tokens == 0
        fill(client, daemon)
        assert client.lookup(namespace(client), tokens(0)).tokens == BLOCKS * BLOCK_TOKENS
        assert load(client, 0)


def test_pins_are_kept_in_the_new_directory(daemons: Daemons) -> None:
    daemon = daemons.start()
    with Client(address(daemon), OPTIONS) as client:
        store(client, 0)
        pin = client.pin(namespace(client), tokens(0), label="kept")
        daemons.data.rename(daemons.data.with_name("away"))
        assert is_gone(daemon)
        daemons.data.mkdir()
        assert serves(daemon)
        assert wait_until(lambda: (daemons.data / "pins").exists())
        assert is_written(daemon, BLOCKS)
    daemon.kill()
    daemon = daemons.start()
    with Client(address(daemon), OPTIONS) as client:
        assert wait_until(lambda: load(client, 0))
        assert client.unpin(pin) == ""
