"""The samples run as they are, with a daemon and without, and say what their comments promise."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.processes import DaemonProcess, wait_until

SAMPLES = Path(__file__).resolve().parents[2] / "clients" / "python" / "samples"
NAMES = sorted(path.name for path in SAMPLES.glob("*.py"))
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    running = DaemonProcess(tmp_path_factory.mktemp("daemon"), host_bytes="64MiB")
    yield running
    running.kill()


def run(name: str, socket: Path) -> list[str]:
    """The lines a sample prints."""
    environment = os.environ | {"PREFIXCACHE_ADDRESS": f"unix://{socket}"}
    command = [sys.executable, str(SAMPLES / name)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "is left alone for a moment" not in line] == []
    return done.stdout.splitlines()


def test_quickstart_hits_the_second_time(daemon: DaemonProcess) -> None:
    assert wait_until(lambda: run("quickstart.py", daemon.socket)[1] in ("stored: 448 tokens", "stored: 0 tokens"))
    assert run("quickstart.py", daemon.socket) == ["cached: 448 of 500 tokens", "stored: 0 tokens"]


def test_conversation_finds_all_turns_before(daemon: DaemonProcess) -> None:
    lines = [line for line in run("conversation.py", daemon.socket) if line.startswith("turn")]
    assert lines == [
        "turn 1: 0 of 200 tokens are cached",
        "turn 2: 192 of 400 tokens are cached",
        "turn 3: 384 of 600 tokens are cached",
        "turn 4: 576 of 800 tokens are cached",
    ]


def test_paged_engine_reads_what_the_other_wrote(daemon: DaemonProcess) -> None:
    assert run("paged_engine.py", daemon.socket) == ["stored 4 blocks, {}", "loaded 256 tokens", "the same bytes: yes"]


def test_async_worker_reuses_the_system_prompt(daemon: DaemonProcess) -> None:
    assert run("async_worker.py", daemon.socket)[0] == "tokens reused by 4 requests: 1024"


@pytest.mark.parametrize("name", NAMES)
def test_every_sample_runs_without_a_daemon(name: str, tmp_path: Path) -> None:
    assert run(name, tmp_path / "none.sock")
