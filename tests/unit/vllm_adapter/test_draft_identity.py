"""The identity of a draft model from vLLM's config objects, and which drafters' KV is not kept."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from prefixcache_vllm.draft_identity import draft_identity
from prefixcache_vllm.identity import CannotShareError, engine_identity
from prefixcache_vllm.options import Options
from tests.unit.vllm_adapter.test_identity import CONFIG, config_of, kv_config

SMALL = CONFIG | {"num_key_value_heads": 1}


def checkpoint(folder: Path, config: dict[str, Any], fill: float) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({"model.weight": torch.full((4, 4), fill)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    return checkpoint(tmp_path / "model", CONFIG, 1.0), checkpoint(tmp_path / "draft", SMALL, 2.0)


def speculating(folders: tuple[Path, Path], **changes: Any) -> Any:
    """A VllmConfig; `changes` of its speculative config."""
    config = config_of(folders[0])
    draft = config_of(folders[1]).model_config
    draft.hf_config, draft.max_model_len = dict(SMALL), 300
    config.speculative_config = SimpleNamespace(
        method="draft_model", num_speculative_tokens=3, draft_model_config=draft
    )
    config.speculative_config.__dict__.update(changes)
    return config


def kv_with_draft(heads: int = 1) -> Any:
    """Both models' layers in one group, each with a spec of its own, as vLLM has it."""
    config = kv_config()
    (group,) = config.kv_cache_groups
    own = group.kv_cache_spec
    small = SimpleNamespace(block_size=32, num_kv_heads=heads, head_size=16, dtype=torch.bfloat16)
    names = [f"draft_model.model.layers.{i}.self_attn.attn" for i in range(2)]
    specs = dict.fromkeys(group.layer_names, own) | dict.fromkeys(names, small)
    group.layer_names += names
    group.kv_cache_spec = SimpleNamespace(block_size=32, kv_cache_specs=specs)
    return config


def test_is_that_of_the_small_model_served_itself(folders: tuple[Path, Path]) -> None:
    config = speculating(folders)
    draft = draft_identity(config, kv_with_draft(), Options())
    alone = config_of(folders[1], model_config__hf_config=dict(SMALL), model_config__max_model_len=300)
    served = engine_identity(alone, kv_config(heads=1), Options())
    assert draft.engine.identity.fingerprint() == served.identity.fingerprint()
    main = engine_identity(config, kv_with_draft(), Options())
    assert main.identity.fingerprint() != served.identity.fingerprint()
    assert main.draft_layers == 2
    assert sorted(draft.engine.groups[0].layers.values()) == [0, 1]
    assert all(name.startswith("draft_model.") for name in draft.engine.groups[0].layers)
    assert not any(name.startswith("draft_model.") for name in main.groups[0].layers)
    assert (draft.group, draft.most_tokens, draft.proposals) == (0, 297, 3)


def test_depends_on_what_its_kv_is_kept_in(folders: tuple[Path, Path]) -> None:
    kept = kv_with_draft()
    for name, spec in kept.kv_cache_groups[0].kv_cache_spec.kv_cache_specs.items():
        if name.startswith("draft_model."):
            spec.dtype = torch.uint8
    plain = draft_identity(speculating(folders), kv_with_draft(), Options())
    quantised = draft_identity(speculating(folders, kv_cache_dtype="fp8"), kept, Options())
    assert plain.engine.identity.fingerprint() != quantised.engine.identity.fingerprint()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"method": "eagle3"}, "eagle3"),
        ({"method": "mtp"}, "mtp"),
        ({"method": None}, "unknown"),
        ({"use_heterogeneous_vocab": True}, "draft_vocabulary"),
        ({"parallel_drafting": True}, "parallel_drafting"),
    ],
)
def test_drafters_whose_kv_is_not_kept(folders: tuple[Path, Path], changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(CannotShareError) as error:
        draft_identity(speculating(folders, **changes), kv_with_draft(), Options())
    assert error.value.reason == reason


def test_models_whose_kv_is_not_kept(folders: tuple[Path, Path]) -> None:
    windows = speculating(folders)
    windows.speculative_config.draft_model_config.hf_config |= {"sliding_window": 64, "use_sliding_window": True}
    stages = speculating(folders)
    stages.parallel_config.pipeline_parallel_size = 2
    (folders[1] / "empty").mkdir()
    without = speculating((folders[0], folders[1] / "empty"))
    for config, kept, reason in (
        (windows, kv_with_draft(), "draft_windows"),
        (stages, kv_with_draft(), "pipeline_parallel"),
        (without, kv_with_draft(), "weights_unknown"),
        (speculating(folders), kv_with_draft(heads=2), "layout_mismatch"),
    ):
        with pytest.raises(CannotShareError) as error:
            draft_identity(config, kept, Options())
        assert error.value.reason == reason
