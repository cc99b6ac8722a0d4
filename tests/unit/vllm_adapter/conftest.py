"""What tests of several of the adapter's parts need: a real daemon of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.processes import DaemonProcess


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    """One for the test; killed behind it."""
    (tmp_path / "daemon").mkdir()
    process = DaemonProcess(tmp_path / "daemon")
    yield process
    process.kill()
