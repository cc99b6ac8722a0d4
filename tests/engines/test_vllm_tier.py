"""vLLM's own CPU offload with our tier under it, with the settings of docs/vllm.md: what its CPU tier gives up comes
back from the daemon, in this engine and in a fresh one, and the daemon may come and go.

vLLM's offload needs a GPU only where it copies pages; `cpu_offload` does that here, all else is vLLM's own.
"""

import json
import os
import re
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.processes import DaemonProcess, wait_until
from tests.engines.conftest import Checkpoints
from tests.engines.test_vllm import prompt
from tests.engines.vllm_engine import ROOT, Engine, Output

CHUNK_BYTES, CHUNKS = 49152, 21  # 32 tokens of the tiny Llama; room for one prompt
LONG, OTHER, HUGE = prompt(1, 700), prompt(2, 700), prompt(3, 3000)
WHOLE = 672
LATEST_S = 1.0
FACTORY = find_spec("vllm.v1.kv_offload.tiering.factory")
pytestmark = pytest.mark.skipif(
    FACTORY is None or '.get("module_path")' not in Path(str(FACTORY.origin)).read_text(),
    reason="this vLLM takes no secondary tiers from other packages (module_path of a tier)",
)


def documented_tier(address: str, **settings: Any) -> dict[str, Any]:
    """The value of --kv-transfer-config in docs/vllm.md, for this daemon and for a CPU."""
    found = re.search(r"--kv-transfer-config '(.*PrefixCacheTier.*)'", (ROOT / "docs" / "vllm.md").read_text())
    assert found is not None
    flag: dict[str, Any] = json.loads(found.group(1))
    extra = flag["kv_connector_extra_config"]
    assert extra["spec_name"] == "TieringOffloadingSpec"
    extra |= {"spec_name": "CpuTieringSpec", "spec_module_path": "tests.engines.cpu_offload"}
    extra["cpu_bytes_to_use"] = CHUNKS * CHUNK_BYTES
    extra["secondary_tiers"][0] |= {"prefixcache.address": address}
    extra["secondary_tiers"][0] |= {f"prefixcache.{name}": value for name, value in settings.items()}
    return flag


class Spilling:
    """An engine whose CPU tier forgets LONG whenever OTHER is computed."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        assert self.call("watch") == CHUNKS

    def call(self, name: str, **arguments: Any) -> Any:
        return self.engine.call(f"tier_scenarios:{name}", **arguments)

    def asked(self, tokens: list[int] = LONG) -> Output:
        """What comes of it, never held up for long; everything is stored when this returns."""
        output = self.engine.one(tokens)
        assert self.call("longest_held_s") <= LATEST_S
        self.call("settle")
        return output

    def after_other(self) -> Output:
        """LONG, when vLLM's own tier has it no more."""
        self.asked(OTHER)
        return self.asked()

    def reuses(self) -> bool:
        """Whether it comes back whole; computes and stores it otherwise."""
        return self.after_other().cached == WHOLE


@pytest.fixture(scope="module")
def cold(shared_daemon: DaemonProcess, checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Output:
    """LONG computed by an engine that is gone, having spilled it and fetched it back."""
    log = tmp_path_factory.mktemp("first") / "log"
    tier = documented_tier(f"unix://{shared_daemon.socket}")
    with Engine(checkpoints("llama"), None, log=log, kv_transfer_config=tier) as engine:
        first = Spilling(engine)
        computed = first.asked()
        assert (computed.cached, len(set(computed.tokens)) > 8) == (0, True)
        again = first.asked()
        assert (again.tokens, again.cached) == (computed.tokens, WHOLE), "from vLLM's own tier"
        assert "loaded." not in (told := first.call("told"))
        assert told["stored."] == WHOLE // 32
        assert wait_until(first.reuses)
        promoted = first.after_other()
        assert (promoted.tokens, promoted.cached) == (computed.tokens, WHOLE)
        assert first.call("told")["loaded."] >= 2 * WHOLE // 32
        # Changed weights: nothing of before is found, here; others go on.
        assert first.call("changed_weights", factor=2.0)
        changed = first.after_other()
        assert (changed.cached, changed.tokens != computed.tokens) == (0, True)
    return computed


def test_a_fresh_engine_reuses_what_another_spilled(
    cold: Output, shared_daemon: DaemonProcess, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    patience = {"ask_timeout_s": 0.4, "load_timeout_s": 0.4}
    daemon, folder = shared_daemon, shared_daemon.socket.parent
    tier = documented_tier(f"unix://{daemon.socket}", **patience)
    with Engine(checkpoints("llama"), None, log=tmp_path / "log", kv_transfer_config=tier) as engine:
        second = Spilling(engine)
        found = engine.one(LONG)
        assert (found.tokens, found.cached) == (cold.tokens, WHOLE)
        # Frozen, as long as it likes.
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            for _ in range(2):
                output = second.after_other()
                assert (output.tokens, output.cached) == (cold.tokens, 0)
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        assert wait_until(second.reuses)
        # Killed when chunks are leased and about to be copied.
        second.asked(OTHER)
        killed = second.call("kill_while_promoting", prompt=LONG, max_tokens=16, pid=daemon.pid)
        assert killed["tokens"] == cold.tokens
        assert killed["killed"]
        output = second.after_other()
        assert (output.tokens, output.cached) == (cold.tokens, 0)
        # Restarted, with no room for both prompts.
        small = DaemonProcess(folder, host_bytes="2MiB")
        try:
            huge = second.asked(HUGE)
            assert second.asked(HUGE).tokens == huge.tokens
            assert second.after_other().tokens == cold.tokens
            assert second.after_other().tokens == cold.tokens
        finally:
            small.kill()
        again = DaemonProcess(folder)
        try:
            assert wait_until(second.reuses)
            assert second.after_other().tokens == cold.tokens
            told = second.call("told")
            assert told["loaded."] >= WHOLE // 32
            assert told["not_found.not_cached"] > 0
            assert told["not_stored.server_unavailable"] > 0
        finally:
            again.kill()
