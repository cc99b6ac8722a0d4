"""`prefixcache bench`: which sections run, how results are joined, what happens to one that cannot run here."""

from __future__ import annotations

import json
from typing import Any

import pytest

from prefixcache.cli.bench import command
from prefixcache.cli.bench.plan import QUICK, Plan, Progress
from prefixcache.cli.errors import CliError
from tests.unit.cli.conftest import Run

RESULTS: dict[str, Any] = {
    "acquire": [
        {"transport": "grpc", "tokens": 2048, "p50_us": 400.0, "echo_p50_us": 350.0, "hash_echo_p50_us": 370.0},
        {"transport": "local", "tokens": 99, "p50_us": 100.0, "echo_p50_us": 50.0, "hash_echo_p50_us": 70.0},
    ],
    "load": {"gb_per_s": 9.0, "copy_gb_per_s": 10.0},
    "store": {"gb_per_s": 5.0, "copy_gb_per_s": 10.0},
    "index": [
        {
            "blocks": 10,
            "match_us": 1.0,
            "hash_match_us": 2.0,
            "insert_us": 3.0,
            "evict_us": 4.0,
            "bytes_per_block": 90.0,
        }
    ],
    "match": [{"tokens": 2048, "us": 3.0, "insert_us": 9.0, "startswith_us": 3.5}],
    "chat_path_us": 20.0,
    "overhead": {
        "no_reuse_ratio": 1.0,
        "no_reuse_ratio_median": 0.99,
        "no_reuse_ratio_interval": [0.98, 1.0],
        "client_cpu_share": 0.01,
        "pairs": 40,
    },
    "disk": {
        "read_gb_per_s": 1.9,
        "write_gb_per_s": 1.5,
        "limit_read_gb_per_s": 2.0,
        "limit_write_gb_per_s": 2.0,
        "limit": "fio",
        "acquire_p99_idle_us": 400.0,
        "acquire_p99_demoting_us": 600.0,
        "acquire_p99_demotion_us": 500.0,
        "acquire_p99_storing_us": 450.0,
        "demoted_gb_per_s": 1.0,
        "demotion_gb_per_s": 1.1,
        "echo_p99_idle_us": 100.0,
        "echo_p99_writing_us": 150.0,
        "first_bytes_ms": 2.2,
        "first_block_ms": 2.5,
        "plain_read_ms": 1.0,
        "write_amplification": 1.002,
    },
    "restart": {"blocks": 100_000, "seconds": 0.9, "first_hit_s": 0.1},
    "codec": {
        "raw": {"ratio": 1.0, "encode_gb_per_s": 4.0, "decode_gb_per_s": 5.0, "kl": 0.0},
        "int8": {"ratio": 1.92, "encode_gb_per_s": 1.0, "decode_gb_per_s": 3.05, "kl": 3.1e-5},
        "int4": {"ratio": 3.66, "encode_gb_per_s": 1.0, "decode_gb_per_s": 2.0},
        "lossless": {"ratio": 1.44, "encode_gb_per_s": 0.5, "decode_gb_per_s": 1.5},
    },
}
NAMES = {"index": ("index", "match", "chat_path_us")}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[str, ...], Plan]]:
    """Sections that answer RESULTS at once; the list tells which ran, with which plan."""
    listed: list[tuple[tuple[str, ...], Plan]] = []

    def section(names: tuple[str, ...]) -> command.Section:
        def measure(plan: Plan, progress: Progress) -> dict[str, Any]:
            listed.append((names, plan))
            progress("working")
            return {key: RESULTS[key] for name in names for key in NAMES.get(name, (name,))}

        return measure

    monkeypatch.setattr(command, "_section", section)
    return listed


@pytest.mark.parametrize("line", [["bench"], ["bench", "all"], ["bench", "all", "load"]])
def test_all_sections_in_one_object(run: Run, ran: list[Any], line: list[str]) -> None:
    result = run(*line, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == RESULTS
    assert [names for names, _ in ran] == [
        ("load", "store"),
        ("acquire",),
        ("index",),
        ("overhead",),
        ("disk",),
        ("restart",),
        ("codec",),
    ]
    assert all(plan == Plan() for _, plan in ran)


@pytest.mark.parametrize(
    "line", [["--json", "bench", "store"], ["bench", "--json", "store"], ["bench", "store", "--json"]]
)
def test_one_section_quickly(run: Run, ran: list[Any], line: list[str]) -> None:
    result = run(*line, "--quick")
    assert set(json.loads(result.stdout)) == {"store"}
    assert ran == [(("store",), QUICK)]


def test_tables_show_every_figure_beside_its_target(run: Run, ran: list[Any]) -> None:
    shown = run("bench").stdout
    for text in (
        "1.14x echo",
        "1.5x",
        "1.43x hash + echo",
        "0.90",
        "0.50",
        "0.85",
        "20.0 us",
        "95% of 40 pairs",
        "1.00%",
        "0.95",
        "0.75",
        "1.92x",
        "0.61",
        "3.1e-05",
    ):
        assert text in shown


def test_a_section_that_cannot_run_is_told_among_others_and_an_error_alone(
    run: Run, ran: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    working = command._section

    def section(names: tuple[str, ...]) -> command.Section:
        def fail(plan: Plan, progress: Progress) -> dict[str, Any]:
            raise CliError("no model", "install one", reason="missing_package")

        return fail if names == ("overhead",) else working(names)

    monkeypatch.setattr(command, "_section", section)
    told = json.loads(run("bench", "--json").stdout)
    assert told["skipped"] == {"overhead": "no model"}
    assert "index" in told
    alone = run("bench", "overhead", "--json")
    assert alone.exit_code == 1
    assert json.loads(alone.stdout)["error"]["reason"] == "missing_package"
