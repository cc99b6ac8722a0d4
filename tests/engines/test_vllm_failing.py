"""The daemon comes and goes under a running vLLM: same tokens, in time, and reuse comes back by itself."""

import os
import signal
from pathlib import Path

from tests.e2e.processes import DaemonProcess, wait_until
from tests.engines.conftest import Checkpoints
from tests.engines.test_vllm import prompt
from tests.engines.vllm_engine import Engine, Output

LONG = prompt(1, 700)
LATEST_S = 1.0


class Timed:
    """An engine, and how long the daemon held its requests up: of their whole time on a busy machine one would learn
    little."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        engine.call("longest_held_s")

    def in_time(self) -> Output:
        output = self.engine.one(LONG)
        assert self.engine.call("longest_held_s") <= LATEST_S
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
    patience = {"ask_timeout_s": 0.5, "load_timeout_s": 0.3}
    address = f"unix://{folder}/d.sock"
    with Engine(checkpoints("llama"), address, log=tmp_path / "log", connector=patience) as engine:
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
            output = Output(**engine.call("kill_while_loading", prompt=LONG, max_tokens=16, pid=daemon.pid))
            assert output.tokens == cold.tokens
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
            asked = engine.call("asks", prompts=others * 2)
            assert 0 < asked["pinned_share"] <= 0.25
            assert 0 < asked["daemon"] <= len(others) * 2 < asked["engine"]
            engine.call("settle")
            assert engine.one(others[0]).tokens == engine.one(others[0], cache_salt="cold").tokens
            assert engine.call("counts")["pinned_bytes"] == 0
    finally:
        daemon.kill()
