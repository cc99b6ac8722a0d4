"""The OpenAI server with the documented flag: killed and restarted, its prompts are still there; the daemon killed and
restarted, it goes on."""

import time
from pathlib import Path

from tests.e2e.processes import DaemonProcess, wait_until
from tests.engines.conftest import Checkpoints
from tests.engines.test_vllm import prompt
from tests.engines.vllm_server import Server, documented_flag

LONG = prompt(1, 700)
HITS = "vllm:external_prefix_cache_hits_total"
OURS = "vllm:prefixcache_"


def test_server(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = tmp_path / "daemon"
    folder.mkdir()
    daemon = DaemonProcess(folder, host_bytes="64MiB")
    flag = ("--kv-transfer-config", documented_flag(f"unix://{daemon.socket}"), "--no-enable-prefix-caching")
    try:
        with Server(checkpoints("llama"), tmp_path / "first.log", *flag) as server:
            cold = server.complete(LONG)
            assert server.metric(f"{OURS}hits_total") == 0, "a counter is there before it counts"
            assert wait_until(lambda: server.complete(LONG) == cold and server.metric(HITS) >= 640)
            assert wait_until(lambda: server.metric(f"{OURS}saved_tokens_total") >= 704)
        with Server(checkpoints("llama"), tmp_path / "second.log", *flag) as server:
            # On a busy machine the daemon's first answer may come too late.
            assert wait_until(lambda: server.complete(LONG) == cold and server.metric(HITS) >= 640)
            assert server.metric(f"{OURS}saved_tokens_total") == 0, "all of it is what the first server stored"
            assert wait_until(lambda: server.metric(f"{OURS}loaded_tokens_total") == server.metric(HITS))
            hits = server.metric(f"{OURS}hits_total")
            assert hits == server.metric(HITS) / 640
            assert server.metric(f"{OURS}load_seconds_count") == server.metric(f"{OURS}loads_total") == hits
            assert server.metric(f"{OURS}load_bytes_total") > 0
            assert server.metric(f"{OURS}not_loaded_total", reason="not_cached") == 0
            no_cache_s = 0.0
            for salt in ("nobody else's", "nor this", "nor that"):
                began = time.monotonic()
                assert server.complete(LONG, cache_salt=salt) == cold
                no_cache_s = max(no_cache_s, time.monotonic() - began)
            assert wait_until(lambda: server.metric(f"{OURS}not_loaded_total") >= 3)
            assert server.metric(f"{OURS}not_loaded_total", reason="not_cached") > 0
            daemon.kill()
            for _ in range(3):
                began = time.monotonic()
                assert server.complete(LONG) == cold
                assert time.monotonic() - began <= 2 * no_cache_s + 1.0  # a busy machine is no metronome
            daemon = DaemonProcess(folder, host_bytes="64MiB")
            before = server.metric(HITS)
            assert wait_until(lambda: server.complete(LONG) == cold and server.metric(HITS) > before)
    finally:
        daemon.kill()
