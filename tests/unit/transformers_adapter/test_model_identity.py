"""A namespace depends on weights as they are and adapters as they act, not on where they were loaded from."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from prefixcache.identity.weights import state_dict_digest, weights_digest
from prefixcache_transformers.model_identity import model_identity
from prefixcache_transformers.probe import UnsupportedModelError, probe
from prefixcache_transformers.rotation import changed_rotation

from .tiny_models import BLOCK, STYLES, cached, plain, prompt, tiny_model


def fingerprint(model: Any, **changes: Any) -> bytes:
    options = {"block_tokens": BLOCK, "epoch": 0, "tenant": ""} | changes
    return model_identity(model, probe(model), **options).fingerprint()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_model("llama").save_pretrained(folder)
    return folder


def loaded(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_loaded_model_is_known_by_its_files(checkpoint: Path, dtype: torch.dtype) -> None:
    model = loaded(checkpoint, dtype=dtype)
    identity = model_identity(model, probe(model), block_tokens=BLOCK, epoch=0, tenant="")
    assert identity.weights == weights_digest(checkpoint)


def test_path_takes_no_part(checkpoint: Path, tmp_path: Path) -> None:
    model = loaded(checkpoint)
    model.save_pretrained(tmp_path)
    assert fingerprint(model) == fingerprint(loaded(tmp_path))


def test_changed_weights_are_not_those_of_the_files(checkpoint: Path) -> None:
    model = loaded(checkpoint)
    before = fingerprint(model)
    model.model.layers[2].mlp.up_proj.weight.data.mul_(1.5)
    assert fingerprint(model) != before
    identity = model_identity(model, probe(model), block_tokens=BLOCK, epoch=0, tenant="")
    assert identity.weights == state_dict_digest(model.state_dict())


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_cast_model_rotates_in_another_way(tmp_path: Path, style: str, dtype: torch.dtype) -> None:
    tiny_model(style).save_pretrained(tmp_path)
    model, cast = loaded(tmp_path, dtype=dtype), loaded(tmp_path).to(dtype)
    assert not changed_rotation(model)
    assert fingerprint(cast) != fingerprint(model)
    assert fingerprint(cast) == fingerprint(loaded(tmp_path).to(dtype)), "and shares with its like"
    back = cast.float()
    assert changed_rotation(back), "what a cast took away does not come back"
    for (name, parameter), as_cast in zip(model.named_parameters(), back.parameters(), strict=True):
        assert torch.equal(parameter.float(), as_cast), name


def test_what_separates(checkpoint: Path) -> None:
    model = loaded(checkpoint)
    others = [
        fingerprint(model, block_tokens=2 * BLOCK),
        fingerprint(model, epoch=1),
        fingerprint(model, tenant="somebody"),
        fingerprint(loaded(checkpoint, dtype=torch.float16)),
        *(fingerprint(tiny_model(style)) for style in STYLES if style != "llama"),
    ]
    assert len({fingerprint(model), *others}) == 1 + len(others)


def adapted(names: tuple[str, ...]) -> Any:
    """The tiny llama with LoRA adapters that do something (peft starts them as identity)."""
    peft = pytest.importorskip("peft")
    model = None
    for seed, name in enumerate(names):
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        if model is None:
            model = peft.get_peft_model(tiny_model("llama"), config, adapter_name=name)
        else:
            model.add_adapter(name, config)
        generator = torch.Generator().manual_seed(seed)
        for key, tensor in model.state_dict().items():
            if f".{name}." in key:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
    assert model is not None
    return model.eval()


def test_adapters_separate() -> None:
    model = adapted(("first", "second"))
    seen = {"plain": fingerprint(tiny_model("llama"))}
    for name in ("first", "second"):
        model.set_adapter(name)
        seen[name] = fingerprint(model)
    with model.disable_adapter():
        assert fingerprint(model) == seen["plain"]
    model.set_adapter("first")
    assert fingerprint(model) == seen["first"]
    model.merge_adapter(["first"])
    seen["merged"] = fingerprint(model)
    assert len(set(seen.values())) == 4


def test_switching_adapters_between_requests() -> None:
    model = adapted(("first", "second"))
    cache, opener = cached(model, prompt_only=True)
    ids = prompt(4 * BLOCK + 3, 1)
    said = {}
    for expected_reuse, name in [(0, "first"), (0, "second"), (4 * BLOCK, "first"), (4 * BLOCK, "second")]:
        model.set_adapter(name)
        before = cache.stats.reused
        output = cache.generate(ids, max_new_tokens=12, do_sample=False)
        cache.flush()
        assert torch.equal(output, plain(model, ids))
        assert cache.stats.reused - before == expected_reuse
        assert torch.equal(output, said.setdefault(name, output))
    assert not torch.equal(said["first"], said["second"])
    assert [len(store) for store in opener.stores.values()] == [4, 4]


def test_a_model_that_keeps_its_kv_elsewhere_is_refused() -> None:
    model = tiny_model("llama")
    forward = model.forward
    model.forward = lambda past_key_values=None, **more: forward(**more)
    with pytest.raises(UnsupportedModelError) as error:
        probe(model)
    assert error.value.reason == "no_kv_cache"


def test_an_engine_around_a_model_is_looked_into() -> None:
    engine = torch.nn.Module()
    engine.module = tiny_model("llama")
    cache, _ = cached(engine)
    assert cache.model is engine.module
