"""The identity of an engine from vLLM's config objects, and what switches the cache off."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from prefixcache.identity.model import namespace_from_hf
from prefixcache.identity.weights import weights_digest
from prefixcache_client import Namespace
from prefixcache_vllm.identity import CannotShareError, engine_identity, in_new_epoch, layer_index
from prefixcache_vllm.options import Options

CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rope_theta": 10000.0, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "max_position_embeddings": 512,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file({"model.weight": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def config_of(folder: Path, **changes: Any) -> Any:
    """A VllmConfig; `changes` by dotted name."""
    made = SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(folder), model_weights="", served_model_name="tiny", hf_config=dict(CONFIG), dtype=torch.bfloat16,
            max_model_len=512, quantization=None, revision=None,
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", calculate_kv_scales=False),
        load_config=SimpleNamespace(load_format="auto"),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
    )  # fmt: skip
    for name, value in changes.items():
        owner, field = name.split("__")
        setattr(getattr(made, owner), field, value)
    return made


def kv_config(heads: int = 2, size: int = 16, dtype: torch.dtype = torch.bfloat16, layers: int = 2) -> Any:
    spec = SimpleNamespace(block_size=32, num_kv_heads=heads, head_size=size, dtype=dtype)
    names = [f"model.layers.{i}.self_attn.attn" for i in range(layers)]
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=names, kv_cache_spec=spec)])


def test_is_the_checkpoints_own(folder: Path) -> None:
    engine = engine_identity(config_of(folder), kv_config(), Options())
    expected = namespace_from_hf(CONFIG, weights_digest(folder), "bfloat16", compute_dtype="bfloat16").identity
    assert engine.identity.fingerprint() == expected.fingerprint()
    assert engine.groups[0].page_tokens == 32
    assert sorted(engine.groups[0].layers.values()) == [0, 1]
    assert not engine.hybrid


def test_engine_settings_that_change_the_bytes(folder: Path) -> None:
    def print_of(spec: Any = None, **changes: Any) -> bytes:
        return engine_identity(config_of(folder, **changes), spec or kv_config(), Options()).identity.fingerprint()

    prints = [
        print_of(),
        print_of(kv_config(dtype=torch.uint8), cache_config__cache_dtype="fp8"),
        print_of(kv_config(dtype=torch.uint8), cache_config__cache_dtype="fp8_e5m2"),
        print_of(kv_config(dtype=torch.float16), model_config__dtype=torch.float16),
        print_of(model_config__quantization="fp8"),
        print_of(model_config__hf_config=CONFIG | {"rope_theta": 5e5}),
    ]
    assert len(set(prints)) == len(prints)
    assert print_of(model_config__served_model_name="another") == prints[0], "a name is no identity"


@pytest.mark.parametrize(
    ("changes", "spec", "reason"),
    [
        ({"load_config__load_format": "dummy"}, {}, "weights_unknown"),
        ({"cache_config__cache_dtype": "fp8_inc"}, {}, "kv_dtype_unknown"),
        ({"cache_config__calculate_kv_scales": True}, {}, "dynamic_scales"),
        ({"parallel_config__decode_context_parallel_size": 2}, {}, "decode_context_parallel"),
        ({}, {"heads": 4}, "layout_mismatch"),
        ({}, {"size": 32}, "layout_mismatch"),
        ({}, {"dtype": torch.uint8}, "layout_mismatch"),
        ({}, {"layers": 1}, "layout_mismatch"),
        ({}, {"layers": 0}, "no_kv_cache"),
    ],
)
def test_switched_off(folder: Path, changes: dict[str, Any], spec: dict[str, Any], reason: str) -> None:
    with pytest.raises(CannotShareError) as error:
        engine_identity(config_of(folder, **changes), kv_config(**spec), Options())
    assert error.value.reason == reason


def test_without_weights(tmp_path: Path) -> None:
    with pytest.raises(CannotShareError) as error:
        engine_identity(config_of(tmp_path), kv_config(), Options())
    assert error.value.reason == "weights_unknown"


def test_layers_that_keep_something_else(folder: Path) -> None:
    config = kv_config()
    config.kv_cache_groups[0].kv_cache_spec = SimpleNamespace(block_size=32, shapes=())
    with pytest.raises(CannotShareError) as error:
        engine_identity(config_of(folder), config, Options())
    assert error.value.reason == "layer_unknown"


def test_draft_models_take_no_part(folder: Path) -> None:
    alone = engine_identity(config_of(folder), kv_config(), Options())
    assert alone.draft_layers == 0
    # A draft model in one group with the model, as alike as can be; then one numbered behind it, in a group of its own.
    config = kv_config()
    config.kv_cache_groups[0].layer_names += [f"draft_model.model.layers.{i}.self_attn.attn" for i in range(2)]
    engine = engine_identity(config_of(folder), config, Options())
    assert (engine.identity, engine.draft_layers) == (alone.identity, 2)
    assert engine.groups == alone.groups
    config = kv_config()
    spec = SimpleNamespace(block_size=32, num_kv_heads=1, head_size=32, dtype=torch.bfloat16)
    config.kv_cache_groups.append(SimpleNamespace(layer_names=["model.layers.2.self_attn.attn"], kv_cache_spec=spec))
    engine = engine_identity(config_of(folder), config, Options())
    assert (engine.identity, engine.draft_layers) == (alone.identity, 1)
    assert [len(group.layers) for group in engine.groups] == [2, 0]


def test_layers_that_cannot_be_told_apart(folder: Path) -> None:
    config = kv_config()
    config.kv_cache_groups[0].layer_names.append("another.layers.1.self_attn.attn")
    with pytest.raises(CannotShareError) as error:
        engine_identity(config_of(folder), config, Options())
    assert error.value.reason == "layer_ambiguous"


def test_ranks_keep_their_heads(folder: Path) -> None:
    config = config_of(folder, parallel_config__tensor_parallel_size=2)
    one = engine_identity(config_of(folder), kv_config(), Options())
    two = engine_identity(config, kv_config(heads=1), Options())
    assert two.identity == one.identity
    assert two.loads_in_step(Options(load="sync"))


def test_stages_have_some_of_the_layers(folder: Path) -> None:
    config = config_of(folder, parallel_config__pipeline_parallel_size=2)
    one = engine_identity(config_of(folder), kv_config(), Options())
    stage = engine_identity(config, kv_config(layers=1), Options())
    assert stage.identity == one.identity
    assert list(stage.groups[0].layers.values()) == [0]


def test_stages_of_several_groups(folder: Path) -> None:
    several = kv_config()
    several.kv_cache_groups.append(several.kv_cache_groups[0])
    with pytest.raises(CannotShareError) as error:
        engine_identity(config_of(folder, parallel_config__pipeline_parallel_size=2), several, Options())
    assert error.value.reason == "pipeline_parallel"


@pytest.mark.parametrize(("heads", "ranks"), [(2, 3), (6, 4), (2, 5)])
def test_heads_that_ranks_cannot_split(folder: Path, heads: int, ranks: int) -> None:
    config = config_of(folder, parallel_config__tensor_parallel_size=ranks)
    config.model_config.hf_config |= {"num_attention_heads": 2 * heads, "num_key_value_heads": heads}
    with pytest.raises(CannotShareError) as error:
        engine_identity(config, kv_config(heads=max(1, heads // ranks)), Options())
    assert error.value.reason == "kv_heads_not_divisible"


def test_ranks_that_have_the_same_head(folder: Path) -> None:
    config = config_of(folder, parallel_config__tensor_parallel_size=4)
    one = engine_identity(config_of(folder), kv_config(), Options())
    several = engine_identity(config, kv_config(heads=1), Options())
    assert several.identity == one.identity
    assert one.loads_in_step(Options(load="sync"))
    assert not several.loads_in_step(Options(load="sync")), "some of them store nothing"


def test_smaller_forms_share_with_nobody_else(folder: Path) -> None:
    found = {
        codec: engine_identity(config_of(folder), kv_config(), Options(codec=codec)).identity
        for codec in ("raw", "int8", "int4")
    }
    assert len({identity.fingerprint() for identity in found.values()}) == 3
    assert found["raw"] == engine_identity(config_of(folder), kv_config(), Options()).identity
    sizes = [Namespace(found[codec]).block_bytes for codec in ("raw", "int8", "int4")]
    assert sizes[0] > 1.5 * sizes[1] > 2 * sizes[2]


def test_what_has_no_smaller_form(folder: Path) -> None:
    config = config_of(folder, cache_config__cache_dtype="fp8")
    with pytest.raises(CannotShareError) as caught:
        engine_identity(config, kv_config(dtype=torch.uint8), Options(codec="int8"))
    assert caught.value.reason == "codec_unsupported"


def test_epochs_are_never_the_same(folder: Path) -> None:
    identity = engine_identity(config_of(folder), kv_config(), Options()).identity
    later = [in_new_epoch(identity).fingerprint() for _ in range(2)]
    assert len({identity.fingerprint(), *later}) == 3


def test_layer_names() -> None:
    assert layer_index("model.layers.12.self_attn.attn") == 12
    assert layer_index("layers.3") == 3
    assert layer_index("model.attn") is None
    assert layer_index("blocks.3.layers.1.attn") is None
