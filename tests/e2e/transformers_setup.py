"""What the end-to-end tests of the Transformers adapter share: a daemon, worker processes, real prompts.

A worker that dies or is slow fails the test with what it wrote to standard error.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefixcache.cli import demo_text

ROOT = Path(__file__).parents[2]
SOURCES = [ROOT, ROOT / "offload", ROOT / "clients/python", ROOT / "clients/transformers"]
ANSWER_TIMEOUT_S = 240.0


def python_with_transformers_4() -> Path | None:
    """The interpreter of the environment with transformers 4.57, which `make test` builds."""
    folder = os.environ.get("PREFIXCACHE_VENV457") or str(ROOT / ".venv-transformers4")
    python = Path(folder) / "bin" / "python"
    return python if python.exists() else None


def environment(threads: int) -> dict[str, str]:
    """For a child process in whichever environment: this checkout's sources, no network, so many threads."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("PREFIXCACHE_")}
    return own | {
        "PYTHONPATH": os.pathsep.join(map(str, SOURCES)),
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }


class Worker:
    """A worker process. `info` is what it said of itself when it was ready."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self.log = log
        self.info: dict[str, Any] = {}

    def wait_ready(self) -> None:
        """Wait until the model is loaded."""
        self.info = self._read()

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """One question, one answer; see transformers_worker."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"op": op} | arguments) + "\n")
        self.process.stdin.flush()
        return self._read()

    def generate(self, ids: Sequence[int], new_tokens: int = 8, *, cached: bool = True) -> tuple[list[int], int]:
        """(generated ids, prompt tokens reused) of one prompt."""
        answer = self.ask("generate", rows=[list(ids)], new_tokens=new_tokens, cached=cached)
        return answer["rows"][0], answer["reused"]

    def end(self) -> None:
        """Close its input, which ends it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        watchdog = threading.Timer(ANSWER_TIMEOUT_S, self.process.kill)
        watchdog.start()
        line = self.process.stdout.readline()
        watchdog.cancel()
        if not line:
            raise AssertionError(f"worker failed:\n{self.log.read_text(errors='replace')[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def workers(
    pythons: Sequence[Path], checkpoint: Path, address: str, dtype: str, folder: Path
) -> Iterator[list[Worker]]:
    """One worker for each interpreter given; they share the cores and load at the same time."""
    threads = max(1, (os.cpu_count() or 1) // len(pythons))
    started: list[Worker] = []
    try:
        for number, python in enumerate(pythons):
            log = folder / f"{dtype}-{number}.log"
            command = [str(python), str(Path(__file__).with_name("transformers_worker.py"))]
            command += ["--checkpoint", str(checkpoint), "--address", address]
            command += ["--dtype", dtype, "--threads", str(threads)]
            with log.open("wb") as errors:
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                    env=environment(threads),
                )  # fmt: skip
            started.append(Worker(process, log))
        with ThreadPoolExecutor(len(started)) as pool:
            list(pool.map(Worker.wait_ready, started))
        yield started
    finally:
        for worker in started:
            worker.end()


@dataclass
class DaemonProcess:
    """A daemon that a test may kill and start again under the same address."""

    folder: Path
    host_bytes: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"unix://{self.folder}/daemon.sock"

    def start(self) -> None:
        """Start and wait until it says that it is ready."""
        command = [sys.executable, "-m", "prefixcache.cli.main", "serve", "--http", "127.0.0.1:0"]
        command += ["--socket", f"{self.folder}/daemon.sock", "--host-bytes", str(self.host_bytes)]
        with (self.folder / "daemon.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment(1))
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert b"ready" in line, (line, (self.folder / "daemon.log").read_text()[-2000:])

    def end(self, how: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal and wait for the end."""
        assert self.process is not None
        assert self.process.stdout is not None
        self.process.send_signal(how)
        self.process.stdout.close()
        self.process.wait(30)


def shared_prompts(checkpoint: Path, count: int) -> list[list[int]]:
    """Real prompts that share their first 2,000 tokens and differ behind them, in what they say and in length."""
    # Questions alone come in a few lengths, so each loses its beginning up to another token.
    return [
        prompt.ids[: prompt.shared] + prompt.ids[prompt.shared + i % 9 :]
        for i, prompt in enumerate(demo_text.make_prompts(checkpoint, count))
    ]
