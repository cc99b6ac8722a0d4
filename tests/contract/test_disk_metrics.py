"""What /metrics says of the disk tier: whether it works and why not, how fast it is, what waits."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixcache.core import events as e
from prefixcache.server.app import Daemon
from tests.contract.conftest import start_daemon, stop_daemon
from tests.e2e.processes import wait_until


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    running = start_daemon(tmp_path, host_bytes="4MiB", disk=str(tmp_path / "disk"), disk_bytes="64MiB")
    assert wait_until(lambda: running.planner.state.disk.recovered)
    yield running
    stop_daemon(running)


def metrics(daemon: Daemon) -> dict[str, str]:
    """By name with labels."""
    lines = [line for line in daemon.metrics.text().decode().splitlines() if not line.startswith("#")]
    return dict(line.rsplit(" ", 1) for line in lines)


def test_a_tier_that_works_has_no_trouble(daemon: Daemon) -> None:
    told = metrics(daemon)
    assert told['prefixcache_tier_on{tier="disk"}'] == "1.0"
    assert not [name for name in told if name.startswith("prefixcache_tier_trouble")]


def test_how_long_the_restart_took(daemon: Daemon) -> None:
    assert wait_until(lambda: float(metrics(daemon)["prefixcache_disk_recovery_seconds"]) > 0)


def test_why_it_takes_no_more_is_told_in_the_words_of_health(daemon: Daemon) -> None:
    assert daemon.disk is not None
    assert daemon.disk.tier is not None
    daemon.disk.tier._writer.fail(OSError(errno.ENOSPC, "no space"))
    why = daemon.disk.trouble()
    assert why.startswith("disk tier takes no more blocks: ")
    told = metrics(daemon)
    assert told['prefixcache_tier_on{tier="disk"}'] == "0.0"
    assert told[f'prefixcache_tier_trouble{{reason="{why}",tier="disk"}}'] == "1.0"
    assert why in daemon.health.state()[1]


def test_the_speed_that_loads_are_decided_by_and_what_waits(daemon: Daemon) -> None:
    daemon.owner.call(e.DiskMeasured(5e6))
    told = metrics(daemon)
    assert float(told["prefixcache_disk_load_bytes_per_s"]) == 5e6
    assert told["prefixcache_disk_loading_bytes"] == "0.0"
    assert told['prefixcache_tier_bytes{kind="filling",tier="disk"}'] == "0.0", "what waits to be written"
    assert float(told["prefixcache_disk_probed_bytes_per_s"]) > 0
