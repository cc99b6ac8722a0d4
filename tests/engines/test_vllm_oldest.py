"""The oldest vLLM the connector is written for, whose binaries do not run here: its own scheduler and base classes."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.e2e.processes import DaemonProcess
from tests.engines.conftest import OLDEST, Checkpoints


def test_oldest_version(shared_daemon: DaemonProcess, checkpoints: Checkpoints, tmp_path: Path) -> None:
    program = Path(__file__).parent / "oldest.py"
    path = os.pathsep.join([os.environ[OLDEST], *(each for each in sys.path if each)])
    ended = subprocess.run(
        [sys.executable, str(program), str(checkpoints("llama")), f"unix://{shared_daemon.socket}"],
        env=os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
        capture_output=True, text=True, timeout=500, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-6000:]
    seen = json.loads(ended.stdout.splitlines()[-1])
    assert seen["policy"] == "recompute"
    assert seen["same"]
    assert (seen["loaded"], seen["distinct"] > 4) == (384, True), seen
    # Told by page, as this version has no other way.
    assert seen["broken_same"]
    assert seen["reasons"]["load_failed"] == 1
    assert seen["preempted"]
    assert seen["crowd_same"]
    assert seen["whole"] == 4
    assert (seen["wrong"], seen["leaked"], seen["entries"], seen["pinned"]) == (0, 0, 0, 0), seen
    assert seen["several_groups"] == "engine_cannot_report_failure"
