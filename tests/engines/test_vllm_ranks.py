"""vLLM with two tensor-parallel ranks, or two stages of a pipeline, each a process on a core of its own: they load what
one process stored, and the other way round; and one of them is killed in the middle.

Everything is computed in float32: two ranks add up in another order than one, which in bfloat16 tips tokens over.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.e2e.processes import DaemonProcess, wait_until
from tests.e2e.test_daemon_process import stats_of
from tests.engines.conftest import Checkpoints
from tests.engines.test_vllm import prompt
from tests.engines.vllm_engine import Engine

LAYERS, HEADS, DIM, BLOCK = 3, 2, 64, 64
LONG, OTHER = prompt(1, 700), prompt(2, 700)
NEAR, MOST = 0.05, 0.98
PAIR: dict[str, Any] = {
    "tensor_parallel_size": 2, "distributed_executor_backend": "mp", "dtype": "float32",
    "environ": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
}  # fmt: skip
# A later stage's buffers are made in the warm-up, which vLLM's CPU worker leaves out in eager mode: the first step ends
# in an AssertionError, with any connector or none. So the model is traced once, and run as it is.
STAGES: dict[str, Any] = {
    **PAIR, "tensor_parallel_size": 1, "pipeline_parallel_size": 2,
    "enforce_eager": False, "compilation_config": {"mode": 2, "backend": "eager"},
}  # fmt: skip


@pytest.fixture(scope="module")
def alone(
    shared_daemon: DaemonProcess, checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """One rank."""
    log = tmp_path_factory.mktemp("alone") / "log"
    with Engine(checkpoints("llama"), f"unix://{shared_daemon.socket}", log=log, dtype="float32") as engine:
        yield engine


@pytest.fixture(scope="module")
def pair(
    shared_daemon: DaemonProcess, checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """Two ranks."""
    log = tmp_path_factory.mktemp("pair") / "log"
    with Engine(checkpoints("llama"), f"unix://{shared_daemon.socket}", log=log, **PAIR) as engine:
        yield engine


def blocks_of(engine: Engine, tokens: list[int], salt: str = "") -> npt.NDArray[np.float32]:
    """What the daemon has of a prompt: [block, head, layer, k or v, token, value]."""
    raw = engine.call("stored", prompt=tokens, salt=salt)
    shape = (HEADS, LAYERS, 2, BLOCK, DIM)
    return np.array([np.frombuffer(bytes.fromhex(each), np.float32).reshape(shape) for each in raw])


def counted(daemon: DaemonProcess, name: str, label: str = "") -> int:
    return sum(each.value for each in stats_of(daemon).counters if (each.name, each.label) == (name, label))


def test_two_ranks_read_what_one_stored(alone: Engine, pair: Engine) -> None:
    computed = alone.one(LONG)
    alone.call("settle")
    loaded = pair.one(LONG)
    assert (computed.cached, loaded.cached) == (0, 640)
    assert loaded.tokens == computed.tokens
    assert len(set(computed.tokens)) > 8, "a model that repeats itself proves nothing"


def test_one_reads_what_two_ranks_stored(alone: Engine, pair: Engine, shared_daemon: DaemonProcess) -> None:
    before = counted(shared_daemon, "blocks_stored")
    computed = pair.one(OTHER)
    pair.call("settle_ranks")
    assert counted(shared_daemon, "blocks_stored") == before + 11, "with the block that ends among the answer's tokens"
    loaded = alone.one(OTHER)
    assert (computed.cached, loaded.cached) == (0, 640)
    assert loaded.tokens == computed.tokens
    again = pair.one(OTHER)
    assert (again.cached, again.tokens) == (640, computed.tokens)


def test_two_ranks_store_the_bytes_that_one_stores(alone: Engine, pair: Engine) -> None:
    """Byte by byte where nothing was added up over ranks yet, which is the first layer; close to it behind that."""
    alone.one(OTHER, cache_salt="one")
    alone.call("settle")
    one, two = blocks_of(alone, OTHER, "one"), blocks_of(alone, OTHER)
    assert one.shape == two.shape
    assert np.array_equal(one[:10, :, 0], two[:10, :, 0])
    assert np.allclose(one[:10], two[:10], rtol=1e-3, atol=1e-3)
    assert not np.allclose(one[:10, 0], one[:10, 1], rtol=0.1, atol=0.1), "heads that are alike prove nothing"


def test_generated_tokens_are_stored_by_ranks_too(alone: Engine, pair: Engine) -> None:
    begin = prompt(3, 300)
    answer = pair.one(begin, max_tokens=100)
    pair.call("settle_ranks")
    turn = begin + answer.tokens + prompt(4, 50)
    loaded = alone.one(turn)
    assert loaded.cached == 384
    assert loaded.tokens == alone.one(turn, cache_salt="cold").tokens


def test_stages_of_a_pipeline_store_and_load(
    alone: Engine, shared_daemon: DaemonProcess, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """What one process stored, two stages read; and the other way round, byte by byte, as nothing is added up over
    stages."""
    alone.one(LONG)
    alone.call("settle")
    asked = prompt(8, 700)
    with Engine(checkpoints("llama"), f"unix://{shared_daemon.socket}", log=tmp_path / "log", **STAGES) as stages:
        loaded = stages.one(LONG)
        assert (loaded.cached, loaded.tokens) == (640, stages.one(LONG, cache_salt="cold").tokens)
        computed = stages.one(asked)
        stages.call("settle_ranks")
        again = stages.one(asked)
        assert (computed.cached, again.cached, again.tokens) == (0, 640, computed.tokens)
        stages.call("settle_ranks")
        counts = stages.call("counts")
        assert (counts["entries"], counts["pinned_bytes"], counts["engine_requests"]) == (0, 0, 0)
    read = alone.one(asked)
    assert (read.cached, read.tokens) == (640, computed.tokens)
    alone.one(asked, cache_salt="one")
    alone.call("settle")
    assert np.array_equal(blocks_of(alone, asked, "one")[:10], blocks_of(alone, asked)[:10])


def test_windows_of_two_ranks(shared_daemon: DaemonProcess, checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Layers with a window beside others without, in several KV cache groups, each split over two ranks."""
    folder, address = checkpoints("gemma3"), f"unix://{shared_daemon.socket}"
    forked = prompt(9, 700, like=LONG[:512])
    with Engine(folder, address, log=tmp_path / "one", dtype="float32") as one:
        computed = one.one(LONG)
        if not one.call("reports_failures"):
            assert one.call("reason_off") == "engine_cannot_report_failure"
            pytest.skip("this vLLM cannot be told which requests' loads failed (failed_recving)")
        one.call("settle")
        with Engine(folder, address, log=tmp_path / "two", **PAIR) as two:
            loaded = two.one(LONG)
            assert (loaded.cached, loaded.tokens) == (640, computed.tokens)
            other = two.one(OTHER)
            part = two.one(forked)
            assert (other.cached, part.cached) == (0, 512)
            two.call("settle_ranks")
            again = two.one(OTHER)
            assert (again.cached, again.tokens) == (640, other.tokens)
        loaded = one.one(OTHER)
        assert (loaded.cached, loaded.tokens) == (640, other.tokens)
        assert loaded.tokens == one.one(OTHER, cache_salt="cold").tokens
        assert part.tokens == one.one(forked, cache_salt="cold").tokens


def test_nothing_is_left_behind(alone: Engine, pair: Engine, shared_daemon: DaemonProcess) -> None:
    alone.call("settle")
    pair.call("settle_ranks")
    counts = pair.call("counts")
    assert (counts["entries"], counts["pinned_bytes"], counts["engine_requests"], counts["skipped"]) == (0, 0, 0, {})
    tier = stats_of(shared_daemon).tiers[0]
    assert (tier.filling_bytes, tier.quarantined_bytes, tier.leased_bytes) == (0, 0, 0)


@pytest.mark.parametrize("moment", ["store", "load"])
def test_a_rank_that_is_killed(
    moment: str, alone: Engine, shared_daemon: DaemonProcess, checkpoints: Checkpoints, tmp_path: Any
) -> None:
    """In mid-store, its bytes written and not committed; in mid-load, before its copy. vLLM ends with it."""
    known = prompt(6, 700)
    expected = alone.one(known)
    alone.call("settle")
    before = blocks_of(alone, known)
    asked = known if moment == "load" else prompt(7, 700)
    gone = counted(shared_daemon, "blocks_skipped", "worker_gone")
    with Engine(checkpoints("llama"), f"unix://{shared_daemon.socket}", log=tmp_path / "log", **PAIR) as engine:
        engine.call("kill_rank", rank=1, moment=moment)
        engine.tell("generate", prompts=[asked], max_tokens=16)
        if moment == "store":
            assert wait_until(lambda: counted(shared_daemon, "blocks_skipped", "worker_gone") > gone)
        else:
            assert wait_until(lambda: "died" in engine.log.read_text())
        engine.kill()

    def freed() -> bool:
        tier, tokens = stats_of(shared_daemon).tiers[0], stats_of(shared_daemon).tokens
        return not (tier.filling_bytes or tier.quarantined_bytes or tier.leased_bytes or tokens.pending)

    assert wait_until(freed)
    assert np.array_equal(blocks_of(alone, known), before)
    if moment == "store":
        assert not len(blocks_of(alone, asked)), "nothing of it is visible"
        expected = alone.one(asked, cache_salt="cold")
    again = alone.one(asked)
    assert (again.cached, again.tokens) == (640 if moment == "load" else 0, expected.tokens)


def test_two_ranks_and_one_share_int8(shared_daemon: DaemonProcess, checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Each rank codes its heads; what one rank goes on from is what it would have stored."""
    address, small = f"unix://{shared_daemon.socket}", {"connector": {"codec": "int8"}}
    with Engine(checkpoints("llama"), address, log=tmp_path / "pair", **PAIR, **small) as pair:
        computed = pair.one(LONG)
        pair.call("settle_ranks")
        again = pair.one(LONG)
        assert (computed.cached, again.cached) == (0, 640)
    with Engine(checkpoints("llama"), address, log=tmp_path / "alone", dtype="float32", **small) as alone:
        loaded = alone.one(LONG)
        together = alone.call("stored", prompt=LONG)
        assert loaded.cached == 640
        assert abs(loaded.logprobs[0] - computed.logprobs[0]) < NEAR
        alone.one(LONG, cache_salt="alone")
        alone.call("settle")
        by_itself = alone.call("stored", prompt=LONG, salt="alone")
    one, other = (
        np.array([np.frombuffer(bytes.fromhex(each), np.uint8) for each in of]) for of in (together, by_itself)
    )
    assert one.shape == other.shape
    assert np.mean(one == other) > MOST, "two ranks add up in another order than one, and codes may differ by one"
