"""Other forms of KV in vLLM: windows beside full attention, half precision, quantised KV; each engine cold, then from
the daemon."""

from pathlib import Path

import pytest

from tests.e2e.processes import DaemonProcess
from tests.engines.conftest import Checkpoints
from tests.engines.test_vllm import prompt
from tests.engines.vllm_engine import Engine

LONG = prompt(1, 700)
FORKED = prompt(2, 700, like=LONG[:512])
NEAR = 0.05
"""Nats."""


def test_sliding_windows(shared_daemon: DaemonProcess, checkpoints: Checkpoints, tmp_path: Path) -> None:
    address = f"unix://{shared_daemon.socket}"
    chunked = {"max_num_batched_tokens": 256}
    with Engine(checkpoints("gemma3"), address, log=tmp_path / "first", **chunked) as engine:
        cold = engine.one(LONG)
        if not engine.call("reports_failures"):
            assert engine.call("reason_off") == "engine_cannot_report_failure"
            assert engine.one(LONG).cached == 0
            pytest.skip("this vLLM cannot be told which requests' loads failed (failed_recving)")
        forked_cold = engine.one(FORKED, cache_salt="cold")
        engine.call("settle")
        again = engine.one(LONG)
        assert (again.tokens, again.cached) == (cold.tokens, 640)
        begin = prompt(3, 300)
        answer = engine.one(begin, max_tokens=200)  # longer than the window: its blocks are saved as it runs
        engine.call("settle")
        turn = begin + answer.tokens + prompt(4, 50)
        expected = engine.one(turn, cache_salt="cold")
        counts = engine.call("counts")
        assert (counts["entries"], counts["engine_requests"]) == (0, 0)
    with Engine(
        checkpoints("gemma3"), address, log=tmp_path / "second", enable_prefix_caching=True, block_size=64
    ) as engine:
        loaded = engine.one(LONG)
        assert (loaded.tokens, loaded.cached) == (cold.tokens, 640)
        # vLLM alone keeps windows only at the end of a prompt; every block is stored here, so a fork is found as well.
        forked = engine.one(FORKED)
        assert forked.tokens == forked_cold.tokens
        assert forked.cached >= 512
        follow = engine.one(turn)
        assert (follow.tokens, follow.cached) == (expected.tokens, 448)
        assert engine.call("forget_own_cache")
        broken = engine.call("break_loads", prompt=LONG, max_tokens=16)
        assert broken["tokens"] == cold.tokens
        assert engine.call("counts")["reasons"]["load_failed"] == 1


@pytest.mark.parametrize(
    "form",
    [{"dtype": "float16"}, {"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "fp8_e5m2"}],
    ids=lambda form: next(iter(form.values())),
)
def test_other_numbers(
    shared_daemon: DaemonProcess, checkpoints: Checkpoints, tmp_path: Path, form: dict[str, str]
) -> None:
    """Same tokens as computed, and bit for bit what vLLM says with the prefix in its own cache: 640 tokens too."""
    if "kv_cache_dtype" in form and not {"avx512f", "amx_tile"} & set(Path("/proc/cpuinfo").read_text().split()):
        pytest.skip("vLLM keeps no fp8 on a CPU without AVX-512 or AMX")
    own_cache = {"enable_prefix_caching": True, "block_size": 128}
    with Engine(
        checkpoints("llama"), f"unix://{shared_daemon.socket}", log=tmp_path / "log", **own_cache, **form
    ) as engine:
        cold = engine.one(LONG)
        assert cold.cached == 0
        assert len(set(cold.tokens)) > 8, "a model that repeats itself proves nothing"
        engine.call("settle")
        own = engine.one(LONG)
        assert engine.call("counts")["loaded_tokens"] == 0
        engine.call("settle")  # vLLM forgets nothing while pages are kept for their saves
        assert engine.call("forget_own_cache")
        loaded = engine.one(LONG)
        assert engine.call("counts")["loaded_tokens"] == 640
        assert (own.tokens, own.cached) == (cold.tokens, 640)
        assert (loaded.tokens, loaded.cached) == (cold.tokens, 640)
        assert loaded.logprobs == own.logprobs


def test_smaller_forms_of_numbers(shared_daemon: DaemonProcess, checkpoints: Checkpoints, tmp_path: Path) -> None:
    """int8 loses a little: every token's log-probability stays near, also where blocks are loaded from their middle on
    and where windows are copied before they are coded. Nothing is shared with those that keep all bits."""
    address, small = f"unix://{shared_daemon.socket}", {"codec": "int8"}
    settings = {"max_num_batched_tokens": 256, "block_size": 32}
    with Engine(checkpoints("gemma3"), address, log=tmp_path / "log", connector=small, **settings) as engine:
        if not engine.call("reports_failures"):
            pytest.skip("this vLLM cannot be told which requests' loads failed (failed_recving)")
        cold, forked = engine.one(LONG), engine.one(FORKED, cache_salt="cold")
        assert cold.cached == 0, "whatever others have stored"
        engine.call("settle")
        for computed, prompt_, cached in ((cold, LONG, 640), (forked, FORKED, 512)):
            loaded = engine.one(prompt_)
            assert loaded.cached == cached
            assert loaded.tokens[0] == computed.tokens[0]
            assert abs(loaded.logprobs[0] - computed.logprobs[0]) < NEAR
        assert set(engine.call("counts")["reasons"]) == {"not_cached"}, "of the first runs"
