"""The sample in the adapter's README does what it says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from .transformers_setup import ROOT, DaemonProcess, environment


@pytest.mark.slow
@pytest.mark.model
def test_sample(tmp_path: Path) -> None:
    found = re.search(r"```python\n(.*?)```", (ROOT / "clients/transformers/README.md").read_text(), re.DOTALL)
    assert found is not None
    daemon = DaemonProcess(tmp_path, 64 << 20)
    daemon.start()
    try:
        done = subprocess.run(
            [sys.executable, "-c", found[1]],
            env=environment(2) | {"PREFIXCACHE_ADDRESS": daemon.address},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        daemon.end()
    assert done.returncode == 0, done.stderr[-3000:]
    told = re.search(r"(\d+) of (\d+) prompt tokens reused", done.stdout)
    assert told is not None, done.stdout
    reused, looked_up = map(int, told.groups())
    assert reused >= looked_up // 2 - 64
