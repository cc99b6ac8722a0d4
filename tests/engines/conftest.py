"""Tests with real engines. They live in an environment of their own (`make test-engines`) and are not collected in
another."""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.processes import DaemonProcess
from tests.engines import models
from tests.engines.vllm_engine import Engine

OLDEST = "PREFIXCACHE_OLDEST_VLLM"
"""Names a folder with the oldest supported vLLM; `make test-engines-all` sets it."""

collect_ignore = ["test_sglang.py"] if find_spec("sglang") is None else []
if find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
elif OLDEST not in os.environ:
    collect_ignore.append("test_vllm_oldest.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """An engine takes half a minute to start on a busy machine; the mark says what these tests need."""
    for item in items:
        if Path(item.path).is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> "Checkpoints":
    """Models by kind, made at first use."""
    return Checkpoints(tmp_path_factory.mktemp("models"))


class Checkpoints:
    """See the fixture."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, kind: str) -> Path:
        folder = self._folder / kind
        if not folder.exists():
            models.make(kind, folder)
        return folder


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    """A daemon of its own for each test that asks for one."""
    folder = tmp_path / "daemon"
    folder.mkdir()
    process = DaemonProcess(folder, host_bytes="128MiB")
    yield process
    process.kill()


@pytest.fixture(scope="module")
def shared_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """One daemon for all tests of a file."""
    process = DaemonProcess(tmp_path_factory.mktemp("shared"), host_bytes="256MiB")
    yield process
    process.kill()


__all__ = ["Checkpoints", "Engine"]
