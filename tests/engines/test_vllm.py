"""vLLM with the connector: what one engine stored, another process with other pages loads, and says the same."""

import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from prefixcache.identity.keys import block_keys
from tests.e2e.processes import DaemonProcess
from tests.engines.conftest import Checkpoints
from tests.engines.vllm_engine import Engine, Output

BLOCK = 64
PATIENT = {"ask_timeout_s": 5.0}  # a busy machine takes longer than the default, after which the engine computes


def prompt(seed: int, tokens: int, *, like: Sequence[int] = ()) -> list[int]:
    """Token ids that follow `like`."""
    generator = random.Random(seed)
    return [*like, *(generator.randrange(10, 4000) for _ in range(tokens - len(like)))]


LONG = prompt(1, 700)
FORKED = prompt(2, 700, like=LONG[:512])


@pytest.fixture(scope="module")
def first(
    shared_daemon: DaemonProcess, checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """The engine that computes and stores: pages of 32 tokens, prompts in chunks, little room, no cache of its own."""
    log = tmp_path_factory.mktemp("first") / "log"
    settings = {"max_num_batched_tokens": 256, "num_gpu_blocks_override": 70, "max_model_len": 2048}
    address = f"unix://{shared_daemon.socket}"
    with Engine(checkpoints("llama"), address, log=log, connector=PATIENT, **settings) as engine:
        yield engine


@pytest.fixture(scope="module")
def cold(first: Engine) -> Output:
    """The first run of LONG: computed."""
    output = first.one(LONG)
    first.call("settle")
    return output


@pytest.fixture(scope="module")
def second(
    cold: Output, shared_daemon: DaemonProcess, checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """Another process, with pages of 128 tokens and vLLM's own prefix cache."""
    log = tmp_path_factory.mktemp("second") / "log"
    events = {"enable_kv_cache_events": True, "publisher": "null"}
    settings = {"enable_prefix_caching": True, "block_size": 128, "kv_events_config": events}
    address = f"unix://{shared_daemon.socket}"
    with Engine(checkpoints("llama"), address, log=log, connector=PATIENT, **settings) as engine:
        yield engine


def test_first_run_computes(cold: Output) -> None:
    assert cold.cached == 0
    assert len(set(cold.tokens)) > 8, "a model that repeats itself proves nothing"


def test_same_engine_loads_what_it_stored(first: Engine, cold: Output) -> None:
    again = first.one(LONG)
    assert (again.tokens, again.cached) == (cold.tokens, 640)


def test_a_prompt_that_shares_a_part(first: Engine, cold: Output) -> None:
    loaded = first.one(FORKED)
    assert loaded.cached == 512
    assert loaded.tokens == first.one(FORKED, cache_salt="nobody else's").tokens


def test_salt_separates(first: Engine, cold: Output) -> None:
    salted = first.one(LONG, cache_salt="another")
    assert (salted.cached, salted.tokens) == (0, cold.tokens)


def test_what_a_token_costs_is_learnt_from_steps(first: Engine, cold: Output) -> None:
    for seed in range(70, 74):
        first.one(prompt(seed, 1000), max_tokens=1)
    began = time.monotonic()
    first.one(prompt(75, 1000), max_tokens=1)
    took_s = time.monotonic() - began
    assert 0.2 < 1000 * first.call("counts")["s_per_token"] / took_s < 1.5


def test_fresh_process_with_other_pages(second: Engine, cold: Output) -> None:
    loaded = second.one(LONG)
    assert (loaded.tokens, loaded.cached) == (cold.tokens, 640)
    # The oracle: vLLM's own prefix cache, the same shapes and so the same roundings.
    own = second.one(LONG)
    assert own.cached == 640
    assert own.logprobs == loaded.logprobs


def test_two_ranks_read_what_one_stored(
    cold: Output, shared_daemon: DaemonProcess, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    bound = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    with Engine(
        checkpoints("llama"), f"unix://{shared_daemon.socket}", log=tmp_path / "log", environ=bound, **ranks
    ) as engine:
        loaded = engine.one(LONG)
        assert loaded.cached == 640
        # Two ranks add up in another order than one, so a later token may tip over; heads in the wrong place would
        # change the first.
        computed = engine.one(LONG, cache_salt="cold")
        assert loaded.tokens[:4] == computed.tokens[:4]
        assert abs(loaded.logprobs[0] - computed.logprobs[0]) < 0.05


def test_stored_blocks_are_announced(second: Engine) -> None:
    told = prompt(9, 200)
    (event,) = second.call("announced", prompt=told)
    keys = block_keys(bytes.fromhex(second.call("root")), told, BLOCK)
    assert "".join(event["hashes"]) == keys.hex()
    assert (event["tokens"], event["block_size"], event["parent"]) == (told[:192], BLOCK, "")


def test_blocks_that_the_daemon_dropped_are_taken_back(checkpoints: Checkpoints, tmp_path: Path) -> None:
    (tmp_path / "daemon").mkdir()
    daemon = DaemonProcess(tmp_path / "daemon", host_bytes="64MiB")
    events = {"enable_kv_cache_events": True, "publisher": "null"}
    try:
        address = f"unix://{daemon.socket}"
        with Engine(checkpoints("llama"), address, log=tmp_path / "log", kv_events_config=events) as engine:
            (event,) = engine.call("announced", prompt=prompt(9, 200))
            assert set(engine.call("withdrawn")) >= set(event["hashes"])
    finally:
        daemon.kill()


def test_generated_tokens_are_stored_too(first: Engine, second: Engine) -> None:
    begin = prompt(3, 300)
    answer = first.one(begin, max_tokens=100)
    first.call("settle")
    turn = begin + answer.tokens + prompt(4, 50)
    loaded = second.one(turn)
    assert loaded.cached == 384
    assert loaded.tokens == first.one(turn, cache_salt="cold").tokens


def test_aborted_at_any_moment(first: Engine, cold: Output) -> None:
    first.call("settle")
    free = first.call("counts")["free_blocks"]
    for steps in range(9):
        first.call("abort_after", prompt=LONG, steps=steps, name=f"known {steps}")
        first.call("abort_after", prompt=prompt(100 + steps, 500), steps=steps, name=f"new {steps}")
    first.call("settle")
    counts = first.call("counts")
    assert (counts["free_blocks"], counts["entries"], counts["pinned_bytes"]) == (free, 0, 0)
    assert first.one(LONG).tokens == cold.tokens


def test_a_load_that_failed_is_computed(second: Engine, cold: Output) -> None:
    other = prompt(6, 700)
    expected = second.one(other, cache_salt="cold")
    second.one(other)
    second.call("settle")
    assert second.call("forget_own_cache")
    broken = Output(**second.call("break_loads", prompt=other, max_tokens=16))
    assert (broken.tokens, broken.finish_reason) == (expected.tokens, "length")
    assert second.call("counts")["reasons"]["load_failed"] >= 1


def test_preempted_requests_store_no_wrong_byte(first: Engine) -> None:
    prompts = [prompt(20 + i, 500) for i in range(4)]
    done = first.call("crowd", prompts=prompts, max_tokens=150)
    assert done["whole"] == len(prompts)
    assert done["preempted"] > 0
    first.call("settle")
    for each in prompts:
        loaded = first.one(each)
        assert loaded.cached == 448, first.call("counts")
        assert loaded.tokens == first.one(each, cache_salt="cold").tokens


def test_others_preempted_while_one_loads(first: Engine) -> None:
    prompts = [prompt(40 + i, 500) for i in range(4)]
    for each in prompts:
        first.one(each)
    first.call("settle")
    done = first.call("crowd_that_loads", prompts=prompts * 2, max_tokens=250)
    assert done["whole"] == 2 * len(prompts)
    assert done["while_loading"] > 0
    first.call("settle")
    for each in prompts:
        loaded = first.one(each)
        assert loaded.cached == 448, first.call("counts")
        assert loaded.tokens == first.one(each, cache_salt="cold").tokens


def test_the_scheduler_never_waits_for_the_daemon(first: Engine) -> None:
    # As many steps as fit into the time after which the engine would be told to compute.
    seen = first.call("ask_of_a_silent_daemon", prompt=prompt(60, 500), steps=8)
    assert seen["tokens"] >= 7
    assert seen["told_later"] >= 1


def test_a_prompt_that_is_all_there(first: Engine) -> None:
    whole = prompt(7, 640)
    computed = first.one(whole)
    first.call("settle")
    loaded = first.one(whole)
    assert loaded.tokens == computed.tokens
    assert loaded.cached >= 639


def test_changed_weights_find_nothing_of_before(first: Engine, cold: Output) -> None:
    first.call("settle")  # vLLM resets nothing while blocks are kept for their saves
    assert first.call("change_weights", factor=1.5)
    changed = first.one(LONG)
    assert changed.cached == 0
    assert changed.tokens != cold.tokens
    first.call("settle")
    assert first.one(LONG).cached == 640, "and the new weights' own blocks are shared again"


def test_nothing_is_left_behind(first: Engine, second: Engine) -> None:
    for engine in (first, second):
        engine.call("settle")
        counts = engine.call("counts")
        assert (counts["entries"], counts["pinned_bytes"], counts["engine_requests"]) == (0, 0, 0)
        assert not counts["skipped"]


def test_log_says_nothing_is_off(first: Engine) -> None:
    assert "prefixcache is off" not in Path(first.log).read_text()
