"""The programs in docs/transformers.md do what it says; the one with DeepSpeed runs in tests/engines."""

import subprocess
import sys
from pathlib import Path

import pytest

from prefixcache_transformers.smollm2 import ensure_smollm2

from .documents import programs, reused
from .transformers_setup import DaemonProcess, environment


@pytest.mark.slow
@pytest.mark.model
def test_generate_and_continuous_batching(tmp_path: Path) -> None:
    daemon = DaemonProcess(tmp_path, 64 << 20)
    daemon.start()
    try:
        generate, batch, _ = programs("docs/transformers.md", daemon.address, ensure_smollm2())
        done = subprocess.run(
            [sys.executable, "-c", generate + batch], env=environment(2), capture_output=True, text=True, check=False
        )
    finally:
        daemon.end()
    assert done.returncode == 0, done.stderr[-3000:]
    (hits, tokens), (all_hits, all_tokens) = reused(done.stdout)
    assert hits >= tokens // 2 - 64
    # Four prompts more, each of which begins like the two.
    assert all_hits - hits >= (all_tokens - tokens) * 3 // 4
