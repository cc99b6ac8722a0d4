"""What an engine says of itself, and what switches the cache off."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prefixcache.identity.weights import weights_digest
from prefixcache_sglang.facts import CannotShareError, checkpoint_folder, engine_facts, running_settings
from prefixcache_sglang.options import Options
from tests.unit.sglang_adapter.conftest import write_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", 5.0)


def test_the_engines_own_path_counts_and_not_the_served_name(folder: Path) -> None:
    settings = SimpleNamespace(model_path=str(folder), load_format="auto")
    facts = engine_facts("some-name", settings, Options())
    assert facts.weights == weights_digest(folder)
    assert facts.label == "some-name"
    assert facts.settings == engine_facts("other", settings, Options()).settings


def test_a_folder_of_the_users_own_counts_more(folder: Path) -> None:
    for settings in (None, SimpleNamespace(model_path="org/model-of-a-hub")):
        facts = engine_facts(None, settings, Options(model=str(folder)))
        assert (facts.weights, facts.label) == (weights_digest(folder), "model")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (None, "weights_unknown"),
        (SimpleNamespace(model_path="org/model-that-nobody-has-here"), "weights_unknown"),
        (SimpleNamespace(model_path="s3://bucket/model"), "weights_unknown"),
    ],
)
def test_weights_that_are_not_here_switch_it_off(settings: Any, reason: str) -> None:
    with pytest.raises(CannotShareError) as caught:
        engine_facts("name", settings, Options())
    assert caught.value.reason == reason
    assert "prefixcache.model" in str(caught.value), "it says what to do"


def test_random_weights_and_unreadable_files_switch_it_off(folder: Path) -> None:
    settings = SimpleNamespace(model_path=str(folder), load_format=SimpleNamespace(value="dummy"))
    with pytest.raises(CannotShareError, match="dummy"):
        engine_facts("name", settings, Options())
    scales = SimpleNamespace(model_path=str(folder), quantization_param_path=str(folder / "none.json"))
    with pytest.raises(CannotShareError) as caught:
        engine_facts("name", scales, Options())
    assert caught.value.reason == "settings_unreadable"
    (folder / "model.safetensors").write_bytes(b"garbage")
    with pytest.raises(CannotShareError):
        engine_facts("name", SimpleNamespace(model_path=str(folder)), Options())


def test_settings_have_one_form(folder: Path) -> None:
    def said(**settings: Any) -> Any:
        return engine_facts("name", SimpleNamespace(model_path=str(folder), **settings), Options()).settings

    assert said(rope_scaling={"a": 1, "b": 2}) == said(rope_scaling={"b": 2, "a": 1})
    assert said(dtype=SimpleNamespace(value="bfloat16")) == said(dtype="bfloat16") != said(dtype="float16")
    scales = folder / "scales.json"
    scales.write_text("1")
    before = said(quantization_param_path=str(scales))
    scales.write_text("2")
    assert said(quantization_param_path=str(scales)) != before
    plain = said()
    (folder / "config.json").write_text('{"rope_theta": 5.0}')
    assert said() != plain, "what the checkpoint's config says is part of it"


def test_a_folder_is_itself(folder: Path) -> None:
    assert checkpoint_folder(str(folder), None) == folder


def test_where_there_is_no_engine_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise ValueError("not set yet")

    monkeypatch.setitem(
        __import__("sys").modules, "sglang.srt.runtime_context", SimpleNamespace(get_server_args=refuse)
    )
    monkeypatch.setitem(__import__("sys").modules, "sglang.srt.server_args", SimpleNamespace())
    assert running_settings() is None
