"""A vLLM in a process of its own, told what to do line by line; what a test sees of an engine.

The process is `vllm_process.py`. One engine in one process ("uni"): the scheduler's and the worker's connector are two
objects that share nothing but what vLLM passes between them.
"""

import json
import os
import select
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]
START_S, ANSWER_S = 300.0, 240.0
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class Output:
    """What came of one request. `cached`: tokens that were not computed, wherever they came from."""

    tokens: list[int]
    cached: int
    logprobs: list[float]
    finish_reason: str


class Engine:
    """Starts with the constructor; use it in a `with`."""

    def __init__(self, model: Path, address: str | None, *, log: Path, **settings: Any) -> None:
        """`address`: of the daemon; None for an engine without a connector. `settings`: of vllm.LLM; those of the
        connector under `connector`, variables of the process under `environ`."""
        ours, theirs = os.pipe()
        connector, environ = settings.pop("connector", {}), settings.pop("environ", {})
        request = {"model": str(model), "address": address, "connector": connector, "settings": settings}
        command = [sys.executable, str(Path(__file__).parent / "vllm_process.py"), str(theirs), json.dumps(request)]
        self.log = log
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=out, stderr=out, pass_fds=[theirs],
                env=os.environ | OFFLINE | environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            )  # fmt: skip
        os.close(theirs)
        self._answers = os.fdopen(ours, "r")
        self.start_s = float(self._answer(START_S))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(self, *prompts: list[int], max_tokens: int = 16, **more: Any) -> list[Output]:
        """Greedy, all at once, each to its full length. `more`: fields of the prompts (cache_salt) or `sampling`."""
        answer = self.call("generate", prompts=list(prompts), max_tokens=max_tokens, **more)
        return [Output(**each) for each in answer]

    def one(self, prompt: list[int], max_tokens: int = 16, **more: Any) -> Output:
        """As `generate`, one prompt."""
        return self.generate(prompt, max_tokens=max_tokens, **more)[0]

    def call(self, name: str, /, **arguments: Any) -> Any:
        """The answer of a function of `scenarios.py`, or "module:function" of another such module."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, arguments]).encode() + b"\n")
        self._process.stdin.flush()
        return self._answer(ANSWER_S)

    def close(self) -> None:
        """End the process; a second call does nothing."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()

    def _answer(self, timeout_s: float) -> Any:
        until = time.monotonic() + timeout_s
        while not select.select([self._answers], [], [], 1.0)[0]:
            if time.monotonic() > until or self._process.poll() is not None:
                raise AssertionError(f"the engine does not answer:\n{self._tail()}")
        line = self._answers.readline()
        if not line:
            raise AssertionError(f"the engine has ended:\n{self._tail()}")
        kind, value = json.loads(line)
        assert kind == "ok", f"{value}\n{self._tail()}"
        return value

    def _tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]
