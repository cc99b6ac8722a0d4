"""Hashing a prompt costs at most 1.5x of the SHA-256 chain it consists of (measured 1.12 at 32k tokens)."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def benchmark() -> Any:
    path = Path(__file__).resolve().parents[3] / "benchmarks" / "hashing.py"
    spec = importlib.util.spec_from_file_location("hashing_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_hashing_is_near_its_limit(benchmark: Any) -> None:
    """Interleaved medians, the best of five series: a busy machine slows both, and rarely all of a series."""
    ratios = []
    for _ in range(5):
        ratios.append(benchmark.measure(rounds=15)["ratio"])
        if ratios[-1] <= 1.5:
            return
    pytest.fail(f"hashing costs {ratios} times the bare loop")
