"""`prefixcache simulate`: rows, warnings, and every way to ask for what cannot be."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Run
from tests.unit.sim.traces import made_up, write

ROW = {"policy", "capacity_blocks", "token_hit_ratio", "block_hit_ratio", "blocks_written", "seconds"}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write(made_up(200, 1), tmp_path / "made_up.jsonl")


def test_rows_have_their_fixed_names(run: Run, trace: Path) -> None:
    line = ["simulate", str(trace), "--policy", "lru,tg,arc,optimum", "--capacity", "0.05,0.2", "--json"]
    result = run(*line)
    assert result.exit_code == 0
    told = json.loads(result.stdout)
    assert [row["policy"] for row in told["rows"]] == ["lru", "lru", "tg", "tg", "arc", "arc", "optimum", "optimum"]
    assert all(set(row) >= ROW for row in told["rows"])
    unique = told["trace"]["unique_blocks"]
    assert [row["capacity_blocks"] for row in told["rows"][:2]] == [int(unique * 0.05), int(unique * 0.2)]
    by_policy = {row["policy"]: row["token_hit_ratio"] for row in told["rows"] if row["capacity_blocks"] > unique / 10}
    assert 0 < by_policy["lru"] < by_policy["optimum"] < 1
    again = json.loads(run(*line).stdout)["rows"]
    assert [row["token_hit_ratio"] for row in again] == [row["token_hit_ratio"] for row in told["rows"]]


def test_a_table_for_people(run: Run, trace: Path) -> None:
    result = run("simulate", str(trace), "--capacity", "1MiB", "--block-bytes", "64KiB", "--policy", "lru")
    assert result.exit_code == 0
    assert "made_up.jsonl: 200 requests" in result.stdout
    assert "lru" in result.stdout
    assert "16" in result.stdout
    assert result.stderr == ""


def test_malformed_lines_are_named_or_skipped(run: Run, trace: Path) -> None:
    trace.write_text(trace.read_text() + "{broken\n")
    line = ["simulate", str(trace), "--policy", "lru", "--capacity", "10"]
    failed = run(*line)
    assert failed.exit_code == 1
    assert "line 201: not JSON" in failed.stderr
    assert "--skip-bad" in failed.stderr
    went_on = run(*line, "--skip-bad", "--json")
    assert went_on.exit_code == 0
    assert json.loads(went_on.stdout)["trace"]["skipped_lines"] == 1
    assert "skipped 1 malformed" in went_on.stderr


def test_a_gzipped_trace_is_the_same_trace(run: Run, trace: Path, tmp_path: Path) -> None:
    zipped = tmp_path / "zipped.gz"
    zipped.write_bytes(gzip.compress(trace.read_bytes()))
    line = ["--policy", "lru,tg", "--capacity", "30", "--json"]
    plain, packed = (json.loads(run("simulate", str(path), *line).stdout)["rows"] for path in (trace, zipped))
    assert [row["token_hit_ratio"] for row in plain] == [row["token_hit_ratio"] for row in packed]


def test_a_disk_below_memory(run: Run, trace: Path) -> None:
    line = ["simulate", str(trace), "--policy", "tg,optimum", "--capacity", "20", "--block-bytes", "1MiB"]
    line += ["--disk-capacity", "0,200MiB"]
    result = run(*line, "--json")
    assert result.exit_code == 0
    alone, both, _, best = json.loads(result.stdout)["rows"]
    assert (alone["disk_blocks"], both["disk_blocks"]) == (0, 200)
    assert alone["token_hit_ratio"] < both["token_hit_ratio"] <= best["token_hit_ratio"]
    assert both["tiers"][1]["bytes_read"] == both["tiers"][1]["blocks_read"] << 20 > 0
    slow = json.loads(run(*line, "--disk-bandwidth", "1MB", "--json").stdout)["rows"][1]
    assert slow["tiers"][1]["token_hit_ratio"] < both["tiers"][1]["token_hit_ratio"]
    table = run(*line)
    assert "to disk" in table.stdout
    assert "200" in table.stdout


def test_a_gpu_above_memory(run: Run, trace: Path) -> None:
    line = ["simulate", str(trace), "--policy", "lru", "--capacity", "40", "--block-bytes", "1MiB"]
    line += ["--gpu-capacity", "15", "--disk-capacity", "100"]
    (row,) = json.loads(run(*line, "--json").stdout)["rows"]
    assert [tier["tier"] for tier in row["tiers"]] == ["gpu", "host", "disk"]
    assert row["tiers"][0]["capacity_blocks"] == 15
    assert row["tiers"][0]["token_hit_ratio"] > 0
    assert "of gpu" in run(*line).stdout


def test_capacity_as_share_blocks_and_bytes_is_the_same_cache(run: Run, trace: Path) -> None:
    line = ["simulate", str(trace), "--policy", "lru", "--block-bytes", "1MiB", "--json"]
    unique = json.loads(run(*line, "--capacity", "1").stdout)["trace"]["unique_blocks"]
    blocks = int(unique * 0.1)
    told = [json.loads(run(*line, "--capacity", each).stdout)["rows"] for each in ("0.1", f"{blocks}", f"{blocks}MiB")]
    assert {rows[0]["capacity_blocks"] for rows in told} == {blocks}
    assert len({rows[0]["token_hit_ratio"] for rows in told}) == 1


def test_long_work_says_how_far_it_is(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = write(made_up(600, 2), tmp_path / "long.jsonl")
    monkeypatch.setattr("prefixcache.cli.simulate._TELL_EVERY_S", 0.0)
    result = run("simulate", str(trace), "--policy", "lru", "--capacity", "10", "--json")
    assert "lru at 10 blocks: 512 of 600 requests" in result.stderr
    assert json.loads(result.stdout)["rows"]


def test_a_plot_is_a_png(run: Run, trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "sweep.png"
    result = run("simulate", str(trace), "--policy", "lru,optimum", "--capacity", "10,20", "--plot", str(path))
    assert result.exit_code == 0, result.stderr
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_block_size_that_does_not_fit_is_doubted(run: Run, trace: Path) -> None:
    result = run("simulate", str(trace), "--policy", "lru", "--capacity", "10", "--block-tokens", "64")
    assert result.exit_code == 0
    assert "is --block-tokens right?" in result.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--policy", "fifo"], "there is no policy 'fifo'"),
        (["--policy", ","], "--policy names none"),
        (["--capacity", ","], "--capacity: names none"),
        (["--capacity", "4GiB"], "--block-bytes"),
        (["--capacity", "7.5"], "is no share"),
        (["--capacity", "10", "--block-bytes", "some"], "a size such as"),
        (["--capacity", "10", "--block-bytes", "0"], "at least one byte"),
        (["--block-tokens", "0"], "--block-tokens"),
        (["--disk-capacity", "10"], "--block-bytes"),
        (["--gpu-capacity", "10"], "--block-bytes"),
        (["--gpu-capacity", "10,20", "--block-bytes", "1MiB"], "--gpu-capacity takes one size"),
        (["--disk-capacity", "much", "--block-bytes", "1MiB"], "--disk-capacity"),
        (["--disk-capacity", ",", "--block-bytes", "1MiB"], "--disk-capacity: names none"),
        (["--disk-bandwidth", "0"], "--disk-bandwidth takes at least one byte"),
        (["--host-bandwidth", "fast"], "--host-bandwidth: expected a size"),
        (["--capacity", "20", "--block-bytes", "1TiB", "--disk-capacity", "9"], "more than 16 TiB"),
    ],
)
def test_mistakes_are_not_understood(run: Run, trace: Path, options: list[str], says: str) -> None:
    result = run("simulate", str(trace), *options)
    assert result.exit_code == 2
    assert says in result.stderr


def test_no_such_trace(run: Run, tmp_path: Path) -> None:
    result = run("simulate", str(tmp_path / "none.jsonl"), "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["error"]["reason"] == "bad_trace"


def test_a_plot_without_matplotlib_says_what_brings_it(
    run: Run, trace: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("prefixcache.cli.simulate.can_plot", lambda: False)
    result = run("simulate", str(trace), "--plot", str(tmp_path / "a.png"))
    assert result.exit_code == 1
    assert "prefixcache[plot]" in result.stderr


def test_a_plot_into_nowhere_is_found_before_the_replay(
    run: Run, trace: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("prefixcache.cli.simulate.can_plot", lambda: True)
    result = run("simulate", str(trace), "--plot", str(tmp_path / "none" / "a.png"))
    assert result.exit_code == 2
    assert "there is no folder" in result.stderr
