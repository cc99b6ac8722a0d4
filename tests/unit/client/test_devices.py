"""Which device a worker tells the daemon: the one it computes on, none where nothing was begun."""

import sys
from types import SimpleNamespace

import pytest

from prefixcache_client import devices
from prefixcache_client.devices import WorkerDevice, find
from prefixcache_offload.gpu import DeviceError, DeviceReason, cuda, driver


def torch_with(*, begun: bool, index: int = 1) -> SimpleNamespace:
    return SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: begun, current_device=lambda: index))


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> None:
    uuids = {"cuda:0": "GPU-a", "cuda:1": "GPU-b"}

    def look(loaded: object, name: str) -> tuple[int, str]:
        if name not in uuids:
            raise DeviceError(DeviceReason.NO_SUCH_DEVICE, f"there is no device {name}")
        return list(uuids).index(name), uuids[name]

    monkeypatch.setattr(driver, "load", lambda: None)
    monkeypatch.setattr(cuda, "find", look)


def test_no_device_where_none_is_wished() -> None:
    assert find("") is None


def test_the_stand_in_is_asked_for_by_name() -> None:
    assert find("cpu") == WorkerDevice("cpu", "cpu")


@pytest.mark.usefixtures("cards")
def test_a_named_device_is_told_by_its_uuid() -> None:
    assert find("cuda:1") == WorkerDevice("cuda:1", "GPU-b")


@pytest.mark.usefixtures("cards")
def test_auto_is_the_device_torch_computes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch_with(begun=True))
    assert find(devices.AUTO) == WorkerDevice("cuda:1", "GPU-b")


def test_auto_begins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch_with(begun=False))
    assert find(devices.AUTO) is None
    monkeypatch.delitem(sys.modules, "torch")
    assert find(devices.AUTO) is None


@pytest.mark.usefixtures("cards")
def test_auto_says_nothing_loud(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch_with(begun=True, index=7))
    assert find(devices.AUTO) is None
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.usefixtures("cards")
def test_a_device_that_is_not_there_is_told_and_not_used(caplog: pytest.LogCaptureFixture) -> None:
    assert find("cuda:7") is None
    assert "there is no device cuda:7" in caplog.text
