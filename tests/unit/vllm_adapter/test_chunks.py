"""The namespace of an engine's offloaded rows: everything they depend on, and what switches the tier off."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from prefixcache_client import Client
from prefixcache_vllm.chunks import Engine, callers_configs, chained_groups, chunk_cache, tier_options
from prefixcache_vllm.identity import CannotShareError
from prefixcache_vllm.options import Options
from tests.unit.vllm_adapter.test_identity import CONFIG, config_of, kv_config

ROW = 49152
BUILD = ("0.32.0", "cpu", "AVX512", "False")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file({"model.weight": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def vllm_config(folder: Path, **changes: Any) -> Any:
    made = config_of(folder)
    made.cache_config.prefix_caching_hash_algo = "sha256"
    made.lora_config = None
    for name, value in changes.items():
        owner, _, field = name.rpartition("__")
        setattr(getattr(made, owner) if owner else made, field, value)
    return made


def offloading_spec(**changes: Any) -> Any:
    """The parts of vLLM's OffloadingSpec that are read; `changes` by dotted name."""
    names = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")
    config = SimpleNamespace(
        groups=(SimpleNamespace(tokens_per_block=32, layer_names=names, group_id=0),),
        cache=SimpleNamespace(blocks_per_chunk=2, tokens_per_hash=32),
        model=SimpleNamespace(name="tiny", dtype="bfloat16"),
        parallel=SimpleNamespace(world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1),
        kv_cache_layout="LBHNC", replicated_layout=False, canonical_layout=False,
    )  # fmt: skip
    for name, value in changes.items():
        owner, _, field = name.rpartition("__")
        setattr(getattr(config, owner) if owner else config, field, value)
    return SimpleNamespace(config=config)


def print_of(
    folder: Path, spec: Any = None, row: int = ROW, build: tuple[str, ...] = BUILD, options: Options | None = None,
    **changes: Any,
) -> bytes:  # fmt: skip
    engine = Engine(vllm_config(folder, **changes), kv_config(), build)
    with Client("unix:///nowhere") as client:
        cache = chunk_cache(client, engine, spec or offloading_spec(), row, options or Options())
    return cache.ns.epoch.fingerprint


def test_rows_of_equal_engines_are_shared_and_of_others_never(folder: Path, tmp_path_factory: Any) -> None:
    other = tmp_path_factory.mktemp("other")
    save_file({"model.weight": torch.zeros(4, 4)}, other / "model.safetensors")
    specs = [
        offloading_spec(cache__blocks_per_chunk=1),
        offloading_spec(cache__tokens_per_hash=64),
        offloading_spec(parallel__tp_size=2),
        offloading_spec(parallel__world_size=2),
        offloading_spec(kv_cache_layout="BLHNC"),
        offloading_spec(model__dtype="float16"),
        offloading_spec(canonical_layout=True),
        offloading_spec(replicated_layout=True),
    ]
    prints = [print_of(folder, spec) for spec in specs]
    prints += [
        print_of(folder),
        print_of(other),
        print_of(folder, row=2 * ROW),
        print_of(folder, build=("0.33.0", *BUILD[1:])),
        print_of(folder, options=Options(tenant="a")),
        print_of(folder, cache_config__prefix_caching_hash_algo="sha256_cbor"),
        print_of(folder, model_config__dtype=torch.float16, cache_config__cache_dtype="bfloat16"),
    ]
    assert len(set(prints)) == len(prints)
    assert print_of(folder) == print_of(folder)


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("lora_names", {"lora_config": object()}),
        ("media_names", {"model_config__multimodal_config": SimpleNamespace(language_model_only=False)}),
        ("weak_hash", {"cache_config__prefix_caching_hash_algo": "xxhash"}),
        ("weights_unknown", {"load_config__load_format": "dummy"}),
        ("dynamic_scales", {"cache_config__calculate_kv_scales": True}),
    ],
)
def test_what_cannot_be_said_for_certain_is_not_kept(folder: Path, reason: str, changes: dict[str, Any]) -> None:
    with pytest.raises(CannotShareError) as caught:
        print_of(folder, **changes)
    assert caught.value.reason == reason


def test_a_model_that_sees_images_is_kept_where_it_is_used_for_text_only(folder: Path) -> None:
    assert print_of(folder, model_config__multimodal_config=SimpleNamespace(language_model_only=True))


def test_a_rows_size_that_nothing_can_have(folder: Path) -> None:
    with pytest.raises(CannotShareError, match="layout_unknown"):
        print_of(folder, row=3)


def test_configs_are_found_at_the_caller() -> None:
    def made_by_vllm(vllm_config: Any, kv_cache_config: Any) -> Any:
        def factory() -> Any:
            return callers_configs()

        return factory()

    assert made_by_vllm("v", "k") == ("v", "k")
    with pytest.raises(CannotShareError, match="engine_unknown"):
        callers_configs()


def test_windows_are_not_chained() -> None:
    def group(**fields: Any) -> Any:
        return SimpleNamespace(kv_cache_spec=SimpleNamespace(**fields))

    groups = [group(), group(sliding_window=128), group(sliding_window=None)]
    assert chained_groups(SimpleNamespace(kv_cache_groups=groups)) == {0, 2}


def test_settings() -> None:
    options = tier_options({"prefixcache.address": "unix:///a", "prefixcache.save_queue": 3})
    assert (options.address, options.save_queue) == ("unix:///a", 3)
    for name in ("address", "prefixcache.prompt_only", "prefixcache.nothing", "root_dir"):
        with pytest.raises(ValueError, match="means nothing to this tier"):
            tier_options({name: "x"})
