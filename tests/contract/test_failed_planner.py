"""A bug in the planner: nothing is decided after it, health tells, and the daemon can still be ended."""

import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from prefixcache.core import events as e
from prefixcache.server.app import Daemon
from prefixcache.v1 import common_pb2 as common
from tests.contract.conftest import Worker, new_keys, start_daemon
from tests.contract.drivers import Failure, GrpcDriver, LocalDriver


def break_planner(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Acquire fails from now on."""
    real = daemon.planner.handle

    def handle(event: e.Event, now: float) -> object:
        if isinstance(event, e.AcquireRequested):
            raise AssertionError("a bug")
        return real(event, now)

    monkeypatch.setattr(daemon.planner, "handle", handle)


def test_a_failed_planner_serves_nothing_more_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = start_daemon(tmp_path)
    local = Worker(LocalDriver(daemon.place.local_path))
    over_grpc = Worker(GrpcDriver(f"unix:{daemon.config.socket}"), local.spec)
    break_planner(daemon, monkeypatch)
    for worker in (local, over_grpc):
        with pytest.raises(Failure) as refused:
            worker.acquire(new_keys(1))
        assert (refused.value.code, refused.value.reason) == (13, common.REASON_INTERNAL)
        assert "a bug" not in refused.value.message
    assert daemon.health.state() == ("not_serving", "planner: AcquireRequested failed; restart the server")
    with pytest.raises(urllib.error.HTTPError) as told:
        urllib.request.urlopen(daemon.addresses[-1] + "/healthz", timeout=20)
    assert told.value.code == 503
    told.value.close()
    assert daemon.statistics.snapshot().health == "not_serving"
    local.driver.close()
    daemon.stop()
    over_grpc.driver.close()
    assert not Path(daemon.config.socket).exists()


def test_a_dead_thread_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = start_daemon(tmp_path)
    monkeypatch.setattr(threading, "excepthook", daemon.part_died)

    def fail(_: float) -> None:
        raise ZeroDivisionError

    assert daemon._local is not None
    assert daemon._local_thread is not None
    monkeypatch.setattr(daemon._local, "_look_around", fail)
    daemon._local_thread.join(20)
    state, detail = daemon.health.state()
    assert (state, detail) == ("not_serving", "local channel: its thread died: ZeroDivisionError")
    daemon.stop()
