"""Blocks cross engines: Transformers stores and vLLM loads, and the other way round, in bfloat16 on both sides.

Each engine's kernels round in their own way, so an engine that goes on from the other's KV is held against its own
prefill: by the tokens it says, and by how far its next-token distribution moved. Two prefills that round in bfloat16
independently differ by the sum of what each lost, whoever's KV they read, so on real text the bound is three times what
this model loses by itself.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from prefixcache_transformers.smollm2 import ensure_smollm2
from tests.e2e.processes import DaemonProcess
from tests.engines.conftest import Checkpoints
from tests.engines.test_vllm import BLOCK, prompt
from tests.engines.transformers_side import MAX_KL, TransformersSide
from tests.engines.vllm_engine import ROOT, Engine

SHARED, OWN = 10 * BLOCK, 60
SPOKEN = 16
SURE = {"llama": 4, "smollm2": 1}
"""Tokens that must be the same: those that lead the next best by more than rounding moves them (0.3 nats)."""
SEEDS = 106, 223


class Pair(NamedTuple):
    """Both engines over one checkpoint and one daemon, and two prompts, one for each to store."""

    kind: str
    vllm: Engine
    transformers: TransformersSide
    prompts: tuple[list[int], list[int]]


@pytest.fixture(scope="module", params=["llama", "smollm2"])
def pair(
    request: pytest.FixtureRequest,
    shared_daemon: DaemonProcess,
    checkpoints: Checkpoints,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    kind = str(request.param)
    folder = ensure_smollm2() if kind == "smollm2" else checkpoints(kind)
    prompts = _real_text(folder) if kind == "smollm2" else _random()
    address = f"unix://{shared_daemon.socket}"
    log = tmp_path_factory.mktemp(kind) / "log"
    settings = {"max_model_len": 2048, "max_logprobs": -1, "connector": {"ask_timeout_s": 5.0}}
    with (
        Engine(folder, address, log=log, **settings) as vllm,
        TransformersSide(folder, address) as transformers,
    ):
        yield Pair(kind, vllm, transformers, prompts)


def _random() -> tuple[list[int], list[int]]:
    one, other = (prompt(seed, SHARED + OWN) for seed in SEEDS)
    return one, other


def _real_text(folder: Path) -> tuple[list[int], list[int]]:
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(folder)((ROOT / "LICENSE").read_text())["input_ids"]
    return ids[: SHARED + OWN], ids[1 : SHARED + OWN + 1]


def _bound(pair: Pair, tokens: list[int]) -> float:
    if pair.kind != "smollm2":
        return MAX_KL
    lost = pair.transformers.rounding(tokens, SHARED)
    print(f"bfloat16 against float32: KL {lost:.1e}")
    return max(MAX_KL, 3 * lost)


def test_one_model_is_one_namespace(pair: Pair) -> None:
    assert pair.vllm.call("fingerprint") == pair.transformers.fingerprint


def test_vllm_reads_what_transformers_wrote(pair: Pair) -> None:
    written, _ = pair.prompts
    said, reused = pair.transformers.says(written, SPOKEN)
    assert reused == 0
    loaded = pair.vllm.one(written, max_tokens=SPOKEN)
    assert loaded.cached == SHARED, pair.vllm.call("counts")
    own = pair.vllm.one(written, max_tokens=SPOKEN, sampling={"skip_reading_prefix_cache": True})
    assert own.cached == 0
    sure = SURE[pair.kind]
    assert loaded.tokens[:sure] == own.tokens[:sure] == said[:sure]
    ends = range(SHARED + 1, len(written), OWN // 8)
    moved = pair.vllm.call("moved", prompts=[written[:end] for end in ends])
    assert moved["cached"] == SHARED
    print(f"vLLM reads {pair.kind} of Transformers: KL {moved['kl']:.1e}")
    assert moved["kl"] <= _bound(pair, written)


def test_transformers_reads_what_vllm_wrote(pair: Pair) -> None:
    _, written = pair.prompts
    said = pair.vllm.one(written, max_tokens=SPOKEN)
    assert said.cached == 0
    pair.vllm.call("settle")
    columns, kl = pair.transformers.moved(written)
    assert columns == SHARED
    print(f"Transformers reads {pair.kind} of vLLM: KL {kl:.1e}")
    assert kl <= _bound(pair, written)
    loaded, reused = pair.transformers.says(written, SPOKEN)
    assert reused == SHARED
    sure = SURE[pair.kind]
    assert loaded[:sure] == pair.transformers.says_alone(written, SPOKEN)[:sure] == said.tokens[:sure]


def test_another_dtype_finds_nothing(pair: Pair, shared_daemon: DaemonProcess) -> None:
    if pair.kind != "llama":
        pytest.skip("once is enough")
    written, _ = pair.prompts
    address = f"unix://{shared_daemon.socket}"
    with TransformersSide(Path(pair.transformers.model.config.name_or_path), address, torch.float32) as other:
        assert other.fingerprint != pair.transformers.fingerprint
        assert other.cache.lookup(torch.tensor([written])).columns == 0
