"""Blocks cross engines: Transformers stores and vLLM loads, and the other way round, in the same dtype on both sides.

Each engine's kernels round in their own way, so an engine that goes on from the other's KV is held against its own
prefill: by the tokens it says, and by how far its next-token distributions moved, in the mean over texts and tokens.
Rounding moves them; what is systematic would move them in every dtype, so they are held tightest where rounding is
finest.
"""

from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import pytest
import torch

from prefixcache_transformers.smollm2 import ensure_smollm2
from tests.e2e.processes import DaemonProcess
from tests.engines.conftest import Checkpoints
from tests.engines.test_vllm import BLOCK, prompt
from tests.engines.texts import token_ids
from tests.engines.transformers_side import MAX_KL, TransformersSide
from tests.engines.vllm_engine import Engine

SHARED, OWN = 10 * BLOCK, 60
SPOKEN = 16
SEEDS = 106, 223


class Kind(NamedTuple):
    """A model and a dtype. `max_kl`: what its mean divergence must not be above; `sure`: how many tokens must be the
    same, those that lead the next best by more than rounding moves them; `texts`: how many are read each way."""

    model: str
    dtype: str
    max_kl: float
    sure: int
    texts: int
    codec: str = "raw"


KINDS = (
    Kind("llama", "bfloat16", MAX_KL, 4, 6),
    Kind("llama", "float16", MAX_KL / 10, 4, 6),
    # Its own KV, computed with another of Transformers' attention kernels, moves it by as much (docs/transformers.md).
    Kind("smollm2", "bfloat16", 3 * MAX_KL, 1, 7),
    # Where next to nothing is rounded: whatever blocks lost on their way (float16 costs 3e-5) would show.
    Kind("smollm2", "float32", MAX_KL / 1e6, 4, 2),
    # What the codec itself may move it by.
    Kind("smollm2", "float32", MAX_KL / 10, 4, 2, "int8"),
)


class Pair(NamedTuple):
    """Both engines over one checkpoint and one daemon, and texts for each to store."""

    kind: Kind
    address: str
    vllm: Engine
    transformers: TransformersSide
    for_transformers: list[list[int]]
    for_vllm: list[list[int]]


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: f"{kind.model}-{kind.dtype}-{kind.codec}")
def pair(
    request: pytest.FixtureRequest,
    checkpoints: Checkpoints,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    # A daemon of its own: of the first blocks stored in one that is full of another kind's not all stay.
    kind: Kind = request.param
    daemon = DaemonProcess(tmp_path_factory.mktemp("daemon"), host_bytes="256MiB")
    folder = ensure_smollm2() if kind.model == "smollm2" else checkpoints(kind.model)
    address = f"unix://{daemon.socket}"
    log = tmp_path_factory.mktemp(kind.model) / "log"
    settings = {"max_model_len": 2048, "dtype": kind.dtype, "connector": {"ask_timeout_s": 5.0, "codec": kind.codec}}
    try:
        with (
            Engine(folder, address, log=log, **settings) as vllm,
            TransformersSide(folder, address, getattr(torch, kind.dtype), kind.codec) as transformers,
        ):
            yield Pair(kind, address, vllm, transformers, *_texts(kind, folder))
    finally:
        daemon.kill()


def _texts(kind: Kind, folder: Path) -> tuple[list[list[int]], list[list[int]]]:
    """For each engine as many; none begins like another."""
    count = SHARED + OWN
    if kind.model == "smollm2":
        ids = token_ids(folder, count + 1)[: kind.texts]
        return [each[:-1] for each in ids], [each[1:] for each in ids]
    one, other = ([prompt(seed + each, count) for each in range(kind.texts)] for seed in SEEDS)
    return one, other


def held(pair: Pair, reader: str, kls: list[float]) -> None:
    """The mean is within its bound."""
    print(f"{reader}, {pair.kind.model} {pair.kind.dtype}: KL {mean(kls):.1e}, of {min(kls):.1e} to {max(kls):.1e}")
    assert mean(kls) <= pair.kind.max_kl


def test_one_model_is_one_namespace(pair: Pair) -> None:
    assert pair.vllm.call("fingerprint") == pair.transformers.fingerprint


def test_vllm_reads_what_transformers_wrote(pair: Pair) -> None:
    prompts = pair.for_transformers
    for each in prompts:
        assert pair.transformers.write(each[:SHARED]) == 0
    moved = pair.vllm.call("moved", prompts=prompts, start=SHARED)
    assert moved["cached"] == [SHARED] * len(prompts), pair.vllm.call("counts")
    held(pair, "vLLM reads Transformers'", moved["kl"])


def test_transformers_reads_what_vllm_wrote(pair: Pair) -> None:
    prompts = pair.for_vllm
    for each in prompts:
        assert pair.vllm.one(each[:SHARED], max_tokens=1).cached == 0
    pair.vllm.call("settle")
    found = [pair.transformers.moved(each) for each in prompts]
    assert [columns for columns, _ in found] == [SHARED] * len(prompts)
    held(pair, "Transformers reads vLLM's", [kl for _, kl in found])


def test_they_say_the_same(pair: Pair) -> None:
    """Each after a text that the other stored above."""
    sure, transformers, vllm = pair.kind.sure, pair.transformers, pair.vllm
    of_vllm, of_transformers = pair.for_vllm[0], pair.for_transformers[0]
    loaded, reused = transformers.says(of_vllm, SPOKEN)
    own = vllm.one(of_vllm, max_tokens=SPOKEN, sampling={"skip_reading_prefix_cache": True})
    assert (reused, own.cached) == (SHARED, 0)
    assert loaded[:sure] == transformers.says_alone(of_vllm, SPOKEN)[:sure] == own.tokens[:sure]
    ours = vllm.one(of_transformers, max_tokens=SPOKEN)
    own = vllm.one(of_transformers, max_tokens=SPOKEN, sampling={"skip_reading_prefix_cache": True})
    assert (ours.cached, own.cached) == (SHARED, 0)
    assert ours.tokens[:sure] == transformers.says_alone(of_transformers, SPOKEN)[:sure] == own.tokens[:sure]


def test_another_dtype_finds_nothing(pair: Pair) -> None:
    if pair.kind.model != "llama":
        pytest.skip("once is enough")
    with TransformersSide(Path(pair.transformers.model.config.name_or_path), pair.address, torch.float32) as other:
        assert other.fingerprint != pair.transformers.fingerprint
        assert other.cache.lookup(torch.tensor([pair.for_vllm[0]])).columns == 0
