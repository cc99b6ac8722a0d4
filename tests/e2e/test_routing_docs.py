"""The commands and the program of docs/routing.md, as they stand there, on a daemon that holds something."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from prefixcache_client import Client
from tests.e2e.processes import DaemonProcess, wait_until
from tests.unit.client.conftest import BLOCK_TOKENS, DIGEST, FAST, LAYOUT

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "routing.md").read_text()
BLOCKS = 5


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("docs") / "daemon"
    folder.mkdir()
    daemon = DaemonProcess(folder)
    with Client(f"unix://{daemon.socket}", FAST) as client:
        ns = client.namespace(LAYOUT, DIGEST, block_tokens=BLOCK_TOKENS, label="a model")
        tokens = list(range(1, BLOCKS * BLOCK_TOKENS + 1))
        blocks = np.zeros((BLOCKS, ns.block_bytes), np.uint8)
        assert wait_until(lambda: client.store(ns, tokens, blocks).reason == "")  # a busy machine answers late
        yield {**os.environ, "PREFIXCACHE_ADDRESS": f"unix://{daemon.socket}"}
    daemon.kill()


def run(command: list[str], environ: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, *command], env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_watch_commands(environ: dict[str, str]) -> None:
    commands = re.findall(r"^prefixcache (watch .*)$", TEXT, re.MULTILINE)
    assert len(commands) == 2
    plain, as_json = (run(["-m", "prefixcache.cli.main", *shlex.split(each)], environ) for each in commands)
    assert "nothing happened" in plain
    *events, last = [json.loads(line) for line in as_json.splitlines()]
    assert [each["kind"] for each in events] == ["stored", "snapshot_end"]
    assert events[0]["tokens"] == BLOCKS * BLOCK_TOKENS
    assert last["summary"]["held_blocks"] == {"host": BLOCKS}


def test_program(environ: dict[str, str]) -> None:
    found = re.search(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert found is not None
    print_it = "\nprint(sum(len(tiers) for tiers in known.tiers.values()))\n"
    assert run(["-c", found.group(1) + print_it], environ).strip() == str(BLOCKS)


def test_the_router_is_as_short_as_it_says() -> None:
    path = re.search(r"\]\(\.\./(clients/vllm/examples/router\.py)\), thirty lines without its imports", TEXT)
    assert path is not None
    source = (ROOT / path.group(1)).read_text()
    aside = set()
    for node in ast.walk(ast.parse(source)):
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if docstring or isinstance(node, ast.Import | ast.ImportFrom):
            aside |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = [line for number, line in enumerate(source.splitlines(), 1) if line.strip() and number not in aside]
    assert len(lines) <= 30
