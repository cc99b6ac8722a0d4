"""Speculative decoding with the connector: the same tokens, and nothing of drafts or draft models in any block.

Transformers is the reference: what the speculating engine loads is Transformers' prefill, and what it stores is held
against that, rejected drafts included.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.processes import DaemonProcess
from tests.engines.conftest import Checkpoints
from tests.engines.test_vllm import prompt
from tests.engines.transformers_side import MAX_KL, TransformersSide
from tests.engines.vllm_engine import Engine

LOOKUP = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
DRAFTS = {"method": "draft_model", "num_speculative_tokens": 3}
SEEDS = {"ngram": 125, "draft_model": 224}
SURE = 4
"""Tokens after these prompts that lead the next best by more than rounding moves them (0.3 nats)."""


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_speculation(shared_daemon: DaemonProcess, checkpoints: Checkpoints, tmp_path: Path, method: str) -> None:
    if method == "draft_model" and find_spec("vllm.v1.spec_decode.draft_model") is None:
        pytest.skip("this vLLM has no draft models")
    folder, address = checkpoints("llama"), f"unix://{shared_daemon.socket}"
    speculation: dict[str, Any] = LOOKUP if method == "ngram" else DRAFTS | {"model": str(checkpoints("draft"))}
    written = prompt(SEEDS[method], 700)
    repeating = prompt(SEEDS[method] + 1, 300) * 2  # something to look up
    settings = {"speculative_config": speculation, "connector": {"ask_timeout_s": 5.0}}
    with (
        TransformersSide(folder, address) as transformers,
        Engine(folder, address, log=tmp_path / "log", **settings) as engine,
    ):
        said, _ = transformers.says(written)
        loaded = engine.one(written)
        assert loaded.cached == 640, engine.call("counts")
        own = engine.one(written, sampling={"skip_reading_prefix_cache": True})
        assert loaded.tokens[:SURE] == own.tokens[:SURE] == said[:SURE]
        answer = engine.one(repeating, max_tokens=200)
        engine.call("settle")
        counts = engine.call("counts")
        assert (counts["entries"], counts["pinned_bytes"]) == (0, 0)
        assert counts["reasons"].get("draft_model", 0) == (method == "draft_model")
        turn = repeating + answer.tokens
        columns, kl = transformers.moved([*turn, *prompt(45, 60)])
        assert columns == 768
        assert kl <= MAX_KL
