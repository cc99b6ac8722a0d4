"""The command line against a real daemon: what a person does in the first minutes, and what a script relies on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixcache.identity import GroupKind, LayerGroup, Layout
from prefixcache_client import Client, Namespace

COMMAND = (sys.executable, "-m", "prefixcache.cli.main")
TIMEOUT_S = 60.0
TOKENS = np.arange(1000, 1000 + 300, dtype=np.uint32)  # 4 whole blocks of 64 and a rest


def environ(**extra: str) -> dict[str, str]:
    """This process's environment without settings that a developer may have."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PREFIXCACHE_")} | extra


def run(arguments: list[str], stdin: str = "", **extra: str) -> subprocess.CompletedProcess[str]:
    """One command line."""
    line, variables = [*COMMAND, *arguments], environ(**extra)
    return subprocess.run(
        line, input=stdin, capture_output=True, text=True, timeout=TIMEOUT_S, env=variables, check=False
    )


@dataclass(frozen=True)
class Served:
    """A daemon started by `prefixcache serve`, and commands against it."""

    process: subprocess.Popen[str]
    socket: Path

    def run(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """One command line; the address comes from the environment."""
        return run([*arguments], stdin, PREFIXCACHE_ADDRESS=f"unix://{self.socket}")

    def json(self, *arguments: str) -> Any:
        """What a command that succeeds prints under --json."""
        done = self.run(*arguments, "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    socket = tmp_path_factory.mktemp("cli") / "d.sock"
    line = [*COMMAND, "serve", "--socket", str(socket), "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"]
    process = subprocess.Popen(
        [*line, "--host-bytes", "64MiB", "--log-level", "warning"], stdout=subprocess.PIPE, text=True, env=environ()
    )
    assert process.stdout is not None
    with process:
        assert "ready" in process.stdout.readline()
        running = Served(process, socket)
        wait_ready(running)
        yield running
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0


def wait_ready(running: Served) -> None:
    """Until the whole pool is touched: before, blocks are refused as `pool_not_ready`."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        tiers = running.json("status")["tiers"]
        if all(tier["ready_bytes"] == tier["capacity_bytes"] for tier in tiers):
            return
    pytest.fail(f"the pool was not ready in {TIMEOUT_S} s: {tiers}")


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[Client]:
    with Client(f"unix://{served.socket}") as connected:
        yield connected


def a_namespace(client: Client, label: str) -> Namespace:
    group = LayerGroup(GroupKind.FULL, (0, 1), 2, 8, 8, "float32")
    return client.namespace(Layout((group,)), label.encode().ljust(32, b"."), label=label)


def store(client: Client, ns: Namespace) -> None:
    """The whole blocks of TOKENS."""
    result = client.store(ns, TOKENS, np.ones((4, ns.block_bytes), np.uint8))
    assert result.stored_blocks == 4, result


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps(TOKENS.tolist()))
    return path


def test_status_counts_what_a_worker_did(served: Served, client: Client) -> None:
    ns = a_namespace(client, "status")
    before = served.json("status")["tokens"]
    store(client, ns)
    with client.acquire(ns, TOKENS) as lease:
        assert lease.tokens == 256
        pending = served.json("status")
        assert pending["tokens"]["pending"] - before["pending"] == 256
        assert lease.copy_to(np.empty((4, ns.block_bytes), np.uint8))
    told = served.json("status")
    tokens = told["tokens"]
    assert tokens["hit"]["host"] - before["hit"]["host"] == 256
    assert tokens["looked_up"] == sum(tokens["hit"].values()) + sum(tokens["miss"].values()) + tokens["pending"]
    assert tokens["miss"]["partial_block"] - before["miss"].get("partial_block", 0) == 44
    assert told["health"] == "serving"
    assert [tier["state"] for tier in told["tiers"] if tier["tier"] == "host"] == ["on"]
    assert any(item["label"] == "status" and item["blocks"] == 4 for item in told["namespaces"])
    assert any(item["transport"] == "local" and item["pid"] == os.getpid() for item in told["sessions"])


def test_port_0_is_told_as_the_real_one(served: Served) -> None:
    unix, tcp, http = served.json("status")["addresses"]
    assert unix == f"unix://{served.socket}"
    with urllib.request.urlopen(f"{http}/metrics", timeout=TIMEOUT_S) as answer:
        assert b"prefixcache" in answer.read()
    assert served.json("status", "--address", tcp)["address"] == tcp


def test_describe_finds_what_was_stored(served: Served, client: Client, token_file: Path) -> None:
    store(client, a_namespace(client, "describe"))
    told = served.json("describe", str(token_file), "--namespace", "describe")
    assert told["tokens"] == {"gpu": 0, "host": 256, "disk": 0, "peer": 0}
    assert (told["prompt_tokens"], told["whole_block_tokens"], told["cached_tokens"]) == (300, 256, 256)
    assert [block["tiers"] for block in told["blocks"]] == [["host"]] * 4
    other = json.dumps([*TOKENS.tolist()[:128], *range(128)])
    assert served.run("describe", "-", "-n", "describe", "--json", stdin=other).returncode == 0
    shorter = json.loads(served.run("describe", "-", "-n", "describe", "--json", stdin=other).stdout)
    assert (shorter["cached_tokens"], shorter["stop"]) == (128, "not_cached")
    shown = served.run("describe", str(token_file), "-n", "describe").stdout
    assert "256 of 300 tokens cached" in shown


def test_clear_drops_one_namespace_and_no_other(served: Served, client: Client, token_file: Path) -> None:
    for label in ("gone", "kept"):
        store(client, a_namespace(client, label))
    refused = served.run("clear", "--namespace", "gone")
    assert (refused.returncode, "--yes" in refused.stderr) == (2, True)
    assert served.json("clear", "--namespace", "gone", "--yes")["cleared_blocks"] == 4
    assert served.json("describe", str(token_file), "-n", "gone")["cached_tokens"] == 0
    assert served.json("describe", str(token_file), "-n", "kept")["cached_tokens"] == 256
    assert served.json("clear", "--all", "--yes")["cleared_blocks"] >= 4
    assert served.json("describe", str(token_file), "-n", "kept")["cached_tokens"] == 0


def test_leased_blocks_survive_a_clear_until_their_release(served: Served, client: Client) -> None:
    ns = a_namespace(client, "leased")
    store(client, ns)
    with client.acquire(ns, TOKENS) as lease:
        assert served.json("clear", "--namespace", "leased", "--yes")["kept_blocks"] == 4
        target = np.zeros((4, ns.block_bytes), np.uint8)
        assert lease.copy_to(target)
        assert target.all()
    assert client.lookup(ns, TOKENS).tokens == 0


def test_a_second_daemon_on_the_same_socket_says_so_in_one_line(served: Served) -> None:
    second = served.run("serve", "--socket", str(served.socket), "--http", "127.0.0.1:0", "--host-bytes", "16MiB")
    assert second.returncode == 1
    assert second.stderr.startswith("error: ")
    assert str(served.socket) in second.stderr
    assert "Traceback" not in second.stderr
    assert served.json("status")["health"] == "serving"


def test_config_show_tells_a_daemons_settings_and_their_origin(served: Served) -> None:
    told = served.json("config", "show", "--host-bytes", "64MiB")
    assert told["host_bytes"]["value"] == "64MiB"
    assert told["host_bytes"]["origin"] == "flag --host-bytes"
    assert told["lease_ttl"]["origin"] == "default"


def test_a_daemon_that_is_not_there_is_an_expected_failure(tmp_path: Path) -> None:
    for arguments in (["status"], ["describe", "-"], ["clear", "--yes"]):
        done = run([*arguments, "--address", f"unix://{tmp_path}/none.sock"], stdin="7 " * 64)
        assert done.returncode == 1
        assert "no daemon answers" in done.stderr
        assert "prefixcache serve" in done.stderr
        assert "Traceback" not in done.stderr
