"""The daemon comes and goes under a running vLLM: same tokens, in time, and reuse comes back by itself."""

import os
import signal
import time
from pathlib import Path

from tests.e2e.processes import DaemonProcess, wait_until
from tests.engines.conftest import Checkpoints
from tests.engines.test_vllm import prompt
from tests.engines.vllm_engine import Engine, Output

LONG = prompt(1, 700)
LATEST_S = 1.0


class Timed:
    """An engine whose requests are timed against the slowest that had no cache."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.slowest_s = 0.0
        for salt in "abc":
            _, took_s = self.run(salt)
            self.slowest_s = max(self.slowest_s, took_s)

    def run(self, salt: str = "") -> tuple[Output, float]:
        began = time.monotonic()
        output = self.engine.one(LONG, **({"cache_salt": salt} if salt else {}))
        return output, time.monotonic() - began

    def in_time(self) -> Output:
        output, took_s = self.run()
        assert took_s <= self.slowest_s + LATEST_S
        return output

    def reuses(self) -> bool:
        """Whether LONG comes from the daemon; computes and stores it otherwise."""
        output = self.in_time()
        self.engine.call("settle")
        return output.cached == 640


def test_daemon_comes_and_goes(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = tmp_path / "daemon"
    folder.mkdir()
    # Never started.
    with Engine(checkpoints("llama"), f"unix://{folder}/d.sock", log=tmp_path / "log") as engine:
        timed = Timed(engine)
        cold = timed.in_time()
        assert cold.cached == 0
        # Started later.
        daemon = DaemonProcess(folder)
        try:
            assert wait_until(timed.reuses)
            # Frozen: as long as it likes.
            os.kill(daemon.pid, signal.SIGSTOP)
            for _ in range(4):
                output = timed.in_time()
                assert (output.tokens, output.cached) == (cold.tokens, 0)
            os.kill(daemon.pid, signal.SIGCONT)
            assert wait_until(timed.reuses)
            # Killed with slots leased, when they are about to be copied.
            began = time.monotonic()
            output = Output(**engine.call("kill_while_loading", prompt=LONG, max_tokens=16, pid=daemon.pid))
            assert output.tokens == cold.tokens
            assert time.monotonic() - began <= timed.slowest_s + LATEST_S
            assert timed.in_time().tokens == cold.tokens
        finally:
            daemon.kill()
        # Restarted, empty.
        daemon = DaemonProcess(folder)
        try:
            assert wait_until(timed.reuses)
            engine.call("settle")
            counts = engine.call("counts")
            assert (counts["entries"], counts["pinned_bytes"], counts["engine_requests"]) == (0, 0, 0)
        finally:
            daemon.kill()


def test_daemon_smaller_than_a_prompt(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = tmp_path / "daemon"
    folder.mkdir()
    daemon = DaemonProcess(folder, host_bytes="2MiB")
    try:
        with Engine(checkpoints("llama"), f"unix://{daemon.socket}", log=tmp_path / "log") as engine:
            huge = prompt(5, 3000)
            cold = engine.one(huge, cache_salt="cold")
            for _ in range(3):
                output = engine.one(huge)
                engine.call("settle")
                assert output.tokens == cold.tokens
            others = [prompt(50 + i, 600) for i in range(6)]
            for each in others * 2:
                engine.one(each)
            engine.call("settle")
            assert engine.one(others[0]).tokens == engine.one(others[0], cache_salt="cold").tokens
            assert engine.call("counts")["pinned_bytes"] == 0
    finally:
        daemon.kill()
