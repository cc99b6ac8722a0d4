"""`prefixcache bench --quick`: the names and the sense of its figures. Never how fast: that is no test's business."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import Any

import pytest

from prefixcache.cli.bench.plan import QUICK

TIMEOUT_S = 500.0


def bench(*sections: str) -> Any:
    """The object that a quick run of some sections prints."""
    line = [sys.executable, "-m", "prefixcache.cli.main", "bench", *sections, "--quick", "--json"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def positive(row: dict[str, Any], *names: str) -> bool:
    """Whether each of these figures is a positive number."""
    return all(isinstance(row[name], int | float) and math.isfinite(row[name]) and row[name] > 0 for name in names)


@pytest.mark.slow
def test_acquire_over_both_transports_beside_its_echo() -> None:
    rows = bench("acquire")["acquire"]
    expected = [(transport, tokens) for transport in ("grpc", "local") for tokens in QUICK.acquire_tokens]
    assert [(row["transport"], row["tokens"]) for row in rows] == expected
    for row in rows:
        assert set(row) == {"transport", "tokens", "p50_us", "echo_p50_us", "hash_echo_p50_us"}
        assert positive(row, "p50_us", "echo_p50_us", "hash_echo_p50_us")


@pytest.mark.slow
def test_load_and_store_beside_a_bare_copy() -> None:
    told = bench("load", "store")
    assert set(told) == {"load", "store"}
    for row in told.values():
        assert set(row) == {"gb_per_s", "copy_gb_per_s"}
        assert positive(row, *row)


@pytest.mark.slow
def test_codecs_by_size_speed_and_answers() -> None:
    rows = bench("codec")["codec"]
    assert list(rows) == ["raw", "int8", "int4", "lossless"]
    for row in rows.values():
        assert set(row) - {"kl"} == {"ratio", "encode_gb_per_s", "decode_gb_per_s"}
        assert positive(row, "ratio", "encode_gb_per_s", "decode_gb_per_s")
    assert rows["raw"]["ratio"] == 1
    assert 1.9 < rows["int8"]["ratio"] < 2 < rows["lossless"]["ratio"] * 2 < rows["int4"]["ratio"] < 4
    if "kl" in rows["int8"]:
        assert rows["raw"]["kl"] == rows["lossless"]["kl"] == 0 < rows["int8"]["kl"] < rows["int4"]["kl"]


@pytest.mark.slow
def test_index_by_size_and_match_by_length() -> None:
    told = bench("index")
    assert set(told) == {"index", "match", "chat_path_us"}
    assert [row["blocks"] for row in told["index"]] == list(QUICK.index_blocks)
    for row in told["index"]:
        assert set(row) == {"blocks", "match_us", "hash_match_us", "insert_us", "evict_us", "bytes_per_block"}
        assert positive(row, *row)
    assert [row["tokens"] for row in told["match"]] == list(QUICK.match_tokens)
    for row in told["match"]:
        assert set(row) == {"tokens", "us", "insert_us", "startswith_us"}
        assert positive(row, *row)
    assert told["chat_path_us"] > 0


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(600)
def test_overhead_with_a_real_model() -> None:
    row = bench("overhead")["overhead"]
    names = {"no_reuse_ratio", "no_reuse_ratio_median", "no_reuse_ratio_interval", "client_cpu_share", "pairs"}
    assert set(row) == names
    low, high = row["no_reuse_ratio_interval"]
    assert 0 < low <= row["no_reuse_ratio_median"] <= high == row["no_reuse_ratio"]
    assert 0 < row["client_cpu_share"] < 1
    assert row["pairs"] == QUICK.overhead_pairs
