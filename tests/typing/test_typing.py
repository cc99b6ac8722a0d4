"""The typing samples pass the strict checker, and the errors they mark are errors (unused ignores are not allowed)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
NAMES = sorted(path.name for path in FOLDER.glob("*.py") if not path.name.startswith("test_"))
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", NAMES)
def test_sample(name: str, tmp_path: Path) -> None:
    paths = [ROOT, ROOT / "offload", ROOT / "clients" / "python", ROOT / "clients" / "transformers"]
    environment = os.environ | {"MYPYPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-m", "mypy", "--strict", "--warn-unused-ignores", f"--cache-dir={tmp_path}"]
    done = subprocess.run(
        [*command, str(FOLDER / name)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
