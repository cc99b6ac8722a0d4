"""vLLM's OpenAI server as a user starts it, with the flag of docs/vllm.md and vLLM's own choice of processes."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Self

from tests.engines.vllm_engine import OFFLINE, ROOT

START_S, ANSWER_S = 400.0, 240.0


def documented_flag(address: str) -> str:
    """The value of --kv-transfer-config in docs/vllm.md, for this daemon."""
    found = re.search(r"vllm serve MODEL --kv-transfer-config '(.*)'", (ROOT / "docs" / "vllm.md").read_text())
    assert found is not None
    flag = json.loads(found.group(1))
    flag["kv_connector_extra_config"]["prefixcache.address"] = address
    return json.dumps(flag)


class Server:
    """Ready when the constructor returns; use it in a `with`."""

    def __init__(self, model: Path, log: Path, *flags: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = log
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name",
            "tiny", "--host", "127.0.0.1", "--port", str(self.port), "--enforce-eager", "--max-model-len", "2048",
            "--block-size", "32", *flags,
        ]  # fmt: skip
        settings = {name: value for name, value in OFFLINE.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
        settings["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=out, env=os.environ | settings, start_new_session=True
            )
        self._wait_ready()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def complete(self, tokens: list[int], max_tokens: int = 16, **more: Any) -> list[int]:
        """The tokens that follow, greedily."""
        body = {
            "model": "tiny", "prompt": tokens, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, **more,
        }  # fmt: skip
        answer = json.loads(self.get("/v1/completions", json.dumps(body).encode()))
        return list(answer["choices"][0]["token_ids"])

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a counter on the metrics page, over all lines with these labels; a KeyError where it is not."""
        lines = [line for line in self.get("/metrics").splitlines() if re.match(rf"{re.escape(name)}[{{ ]", line)]
        if not lines and not labels:
            raise KeyError(name)
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(float(line.rpartition(" ")[2]) for line in lines if all(each in line for each in wanted))

    def get(self, path: str, body: bytes | None = None) -> str:
        """The answer of a path."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            return str(answer.read().decode())

    def kill(self) -> None:
        """SIGKILL to the whole session: engine and workers too."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _wait_ready(self) -> None:
        until = time.monotonic() + START_S
        while time.monotonic() < until and self.process.poll() is None:
            try:
                self.get("/health")
                return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.25)
        self.kill()
        raise AssertionError(f"the server does not start:\n{self.log.read_text(errors='replace')[-6000:]}")
