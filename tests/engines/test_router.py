"""The router of docs/routing.md before two real servers, each with a daemon of its own: a prompt goes to where it is
cached, a new one to the other server, and answers are those of the servers."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.e2e.processes import DaemonProcess, wait_until
from tests.engines.conftest import Checkpoints
from tests.engines.test_vllm import prompt
from tests.engines.vllm_engine import ROOT
from tests.engines.vllm_server import ANSWER_S, Server, documented_flag

DOCS = ROOT / "docs" / "routing.md"
ONE, OTHER = prompt(21, 700), prompt(22, 700)


class Router:
    """The documented command, with this test's addresses."""

    def __init__(self, places: list[str], log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        found = re.search(r"^python (clients/vllm/examples/router\.py) 8000 ", DOCS.read_text(), re.M)
        assert found is not None
        with log.open("ab") as out:
            command = [sys.executable, str(ROOT / found.group(1)), str(self.port), *places]
            self.process = subprocess.Popen(command, stdout=out, stderr=out)

    def complete(self, prompt: list[int] | str) -> tuple[str, str]:
        """(which server it went to, the text that follows)."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            return str(answer.headers["X-Routed-To"]), str(json.loads(answer.read())["choices"][0]["text"])

    def documented(self, prompt: str) -> dict[str, Any]:
        """The answer to the documented curl command, with this test's port, model and prompt."""
        found = re.search(r"^curl http://127\.0\.0\.1:8000/.*$", DOCS.read_text(), re.M)
        assert found is not None
        line = found.group().replace(":8000/", f":{self.port}/").replace("MODEL", "tiny").replace("...", prompt)
        command = shlex.split(line)
        if shutil.which("curl") is None:
            url, header, body = command[1], command[3], command[5]
            request = urllib.request.Request(url, body.encode(), dict([header.split(": ")]))
            with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
                return dict(json.loads(answer.read()))
        limits = ["--silent", "--show-error", "--fail", "--noproxy", "127.0.0.1", "--max-time", str(ANSWER_S)]
        return dict(json.loads(subprocess.run([*command, *limits], stdout=subprocess.PIPE, check=True).stdout))

    def answers(self) -> bool:
        """Whether it listens."""
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}/", timeout=ANSWER_S)
        except urllib.error.HTTPError:
            return True
        except urllib.error.URLError:
            return False
        return True

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def two_nodes(model: Path, folder: Path) -> Iterator[list[tuple[Server, DaemonProcess]]]:
    """Servers that start side by side, each with its daemon."""
    with ExitStack() as stack:
        daemons = []
        for name in ("one", "two"):
            (folder / name).mkdir()
            daemons.append(DaemonProcess(folder / name, host_bytes="64MiB"))
            stack.callback(daemons[-1].kill)

        def start(number: int) -> Server:
            flag = documented_flag(f"unix://{daemons[number].socket}")
            return Server(model, folder / f"{number}.log", "--kv-transfer-config", flag)

        with ThreadPoolExecutor(2) as threads:
            servers = list(threads.map(start, range(2)))
        for server in servers:
            stack.callback(server.kill)
        yield list(zip(servers, daemons, strict=True))


def test_router(checkpoints: Checkpoints, tmp_path: Path) -> None:
    with two_nodes(checkpoints("llama"), tmp_path) as nodes:
        places = [f"http://127.0.0.1:{server.port}=unix://{daemon.socket}" for server, daemon in nodes]
        router = Router(places, tmp_path / "router.log")
        try:
            assert wait_until(router.answers), (tmp_path / "router.log").read_text()
            check(router, nodes)
        finally:
            router.close()


def check(router: Router, nodes: list[tuple[Server, DaemonProcess]]) -> None:
    first, second = (f"http://127.0.0.1:{server.port}" for server, _ in nodes)
    saved = "vllm:prefixcache_saved_tokens_total"
    went, said = router.complete(ONE)
    assert went == first
    assert router.complete(OTHER)[0] == second, "a prompt that is cached nowhere goes to the server that had fewer"
    for server, _ in nodes:
        assert wait_until(lambda server=server: server.metric(saved) >= 640)  # type: ignore[misc]  # bound at once
    for _ in range(2):  # more than its share, because it is cached there
        assert router.complete(ONE) == (first, said)
    for seed in (31, 32, 33):
        assert router.complete(prompt(seed, 700, like=OTHER[:320]))[0] == second
    texts = [" ".join(f"w{token}" for token in prompt(seed, 700)) for seed in (41, 42)]
    before = nodes[0][0].metric(saved)
    told = [router.complete(text) for text in texts]  # the first server was sent fewer, and then as many
    assert [went for went, _ in told] == [first, first]
    assert wait_until(lambda: nodes[0][0].metric(saved) >= before + 2 * 640)
    assert router.complete(texts[0]) == told[0], "text becomes the tokens under which it is cached"
    asked = " ".join(f"w{token}" for token in range(40, 60))
    answer = router.documented(asked)
    assert (answer["model"], answer["usage"]["prompt_tokens"]) == ("tiny", 20)
    assert answer["choices"][0]["text"].split()
    nodes[0][1].kill()  # its daemon is gone: everything goes on, and nothing is known to be cached there
    assert router.complete(OTHER)[0] == second
    assert router.complete(ONE)[1] == said
