"""The weights digest: the same for the same weights however they are stored, another for others."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.identity import weights as weights_module
from prefixcache.identity.digestcache import DigestCache
from prefixcache.identity.tensors import TensorFileError, TensorRecord
from prefixcache.identity.weights import digest_tensors, state_dict_digest, weights_digest

RANDOM = np.random.default_rng(7)
BIG = RANDOM.integers(0, 255, 100_000, dtype=np.uint8)


def state(**changes: Any) -> dict[str, Any]:
    tensors = {
        "model.embed_tokens.weight": np.arange(20_000, dtype=np.float32).reshape(100, 200),
        "model.layers.0.mlp.weight": BIG,
        "model.layers.0.norm.weight": np.ones(16, dtype=np.float16),
    }
    return {name: value for name, value in {**tensors, **changes}.items() if value is not None}


def save(folder: Path, tensors: dict[str, Any], name: str = "model.safetensors") -> None:
    pytest.importorskip("safetensors.numpy").save_file(tensors, folder / name)


def test_a_file_and_memory_give_the_same_digest(tmp_path: Path) -> None:
    save(tmp_path, state())
    assert weights_digest(tmp_path, cache=DigestCache(tmp_path / "cache")) == state_dict_digest(state())


def test_shards_give_the_same_digest_as_one_file(tmp_path: Path) -> None:
    names = list(state())
    for number, name in enumerate(names):
        save(tmp_path, {name: state()[name]}, f"part-{number}.safetensors")
    weight_map = ", ".join(f'"{name}": "part-{number}.safetensors"' for number, name in enumerate(names))
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"metadata": {{}}, "weight_map": {{{weight_map}}}}}')
    assert weights_digest(tmp_path, cache=DigestCache(tmp_path / "cache")) == state_dict_digest(state())


@pytest.mark.slow
def test_a_loaded_model_gives_the_digest_of_its_files(tmp_path: Path) -> None:
    """Tied weights: safetensors leaves lm_head out, a state dict does not."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    for tied in (True, False):
        config = transformers.LlamaConfig(
            hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
            vocab_size=300, tie_word_embeddings=tied,
        )  # fmt: skip
        torch.manual_seed(1)
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        folder = tmp_path / str(tied)
        model.save_pretrained(folder)
        digest = weights_digest(folder, cache=DigestCache(tmp_path / "cache"))
        assert digest == state_dict_digest(model.state_dict())
        reloaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        assert digest == state_dict_digest(reloaded.state_dict())


def test_only_an_output_head_may_be_left_out() -> None:
    embedding = state()["model.embed_tokens.weight"]
    assert state_dict_digest(state(**{"lm_head.weight": embedding})) == state_dict_digest(state())
    assert state_dict_digest(state(**{"lm_head.weight": embedding + 1})) != state_dict_digest(state())
    assert state_dict_digest(state(**{"lm_head.weight": embedding.reshape(-1)})) != state_dict_digest(state())
    assert state_dict_digest(state(**{"model.copy.weight": embedding})) != state_dict_digest(state())
    assert state_dict_digest(state(**{"layers.0.output.weight": embedding})) != state_dict_digest(state())


def test_rotary_frequencies_take_no_part() -> None:
    with_buffer = state(**{"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4)})
    assert state_dict_digest(with_buffer) == state_dict_digest(state())


@pytest.mark.parametrize(
    "changes",
    [
        {"model.layers.0.norm.weight": np.ones(17, dtype=np.float16)},
        {"model.layers.0.norm.weight": np.ones((4, 4), dtype=np.float16)},
        {"model.layers.0.norm.weight": np.ones(8, dtype=np.float32)},
        {"model.layers.0.norm.weight": None},
        {"model.layers.0.norm.weight": None, "model.layers.1.norm.weight": np.ones(16, dtype=np.float16)},
        {"model.layers.1.norm.weight": np.ones(16, dtype=np.float16)},
    ],
    ids=["size", "shape", "dtype", "missing", "name", "one more"],
)
def test_other_weights_have_another_digest(changes: dict[str, Any]) -> None:
    assert state_dict_digest(state(**changes)) != state_dict_digest(state())


@pytest.mark.parametrize(
    ("place", "seen"), [(0, True), (4095, True), (47_952, True), (52_000, True), (99_999, True), (20_000, False)]
)
def test_start_middle_and_end_are_sampled(place: int, seen: bool) -> None:
    changed = BIG.copy()
    changed[place] ^= 1
    other = state_dict_digest(state(**{"model.layers.0.mlp.weight": changed}))
    assert (other != state_dict_digest(state())) is seen


@given(
    contents=st.dictionaries(st.text("abé鍵", min_size=1, max_size=3), st.binary(max_size=40), min_size=1, max_size=6),
    shuffle=st.randoms(use_true_random=False),
)
def test_the_order_of_the_source_does_not_matter(contents: dict[str, bytes], shuffle: Any) -> None:
    def record(name: str) -> TensorRecord:
        data = contents[name]
        return TensorRecord(name, "uint8", (len(data),), len(data), lambda offset, size: data[offset : offset + size])

    names = list(contents)
    shuffle.shuffle(names)
    assert digest_tensors(map(record, names)) == digest_tensors(map(record, contents))


def test_nothing_and_twice_are_refused() -> None:
    with pytest.raises(ValueError, match="no tensors"):
        digest_tensors([])
    record = TensorRecord("a", "uint8", (1,), 1, lambda offset, size: b"x")
    with pytest.raises(ValueError, match="twice"):
        digest_tensors([record, record])


def test_a_second_look_reads_no_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, state())
    os.utime(tmp_path / "model.safetensors", (1_000_000, 1_000_000))
    cache = DigestCache(tmp_path / "cache.json")
    digest = weights_digest(tmp_path, cache=cache)

    def refuse(*_: object) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr(weights_module, "digest_tensors", refuse)
    assert weights_digest(tmp_path, cache=cache) == digest
    os.utime(tmp_path / "model.safetensors", (1_000_000, 1_000_001))
    with pytest.raises(AssertionError, match="read again"):
        weights_digest(tmp_path, cache=cache)


def test_a_broken_file_has_no_digest(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(TensorFileError):
        weights_digest(tmp_path, cache=DigestCache(tmp_path / "cache"))
    with pytest.raises(OSError, match="missing"):
        weights_digest(tmp_path / "missing", cache=DigestCache(tmp_path / "cache"))
