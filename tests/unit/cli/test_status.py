"""`prefixcache status`: the fixed JSON names, the tables, and every expected failure in one line."""

from __future__ import annotations

import json

import pytest

from prefixcache.v1 import common_pb2
from tests.unit.cli.conftest import FakeAdmin, Run, a_namespace, some_stats

LINE_ORDERS = (["--json", "status"], ["status", "--json"], ["--json", "status", "--json"])


@pytest.mark.parametrize("line", LINE_ORDERS)
def test_json_has_the_fixed_names_before_and_behind_the_command(admin: FakeAdmin, run: Run, line: list[str]) -> None:
    result = run(*line)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["tokens"] == {
        "looked_up": 320,
        "hit": {"gpu": 0, "host": 192, "disk": 0, "peer": 0},
        "miss": {"not_cached": 64},
        "pending": 64,
    }
    assert told["hit_rate"] == pytest.approx(0.75)
    assert told["health"] == "serving"
    assert [(tier["tier"], tier["used_bytes"], tier["state"]) for tier in told["tiers"]] == [("host", 10 << 20, "on")]
    assert [item["label"] for item in told["namespaces"]] == ["SmolLM2"]
    assert [item["transport"] for item in told["sessions"]] == ["local"]
    assert told["addresses"] == ["unix:///x.sock", "http://127.0.0.1:4321"]


def test_table_shows_tiers_namespaces_rate_and_sessions(admin: FakeAdmin, run: Run) -> None:
    result = run("status")
    assert result.exit_code == 0
    for word in (
        "serving",
        "host",
        "SmolLM2",
        "75.0%",
        "worker",
        "not_cached 64",
        "pending: 64",
        "http://127.0.0.1:4321",
    ):
        assert word in result.stdout


def test_labels_cannot_bring_markup_into_the_table(admin: FakeAdmin, run: Run) -> None:
    admin.stats = some_stats(a_namespace(label="[red]x[/][/]"))
    result = run("status")
    assert result.exit_code == 0
    assert "[red]x[/][/]" in result.stdout


def test_sick_parts_and_unknown_reasons_are_shown(admin: FakeAdmin, run: Run) -> None:
    admin.stats.health = "degraded"
    admin.stats.health_detail = "prefault is late"
    admin.stats.parts[0].alive = False
    admin.stats.tokens.miss[0].reason = 999  # type: ignore[assignment]  # what a newer server may send
    assert json.loads(run("status", "--json").stdout)["tokens"]["miss"] == {"999": 64}
    shown = run("status").stdout
    assert "prefault is late" in shown
    assert "no sign of life from: planner" in shown


def test_nothing_looked_up_has_no_rate(admin: FakeAdmin, run: Run) -> None:
    admin.stats.tokens.Clear()
    assert json.loads(run("status", "--json").stdout)["hit_rate"] is None


def test_no_daemon_is_one_line_that_says_what_to_do(run: Run, tmp_path: object) -> None:
    result = run("status", "--address", f"unix://{tmp_path}/nobody.sock")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: no daemon answers at unix://")
    assert "prefixcache serve" in result.stderr
    assert "Traceback" not in result.stderr


def test_no_daemon_is_an_object_under_json(run: Run, tmp_path: object) -> None:
    result = run("--json", "--address", f"unix://{tmp_path}/nobody.sock", "status")
    assert result.exit_code == 1
    error = json.loads(result.stdout)["error"]
    assert error["reason"] == "server_unavailable"
    assert "prefixcache serve" in error["hint"]
    assert result.stderr == ""


def test_a_refusal_keeps_its_reason_and_message(admin: FakeAdmin, run: Run) -> None:
    admin.refusal = common_pb2.Error(code=9, reason=common_pb2.REASON_DRAINING, message="the server is draining")
    result = run("status", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["error"] == {"message": "the server is draining", "hint": "", "reason": "draining"}


def test_a_daemon_that_hangs_does_not_hang_the_command(
    admin: FakeAdmin, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefixcache.cli import daemon

    monkeypatch.setattr(daemon.Daemon._call, "__defaults__", (0.2,))
    admin.hanging = True
    result = run("status", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["error"]["reason"] == "deadline"


def test_a_path_is_taken_as_a_socket(admin: FakeAdmin, run: Run) -> None:
    path = admin.address.removeprefix("unix://")
    assert json.loads(run("status", "--json", "--address", path).stdout)["address"] == admin.address


@pytest.mark.parametrize("address", ["nonsense", "host:", "host:99999", "unix:"])
def test_what_is_no_address_is_a_mistake_of_the_command_line(run: Run, address: str) -> None:
    result = run("status", "--address", address, "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"]["reason"] == "bad_usage"


def test_it_fits_80_columns_with_long_names_and_large_numbers(admin: FakeAdmin, run: Run) -> None:
    admin.stats = some_stats(a_namespace("meta-llama/Llama-3.1-8B-Instruct"))
    tier = admin.stats.tiers[0]
    tier.capacity_bytes, tier.used_bytes, tier.leased_bytes = 64 << 30, 63 << 30, 3 << 29
    tier.blocks, tier.evicted_blocks, tier.pinned_bytes, tier.pin_budget_bytes = (
        1_234_567,
        98_765_432,
        3 << 30,
        16 << 30,
    )
    tier.detail = "a long explanation of why this tier is what it is, which is longer than a line of eighty columns"
    session = admin.stats.sessions[0]
    session.client_name, session.pid, session.age_s = "vllm worker 3 on rank 0 (pid 1234567)", 1_234_567, 1_234_567
    result = run("status")
    assert result.exit_code == 0
    assert max(len(line.rstrip()) for line in result.stdout.splitlines()) <= 80
    row = next(line for line in result.stdout.splitlines() if line.startswith(" host "))
    assert row.split() == ["host", "on", "63.0", "GiB", "64.0", "GiB", "98.4%", "1.2M", "98.8M"]
    assert "leased 1.5 GiB, pinned 3.0 GiB of 16.0 GiB" in result.stdout
    assert "14 d" in result.stdout
