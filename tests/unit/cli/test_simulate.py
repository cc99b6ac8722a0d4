"""`prefixcache simulate`: rows, warnings, and every way to ask for what cannot be."""

from __future__ import annotations

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


def test_a_block_size_that_does_not_fit_is_doubted(run: Run, trace: Path) -> None:
    result = run("simulate", str(trace), "--policy", "lru", "--capacity", "10", "--block-tokens", "64")
    assert result.exit_code == 0
    assert "is --block-tokens right?" in result.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--policy", "fifo"], "there is no policy 'fifo'"),
        (["--policy", ","], "--policy names none"),
        (["--capacity", ","], "--capacity names none"),
        (["--capacity", "4GiB"], "--block-bytes"),
        (["--capacity", "7.5"], "is no share"),
        (["--capacity", "10", "--block-bytes", "some"], "a size such as"),
        (["--capacity", "10", "--block-bytes", "0"], "at least one byte"),
        (["--block-tokens", "0"], "--block-tokens"),
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
