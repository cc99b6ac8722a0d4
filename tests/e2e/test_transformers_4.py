"""The adapter's own tests once more, in the environment with transformers 4.57."""

import subprocess

import pytest

from .transformers_setup import ROOT, environment, python_with_transformers_4


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(python_with_transformers_4() is None, reason="`make test` builds the environment with 4.57")
def test_adapter_under_transformers_4() -> None:
    command = [str(python_with_transformers_4()), "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "tests/unit/transformers_adapter"],
        cwd=ROOT,
        env=environment(2),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
