"""Speculative decoding with the connector: the same tokens, nothing of drafts in any block, and a draft model's KV in
the namespace of that model.

Transformers is the reference: what the speculating engine loads is Transformers' prefill, of the model and of the draft
model, and what it stores is held against that, rejected drafts included.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.processes import DaemonProcess
from tests.engines.conftest import Checkpoints
from tests.engines.test_vllm import prompt
from tests.engines.test_vllm_ranks import PAIR
from tests.engines.transformers_side import MAX_KL, TransformersSide
from tests.engines.vllm_engine import Engine

LOOKUP = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
DRAFTS = {"method": "draft_model", "num_speculative_tokens": 3}
SURE = 4
"""Tokens after these prompts that lead the next best by more than rounding moves them (0.3 nats)."""
ANSWER = 100
CONNECTOR = {"ask_timeout_s": 10.0}


def accepted(answer: dict[str, Any]) -> float:
    """The share of the proposals that the model would have said itself."""
    return float(answer["accepted"] / answer["proposed"])


def check_what_it_stores(engine: Engine, models: list[TransformersSide], written: list[int]) -> None:
    """Blocks of a prompt and its answer are each model's own KV."""
    turn = written + engine.one(written, max_tokens=200).tokens
    engine.call("settle")
    counts = engine.call("counts")
    assert (counts["entries"], counts["pinned_bytes"]) == (0, 0)
    for model in models:
        columns, kl = model.moved([*turn, *prompt(45, 60)])
        assert columns == 768
        assert kl <= MAX_KL


def test_lookup_in_the_prompt(shared_daemon: DaemonProcess, checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder, address, log = checkpoints("llama"), f"unix://{shared_daemon.socket}", tmp_path / "log"
    written = prompt(125, 700)
    with (
        TransformersSide(folder, address) as transformers,
        Engine(folder, address, log=log, speculative_config=LOOKUP, connector=CONNECTOR) as engine,
    ):
        said, _ = transformers.says(written)
        loaded = engine.one(written)
        assert loaded.cached == 640, engine.call("counts")
        own = engine.one(written, sampling={"skip_reading_prefix_cache": True})
        assert loaded.tokens[:SURE] == own.tokens[:SURE] == said[:SURE]
        check_what_it_stores(engine, [transformers], prompt(126, 300) * 2)  # something to look up
        counts = engine.call("counts")
        assert (counts["draft"], counts["without_draft"]) == ({}, {})


needs_draft_models = pytest.mark.skipif(
    find_spec("vllm.v1.spec_decode.draft_model") is None, reason="this vLLM has no draft models"
)


@needs_draft_models
def test_a_draft_model(shared_daemon: DaemonProcess, checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder, small, address = checkpoints("llama"), checkpoints("draft"), f"unix://{shared_daemon.socket}"
    settings = {"speculative_config": DRAFTS | {"model": str(small)}, "connector": CONNECTOR}
    written, other = prompt(224, 700), prompt(226, 700)
    with (
        TransformersSide(folder, address) as model,
        TransformersSide(small, address) as draft,
        Engine(folder, address, log=tmp_path / "log", **settings) as engine,
    ):

        def speculated(tokens: list[int], **more: Any) -> dict[str, Any]:
            answer: dict[str, Any] = engine.call("speculated", prompt=tokens, max_tokens=ANSWER, **more)
            engine.call("settle")
            return answer

        assert engine.call("fingerprint", draft=True) == draft.fingerprint != engine.call("fingerprint")
        said, _ = model.says(written)
        lacking = speculated(written)
        counts = engine.call("counts")["draft"]
        assert (lacking["cached"], counts["loaded_tokens"], counts["reasons"]) == (640, 0, {"not_cached": 1})
        assert not engine.call("stored", prompt=written, draft=True), "computed without what is in front of it"
        own = speculated(written, sampling={"skip_reading_prefix_cache": True})
        loaded = speculated(written)
        assert engine.call("counts")["draft"]["loaded_tokens"] == 640
        assert loaded["cached"] == 640
        for each in (lacking, own, loaded):
            assert each["tokens"][:SURE] == said[:SURE]
        assert accepted(loaded) >= 0.9 * accepted(own)
        assert accepted(lacking) <= 0.7 * accepted(own), "so the loaded blocks matter"

        # The small model's own blocks are of use, whoever stored them.
        model.says(other)
        draft.says(other)
        theirs = speculated(other)
        assert engine.call("counts")["draft"]["loaded_tokens"] == 1280
        assert accepted(theirs) >= 0.9 * accepted(speculated(other, sampling={"skip_reading_prefix_cache": True}))
        check_what_it_stores(engine, [model, draft], prompt(225, 300) * 2)
        assert engine.call("counts")["draft"]["known"] == 0


@needs_draft_models
def test_what_vllms_own_cache_holds_of_a_draft_model(
    shared_daemon: DaemonProcess, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """Pages whose prefix was loaded for the model alone come back from vLLM's own cache, which knows nothing of it."""
    folder, small, address = checkpoints("llama"), checkpoints("draft"), f"unix://{shared_daemon.socket}"
    settings = {"speculative_config": DRAFTS | {"model": str(small)}, "enable_prefix_caching": True}
    written = prompt(227, 700)
    longer = written + prompt(228, 220)
    with (
        TransformersSide(folder, address) as model,
        TransformersSide(small, address) as draft,
        Engine(folder, address, log=tmp_path / "log", connector=CONNECTOR, **settings) as engine,
    ):
        model.says(written)
        assert engine.one(written).cached == 640
        draft.says(written)
        assert engine.one(longer).cached > 640, "vLLM's own"
        engine.call("settle")
        stored = [len(engine.call("stored", prompt=longer, draft=which)) for which in (False, True)]
        assert stored == [14, 10], "the draft model computed the tail without what is in front of it"
        engine.one(longer, sampling={"skip_reading_prefix_cache": True})
        engine.call("settle")
        columns, kl = draft.moved([*longer, *prompt(45, 60)])
        assert columns == 896
        assert kl <= MAX_KL


@needs_draft_models
def test_a_draft_model_on_two_ranks(shared_daemon: DaemonProcess, checkpoints: Checkpoints, tmp_path: Path) -> None:
    small, written = checkpoints("draft"), prompt(901, 700)
    speculation = DRAFTS | {"model": str(small), "draft_tensor_parallel_size": 2}
    settings = PAIR | {"speculative_config": speculation, "connector": CONNECTOR}
    address = f"unix://{shared_daemon.socket}"
    with Engine(checkpoints("llama"), address, log=tmp_path / "log", **settings) as engine:
        own = engine.call("speculated", prompt=written, max_tokens=ANSWER)
        engine.call("settle_ranks")
        loaded = engine.call("speculated", prompt=written, max_tokens=ANSWER)
        assert (own["cached"], loaded["cached"]) == (0, 640)
        assert engine.call("counts")["draft"]["loaded_tokens"] == 640
        assert len(engine.call("stored", prompt=written, draft=True)) == 10
        assert loaded["tokens"] == own["tokens"]
        assert accepted(loaded) >= 0.9 * accepted(own) > 0
