"""RoPE's normal form: one checkpoint, one form, under what transformers 4.57, transformers 5.x and vLLM say."""

from types import SimpleNamespace
from typing import Any

import pytest

from prefixcache.identity.hfconfig import ConfigError
from prefixcache.identity.rope import rope_normal_form

BASE = {"hidden_size": 4096, "num_attention_heads": 32, "max_position_embeddings": 131072}
LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}
FACTORS: dict[str, list[float]] = {"short_factor": [1.0, 1.5], "long_factor": [2, 3]}


def form(**fields: Any) -> dict[str, Any]:
    """The form of a dict, after making sure that an object with the same attributes gives the same one."""
    config = {**BASE, **fields}
    result = rope_normal_form(config)
    assert rope_normal_form(SimpleNamespace(**config)) == result
    return result


# (name, transformers 4.57's fields, transformers 5.x's and vLLM's, the form)
SPELLINGS: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    (
        "plain",
        {"rope_theta": 100000, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}},
        {"all": {"type": "default", "theta": 100000.0, "dims": 128}},
    ),
    (
        "llama3",
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3}},
        {
            "all": {
                "type": "llama3", "theta": 500000.0, "dims": 128, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_length": 8192,
            }
        },
    ),
    (
        "old word for the type",
        {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2}},
        {"rope_parameters": {"rope_type": "linear", "type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
        {"all": {"type": "linear", "theta": 10000.0, "dims": 128, "factor": 2.0}},
    ),
    (
        "yarn with its defaults left out or written",
        {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", **YARN}},
        {"rope_parameters": {"rope_type": "deepseek_yarn", "rope_theta": 1e6, **YARN, "beta_fast": 32}},
        {
            "all": {
                "type": "yarn", "theta": 1e6, "dims": 128, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
                "truncate": True, "original_length": 32768,
            }
        },
    ),
    (
        "gemma3: a base of its own for sliding layers",
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
        {
            "full_attention": {"type": "linear", "theta": 1e6, "dims": 128, "factor": 8.0},
            "sliding_attention": {"type": "default", "theta": 1e4, "dims": 128},
        },
    ),
    (
        "layer types that rotate alike",
        {"rope_theta": 1e4, "rope_local_base_freq": 1e4},
        {"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e4}}},
        {"all": {"type": "default", "theta": 1e4, "dims": 128}},
    ),
    (
        "part of the head, under three names",
        {"rope_theta": 1e4, "rotary_pct": 0.25},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}},
        {"all": {"type": "default", "theta": 1e4, "dims": 32}},
    ),
    (
        "MLA rotates its own dimensions",
        {"rope_theta": 1e4, "qk_rope_head_dim": 64},
        {"rope_parameters": {"rope_theta": 1e4}, "qk_rope_head_dim": 64, "head_dim": 64},
        {"all": {"type": "default", "theta": 1e4, "dims": 64}},
    ),
    (
        "no rotation at all",
        {},
        {"rope_parameters": None},
        {"all": {}},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "expected"), [item[1:] for item in SPELLINGS], ids=[s[0] for s in SPELLINGS])
def test_two_spellings_have_one_form(old: dict[str, Any], new: dict[str, Any], expected: dict[str, Any]) -> None:
    assert form(**old) == form(**new) == expected


def test_a_text_config_inside_a_multimodal_one_is_read() -> None:
    inner = {**BASE, "rope_theta": 5e5}
    assert rope_normal_form({"text_config": inner, "rope_theta": 1.0}) == rope_normal_form(inner)


def test_layers_without_rotation_are_listed() -> None:
    assert form(rope_theta=1e4, no_rope_layers=[1, 1, 0, 1])["unrotated_layers"] == [2]
    assert "unrotated_layers" not in form(rope_theta=1e4, no_rope_layers=[1, 1])


def test_a_layer_type_without_rotation_has_an_empty_form() -> None:
    parameters = {"full_attention": None, "sliding_attention": {"rope_theta": 1e4}, "rope_theta": 7.0}
    assert form(rope_parameters=parameters) == {
        "full_attention": {},
        "sliding_attention": {"type": "default", "theta": 1e4, "dims": 128},
    }


def test_a_field_nobody_knows_is_kept() -> None:
    plain = form(rope_parameters={"rope_theta": 1e4})
    unknown = form(rope_parameters={"rope_theta": 1e4, "twist": [1, 2], "mode": "x", "absent": None})
    assert unknown["all"] == {**plain["all"], "twist": [1.0, 2.0], "mode": "x"}


def test_a_type_nobody_knows_keeps_all_its_fields() -> None:
    fields = {"rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 4096, "beta_fast": 3}
    expected = {"factor": 8.0, "original_max_position_embeddings": 4096.0, "beta_fast": 3.0}
    assert form(rope_parameters={"rope_type": "spiral", **fields}) == {
        "all": {"type": "spiral", "theta": 1e4, "dims": 128, **expected}
    }


def test_a_field_the_type_does_not_read_is_left_out() -> None:
    assert form(rope_parameters={"rope_theta": 1e4, "factor": 8.0}) == form(rope_theta=1e4)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su"])
def test_a_rotation_by_length_is_refused(kind: str) -> None:
    config = {**BASE, "rope_theta": 1e4, "rope_scaling": {"type": kind, "factor": 2.0, **FACTORS}}
    with pytest.raises(ConfigError, match="length") as caught:
        rope_normal_form(config)
    assert caught.value.reason == "rope_depends_on_length"


def test_dynamic_within_the_trained_length_scales_nothing() -> None:
    config = {**BASE, "rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    assert rope_normal_form(config, fixed_length=131072) == form(rope_theta=1e4)
    beyond = rope_normal_form(config, fixed_length=200_000)["all"]
    assert beyond == {
        "type": "dynamic", "theta": 1e4, "dims": 128, "factor": 2.0, "trained_length": 131072, "length": 200_000,
    }  # fmt: skip


def test_longrope_takes_one_list_by_the_fixed_length() -> None:
    old: dict[str, Any] = {**BASE, "rope_theta": 1e4, "original_max_position_embeddings": 4096}
    old["rope_scaling"] = {"type": "longrope", **FACTORS}
    new: dict[str, Any] = {**BASE, "original_max_position_embeddings": 4096}
    new["rope_parameters"] = {
        "rope_type": "longrope", "rope_theta": 1e4, **FACTORS, "original_max_position_embeddings": 4096,
    }  # fmt: skip
    for length, kept, dropped in ((4096, "short_factor", "long_factor"), (4097, "long_factor", "short_factor")):
        one = rope_normal_form(old, fixed_length=length)["all"]
        assert one == rope_normal_form(new, fixed_length=length)["all"]
        assert isinstance(one, dict)
        assert one["factor"] == 32.0
        assert one[kept] == [float(number) for number in FACTORS[kept]]
        assert dropped not in one


def test_transformers_4_57_ignores_longropes_stated_factor_and_5_does_not() -> None:
    scaling = {"rope_type": "longrope", "factor": 8.0, **FACTORS}
    fields = {**BASE, "original_max_position_embeddings": 4096}
    old = rope_normal_form({**fields, "rope_theta": 1e4, "rope_scaling": scaling}, fixed_length=10)["all"]
    new = rope_normal_form({**fields, "rope_parameters": {"rope_theta": 1e4, **scaling}}, fixed_length=10)["all"]
    assert isinstance(old, dict)
    assert isinstance(new, dict)
    assert (old["factor"], new["factor"]) == (32.0, 8.0)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": "big"},
        {"rope_theta": True},
        {"rope_theta": 1e4, "rope_scaling": "yarn"},
        {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": {}}},
        {"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "original_max_position_embeddings": 1.5}},
        {"rope_theta": 1e4, "hidden_size": None},
        {"rope_theta": 1e4, "num_attention_heads": "32"},
    ],
)
def test_nonsense_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        rope_normal_form({**BASE, **fields})
