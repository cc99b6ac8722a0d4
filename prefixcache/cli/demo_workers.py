"""The demo's worker processes as objects: started, asked, ended.

It knows the lines that demo_worker reads and writes, and nothing of models. A worker that dies or hangs is a CliError
with what it last wrote to standard error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from prefixcache.cli.errors import CliError

ANSWER_TIMEOUT_S: Final = 300.0
END_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True)
class Answer:
    """What a worker answered: generated ids, seconds to the first token and to the last, prompt tokens reused."""

    ids: tuple[int, ...]
    ttft_s: float
    total_s: float
    reused: int


class WorkerProcess:
    """One worker. `ready` first, then any number of `ask`; one thread at a time."""

    def __init__(self, number: int, process: subprocess.Popen[str], log: Path) -> None:
        self.number = number
        self._process = process
        self._log = log

    def wait_ready(self) -> None:
        """Return when the model is loaded. Raises CliError."""
        self._read()

    def ask(self, ids: Sequence[int], new_tokens: int, *, cached: bool) -> Answer:
        """Have one prompt answered. Raises CliError when the worker died or takes longer than ANSWER_TIMEOUT_S."""
        assert self._process.stdin is not None
        line = json.dumps({"ids": list(ids), "new_tokens": new_tokens, "cached": cached})
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._dead() from None
        said = self._read()
        return Answer(tuple(said["ids"]), said["ttft_s"], said["total_s"], said["reused"])

    def end(self) -> None:
        """Close its input and wait; a worker that does not end is killed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(END_TIMEOUT_S)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        watchdog = threading.Timer(ANSWER_TIMEOUT_S, self._process.kill)
        watchdog.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watchdog.cancel()
        if not line:
            raise self._dead()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _dead(self) -> CliError:
        last = self._log.read_text(errors="replace").strip().splitlines()[-8:]
        return CliError(f"worker {self.number} ended or did not answer", "\n  ".join(last), reason="worker_failed")


@contextmanager
def workers(count: int, checkpoint: Path, address: str, folder: Path) -> Iterator[list[WorkerProcess]]:
    """Start `count` workers that share the cores; logs go into `folder`. All of them end with the block."""
    threads = max(1, (os.cpu_count() or 1) // count)
    with ExitStack() as stack:
        started = []
        for number in range(count):
            log = folder / f"worker-{number}.log"
            environ = _environ(threads, folder)
            worker = WorkerProcess(number, _start(checkpoint, address, threads, environ, log), log)
            stack.callback(worker.end)
            started.append(worker)
        yield started


def _environ(threads: int, folder: Path) -> dict[str, str]:
    """Whatever libraries leave in the folder for temporary files goes with the demo's own."""
    own = {"OMP_NUM_THREADS": str(threads), "TMPDIR": str(folder)}
    return os.environ | own | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}


def _start(checkpoint: Path, address: str, threads: int, environ: dict[str, str], log: Path) -> subprocess.Popen[str]:
    command = [
        *(sys.executable, "-m", "prefixcache.cli.demo_worker", "--checkpoint", str(checkpoint)),
        *("--address", address, "--threads", str(threads)),
    ]
    with log.open("wb") as errors:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environ
        )  # fmt: skip
