"""The command line as a whole: help is instant, mistakes exit with 2, every configuration key is a flag."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from prefixcache.server.config import Config
from tests.unit.cli.conftest import Run

COMMANDS = (
    "serve", "status", "describe", "clear", "config", "bench", "demo", "pin", "unpin", "pins", "prefetch", "prefixes",
    "evict", "drain", "flush",
)  # fmt: skip


def test_help_names_every_command(run: Run) -> None:
    shown = run("--help")
    assert shown.exit_code == 0
    assert all(name in shown.stdout for name in COMMANDS)
    assert run().stdout.strip() == shown.stdout.strip()


def test_help_loads_none_of_the_heavy_packages() -> None:
    """A shell's completion runs this on every press of tab."""
    code = (
        "import sys; sys.argv = ['prefixcache', '--help']\n"
        "from prefixcache.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'grpc', 'numpy', 'transformers', 'aiohttp', 'google.protobuf', 'prefixcache_client'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize("line", [["stauts"], ["status", "--nonsense"], ["describe"], ["bench", "everything"]])
def test_mistakes_exit_with_2_and_name_the_help(run: Run, line: list[str]) -> None:
    result = run(*line)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert "--help` shows what it takes" in result.stderr
    as_json = run(*line, "--json")
    assert as_json.exit_code == 2
    assert json.loads(as_json.stdout)["error"]["reason"] == "bad_usage"


def test_version(run: Run) -> None:
    assert run("--version").stdout.startswith("prefixcache ")
    assert set(json.loads(run("--version", "--json").stdout)) == {"version"}


def test_every_configuration_key_is_a_flag_of_serve_and_of_config_show(run: Run) -> None:
    for line in (["serve", "--help"], ["config", "show", "--help"]):
        shown = run(*line).stdout
        # Long names are cut in the narrow table of the help; their first letters must be there.
        missing = [
            key for item in dataclasses.fields(Config) if (key := "--" + item.name.replace("_", "-"))[:14] not in shown
        ]
        assert not missing


@pytest.mark.parametrize(
    "line", [["config", "show", "--json"], ["--json", "config", "show"], ["config", "--json", "show"]]
)
def test_config_shows_value_and_origin(
    run: Run, line: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prefixcache.toml"
    file.write_text("max_sessions = 7\n[host]\nbytes = '64MiB'\n")
    monkeypatch.setenv("PREFIXCACHE_HTTP", "127.0.0.1:0")
    monkeypatch.setenv("PREFIXCACHE_CONFIG", str(file))
    told = json.loads(run(*line).stdout)
    assert set(told) == {item.name for item in dataclasses.fields(Config)}
    assert (told["max_sessions"]["value"], told["max_sessions"]["origin"]) == ("7", f"file {file}")
    assert (told["host_bytes"]["value"], told["host_bytes"]["origin"]) == ("64MiB", f"file {file}")
    assert (told["http"]["value"], told["http"]["origin"]) == ("127.0.0.1:0", "env PREFIXCACHE_HTTP")
    assert told["log_level"]["origin"] == "default"


def test_flags_win_and_switches_have_two_sides(run: Run) -> None:
    told = json.loads(run("config", "show", "--json", "--host-bytes", "1GiB", "--no-checksums").stdout)
    assert (told["host_bytes"]["value"], told["host_bytes"]["origin"]) == ("1GiB", "flag --host-bytes")
    assert told["checksums"]["value"] == "false"


def test_config_alone_shows_everything(run: Run) -> None:
    shown = run("config")
    assert shown.exit_code == 0
    assert "host_bytes" in shown.stdout


def test_bad_values_name_the_key_and_where_it_came_from(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFIXCACHE_HOST_BYTES", "lots")
    for line in (["config", "show"], ["serve"]):
        result = run(*line)
        assert result.exit_code == 2
        assert "host_bytes (env PREFIXCACHE_HOST_BYTES)" in result.stderr
