"""Pins outlive the daemon: a graceful warm restart, and with a disk tier kill -9."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prefixcache.server.config import load
from prefixcache.server.memory import warm_place
from prefixcache.v1 import admin_pb2 as pb
from prefixcache.v1 import common_pb2 as common
from tests.contract.conftest import Worker, new_id, new_keys
from tests.contract.drivers import Driver, Failure, GrpcDriver, LocalDriver
from tests.e2e.processes import DaemonProcess, wait_until
from tests.e2e.test_daemon_process import store

pytestmark = pytest.mark.slow
BLOCKS = 4


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Daemons]:
    made = Daemons(tmp_path)
    yield made
    made.close()


class Daemons:
    """One daemon after the other in one folder, and what an operator asks of the one that runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.drivers: list[Driver] = []
        self.running: DaemonProcess | None = None
        self.spec: common.NamespaceSpec | None = None

    def start(self, *flags: str) -> Worker:
        """A worker in the namespace of the first one."""
        self.running = DaemonProcess(self.folder, *flags)
        self.operator = self.keep(GrpcDriver(f"unix:{self.running.socket}"))
        self.worker = Worker(self.keep(LocalDriver(str(self.running.local))), self.spec)
        self.spec = self.worker.spec
        return self.worker

    def keep(self, driver: Driver) -> Driver:
        """It hangs up with the test."""
        self.drivers.append(driver)
        return driver

    @property
    def process(self) -> DaemonProcess:
        assert self.running is not None
        return self.running

    def ask(self, rpc: str, request: Any) -> Any:
        return self.operator.call(rpc, request)

    def pins(self) -> list[pb.PinDescription]:
        return list(self.ask("ListPins", pb.ListPinsRequest()).pins)

    def close(self) -> None:
        for driver in self.drivers:
            driver.close()
        if self.running is not None:
            self.running.kill()
        place = warm_place(load({"socket": str(self.folder / "d.sock")}, environ={}).config)
        for path in (place.pool_path, place.mark_path):
            Path(path).unlink(missing_ok=True)


def pinned(daemons: Daemons, *flags: str, **fields: Any) -> tuple[bytes, pb.PinResponse]:
    """A daemon with a pinned prompt: (keys, pin)."""
    worker = daemons.start(*flags)
    keys = store(worker, BLOCKS)
    request = pb.PinRequest(fingerprint=worker.spec.fingerprint, keys=keys, label="system prompt v3", **fields)
    return keys, daemons.ask("Pin", request)


def holds_all(daemons: Daemons) -> bool:
    return [(each.tokens, each.host_tokens) for each in daemons.pins()] == [(64, 64)]


def test_a_pin_survives_kill_9_with_its_blocks(daemons: Daemons, tmp_path: Path) -> None:
    flags = (f"--disk={tmp_path / 'data'}", "--disk-bytes=64MiB")
    keys, pin = pinned(daemons, *flags, forever=True)
    assert wait_until(lambda: [each.disk_tokens for each in daemons.pins()] == [64]), "written early, not asked to"
    daemons.process.kill()
    worker = daemons.start(*flags)
    assert wait_until(lambda: holds_all(daemons)), "brought to memory without being asked for"
    assert [(each.pin, each.label, each.ttl_ms) for each in daemons.pins()] == [(pin.pin, "system prompt v3", 0)]
    lease = new_id()
    assert worker.acquire(keys, lease=lease).ready_blocks == BLOCKS
    daemons.ask("Unpin", pb.UnpinRequest(pin=pin.pin))
    daemons.process.kill()
    daemons.start(*flags)
    assert daemons.pins() == []


def test_a_pin_that_was_cleared_does_not_come_back_after_kill_9(daemons: Daemons, tmp_path: Path) -> None:
    flags = (f"--disk={tmp_path / 'data'}", "--disk-bytes=64MiB")
    pinned(daemons, *flags)
    assert wait_until(lambda: [each.disk_tokens for each in daemons.pins()] == [64])
    daemons.ask("Evict", pb.EvictRequest())
    daemons.process.kill()
    daemons.start(*flags)
    assert daemons.pins() == []


def test_a_pin_of_what_was_never_stored_waits_for_its_namespace(daemons: Daemons, tmp_path: Path) -> None:
    flags = (f"--disk={tmp_path / 'data'}", "--disk-bytes=64MiB")
    worker = daemons.start(*flags)
    keys = new_keys(2)
    daemons.ask("Pin", pb.PinRequest(fingerprint=worker.spec.fingerprint, keys=keys, ttl_ms=60_000))
    daemons.process.kill()
    daemons.start(*flags)
    assert wait_until(lambda: len(daemons.pins()) == 1)
    assert [(each.tokens, each.wanted_tokens) for each in daemons.pins()] == [(0, 32)]
    assert 0 < daemons.pins()[0].ttl_ms < 60_000


def test_a_pin_survives_a_graceful_warm_restart(daemons: Daemons) -> None:
    keys, pin = pinned(daemons, "--warm-restart=true", "--drain-timeout=5s")
    daemons.worker.driver.close()
    assert daemons.process.terminate() == 0
    worker = daemons.start("--warm-restart=true", "--drain-timeout=5s")
    assert [(each.pin, each.tokens) for each in daemons.pins()] == [(pin.pin, 64)]
    assert worker.acquire(keys).planned_blocks == BLOCKS
    with pytest.raises(Failure) as refused:
        daemons.ask("Pin", pb.PinRequest(fingerprint=worker.spec.fingerprint, keys=new_keys(1 << 12)))
    assert refused.value.reason == common.REASON_PIN_BUDGET
