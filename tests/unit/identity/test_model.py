"""From configs to layouts and namespaces: dicts as transformers 4.57 writes them, objects of the one at hand."""

from types import SimpleNamespace
from typing import Any

import pytest

from prefixcache.identity import GroupKind, LayerGroup, Layout, block_keys, foreign_key, root_key
from prefixcache.identity.fingerprint import IdentityError
from prefixcache.identity.hfconfig import ConfigError
from prefixcache.identity.model import layer_types, layout_from_hf, namespace_from_hf, numeric_config

WEIGHTS = bytes(range(32))
LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192, "rope_theta": 100000, "rope_scaling": None,
}  # fmt: skip
GEMMA3: dict[str, Any] = {
    "model_type": "gemma3_text", "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 12,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 256, "sliding_window": 512, "max_position_embeddings": 32768,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2, "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}  # fmt: skip
QWEN2: dict[str, Any] = {
    "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 4,
    "num_attention_heads": 14, "num_key_value_heads": 2, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768, "rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0},
    "use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 2,
}  # fmt: skip
MISTRAL: dict[str, Any] = {
    "model_type": "mistral", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768, "rope_theta": 1e4, "sliding_window": 4096,
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 8, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "max_position_embeddings": 163840, "rope_theta": 1e4, "num_experts_per_tok": 8, "routed_scaling_factor": 2.5,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
        "original_max_position_embeddings": 4096,
    },
}  # fmt: skip
CONFIGS = {"llama": LLAMA, "gemma3": GEMMA3, "qwen2": QWEN2, "mistral": MISTRAL, "deepseek": DEEPSEEK}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_one_checkpoint_is_one_namespace_under_both_majors(name: str) -> None:
    """A config.json as 4.57 writes it, read as a dict, as 4.57's object would be, and by the transformers at hand."""
    transformers = pytest.importorskip("transformers")
    written = CONFIGS[name]
    opened = transformers.AutoConfig.for_model(**written)
    again = transformers.AutoConfig.for_model(**opened.to_dict())
    namespaces = [
        namespace_from_hf(config, WEIGHTS, "bfloat16")
        for config in (written, SimpleNamespace(**written), opened, again, opened.to_dict())
    ]
    assert [namespace.spec_map for namespace in namespaces] == [namespaces[0].spec_map] * 5
    assert len({namespace.fingerprint for namespace in namespaces}) == 1


def test_grouped_queries() -> None:
    (group,) = layout_from_hf(LLAMA, "bfloat16").groups
    assert group == LayerGroup(GroupKind.FULL, tuple(range(30)), 3, 64, 64, "bfloat16")


def test_a_hybrid_model_has_two_groups() -> None:
    sliding, full = layout_from_hf(GEMMA3, "float32").groups
    assert sliding == LayerGroup(
        GroupKind.SLIDING, (0, 1, 2, 3, 4, 6, 7, 8, 9, 10), 1, 256, 256, "float32", window_tokens=512
    )
    assert full == LayerGroup(GroupKind.FULL, (5, 11), 1, 256, 256, "float32")


def test_layer_types_that_are_not_stated_are_those_the_engines_derive() -> None:
    implied = {key: value for key, value in GEMMA3.items() if key != "layer_types"}
    assert layer_types(implied) == GEMMA3["layer_types"]
    assert layer_types({**implied, "model_type": "gemma2"}) == ["sliding_attention", "full_attention"] * 6
    assert layer_types({**implied, "sliding_window_pattern": 3}) == (["sliding_attention"] * 2 + ["full_attention"]) * 4
    assert set(layer_types(MISTRAL)) == {"sliding_attention"}
    assert set(layer_types(QWEN2)) == {"full_attention"}
    assert layer_types({**QWEN2, "use_sliding_window": True}) == ["full_attention"] * 2 + ["sliding_attention"] * 2


def test_a_window_that_is_off_leaves_full_layers() -> None:
    (group,) = layout_from_hf({**GEMMA3, "sliding_window": None}, "bfloat16").groups
    assert (group.kind, group.layers) == (GroupKind.FULL, tuple(range(12)))


def test_mla_is_one_latent_head_or_expanded_heads() -> None:
    (latent,) = layout_from_hf(DEEPSEEK, "bfloat16").groups
    assert (latent.kv_heads, latent.k_dim, latent.v_dim) == (1, 576, 0)
    (expanded,) = layout_from_hf(DEEPSEEK, "bfloat16", mla="expanded").groups
    assert (expanded.kv_heads, expanded.k_dim, expanded.v_dim) == (8, 192, 128)


def test_layers_that_read_the_cache_of_others_keep_none() -> None:
    groups = layout_from_hf({**GEMMA3, "num_kv_shared_layers": 6}, "bfloat16").groups
    assert [group.layers for group in groups] == [(0, 1, 2, 3, 4), (5,)]


def test_older_names_of_the_fields() -> None:
    config = {"n_layer": 2, "n_head": 4, "n_embd": 256, "multi_query": True}
    (group,) = layout_from_hf(config, "float16").groups
    assert group == LayerGroup(GroupKind.FULL, (0, 1), 1, 64, 64, "float16")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"is_encoder_decoder": True}, "model_unsupported"),
        ({"use_bidirectional_attention": True}, "model_unsupported"),
        ({"cross_attention_layers": [1]}, "model_unsupported"),
        ({"index_topk": 2048}, "model_unsupported"),
        ({"global_head_dim": 512}, "model_unsupported"),
        ({"layer_types": ["linear_attention"] * 30}, "layer_type"),
        ({"layer_types": ["full_attention"]}, "config_unsupported"),
        ({"num_hidden_layers": None}, "config_unsupported"),
        ({"num_attention_heads": None}, "config_unsupported"),
        ({"num_key_value_heads": "3"}, "config_unsupported"),
        ({"hidden_size": None}, "config_unsupported"),
    ],
)
def test_a_model_that_cannot_be_described_is_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        layout_from_hf({**LLAMA, **change}, "bfloat16")
    assert caught.value.reason == reason


def test_dtypes_of_torch_are_taken() -> None:
    torch = pytest.importorskip("torch")
    assert layout_from_hf(LLAMA, torch.bfloat16) == layout_from_hf(LLAMA, "bfloat16")


def test_every_option_makes_another_namespace() -> None:
    options: list[dict[str, Any]] = [
        {}, {"block_tokens": 16}, {"tenant": "acme"}, {"lora": bytes(range(32))}, {"epoch": 1}, {"codec": "int8"},
        {"quantisation": "awq"}, {"compute_dtype": "float32"}, {"k_scales": (0.5,)}, {"v_scales": (0.5,)},
        {"engine": "vllm"}, {"overrides": {"a": 1}}, {"packing": "native:vllm:amx"}, {"stages": (15,)},
        {"scale_bytes": 4}, {"layout": Layout.of(LayerGroup(GroupKind.FULL, (0,), 1, 8, 8, "float16"))},
    ]  # fmt: skip
    fingerprints = {namespace_from_hf(LLAMA, WEIGHTS, "bfloat16", **option).fingerprint for option in options}
    assert len(fingerprints) == len(options)
    mla = {namespace_from_hf(DEEPSEEK, WEIGHTS, "bfloat16", mla=mla).fingerprint for mla in ("latent", "expanded")}
    assert len(mla) == 2


@pytest.mark.parametrize(
    "change", [{"rope_theta": 5e5}, {"rms_norm_eps": 1e-6}, {"hidden_act": "gelu"}, {"num_hidden_layers": 29}]
)
def test_an_override_of_the_config_is_another_namespace(change: dict[str, Any]) -> None:
    plain, changed = (namespace_from_hf(config, WEIGHTS, "bfloat16") for config in (LLAMA, {**LLAMA, **change}))
    assert plain.fingerprint != changed.fingerprint


@pytest.mark.parametrize("change", [{"_name_or_path": "/models/a"}, {"architectures": ["X"]}, {"use_cache": False}])
def test_names_and_paths_take_no_part(change: dict[str, Any]) -> None:
    plain, renamed = (namespace_from_hf(config, WEIGHTS, "bfloat16") for config in (LLAMA, {**LLAMA, **change}))
    assert plain.fingerprint == renamed.fingerprint


def test_numbers_are_written_as_one_type() -> None:
    soft = {"attn_logit_softcapping": 50, "query_pre_attn_scalar": 256.0}
    assert numeric_config(soft) == {"attn_logit_softcapping": 50.0, "query_pre_attn_scalar": 256.0}


def test_a_namespace_knows_its_parts_and_roots() -> None:
    namespace = namespace_from_hf(GEMMA3, WEIGHTS, "bfloat16")
    assert namespace.block_tokens == 64
    assert namespace.block_bytes == namespace.layout.block_bytes(64) == sum(part.bytes for part in namespace.parts)
    assert namespace.root(cache_salt=b"x") == root_key(namespace.fingerprint, cache_salt=b"x")
    assert len(block_keys(namespace.root(), [1] * 200, namespace.block_tokens)) == 3 * 32


def test_foreign_keys_need_an_engine() -> None:
    with pytest.raises(ConfigError, match="engine"):
        namespace_from_hf(LLAMA, WEIGHTS, "bfloat16").foreign(b"key")
    vllm = namespace_from_hf(LLAMA, WEIGHTS, "bfloat16", engine="vllm")
    sglang = namespace_from_hf(LLAMA, WEIGHTS, "bfloat16", engine="sglang")
    assert vllm.foreign(b"key") == foreign_key(vllm.root(), b"key") != sglang.foreign(b"key")


def test_dynamic_scales_are_refused() -> None:
    with pytest.raises(IdentityError) as caught:
        namespace_from_hf(LLAMA, WEIGHTS, "float8_e4m3fn", k_scales="dynamic")
    assert caught.value.reason == "dynamic_scales"
