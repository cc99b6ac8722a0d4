"""Adapters are the bytes that the workers have under a number, or nobody knows."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from prefixcache_vllm.adapters import Adapters, lora_digest
from prefixcache_vllm.identity import CannotShareError


def write(folder: Path, value: float, rank: int = 8) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({"a": torch.full((2, 2), value)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
    return folder


def lora(number: int, folder: Path, **more: Any) -> Any:
    return SimpleNamespace(lora_int_id=number, lora_name="a", lora_path=str(folder), **more)


def test_bytes_settings_and_form_are_the_adapter(tmp_path: Path) -> None:
    one = write(tmp_path / "one", 1.0)
    copy = Path(shutil.copytree(one, tmp_path / "copy"))
    others = [
        lora_digest(write(tmp_path / "two", 2.0)),
        lora_digest(write(tmp_path / "r", 1.0, 16)),
        lora_digest(one, "x"),
    ]
    adapters = Adapters()
    assert adapters.digest(lora(1, one)) == adapters.digest(lora(2, copy)) == lora_digest(one)
    assert len({lora_digest(one), *others}) == 4
    assert Adapters("x").digest(lora(1, one)) == others[2]


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(CannotShareError) as error:
        Adapters().digest(lora(1, tmp_path))
    assert error.value.reason == "lora_unreadable"


@pytest.mark.parametrize("change", ["overwritten", "another folder"])
def test_what_a_number_stands_for_may_not_change(tmp_path: Path, change: str) -> None:
    folder, adapters = write(tmp_path / "one", 1.0), Adapters()
    before = adapters.digest(lora(1, folder))
    now = write(folder if change == "overwritten" else tmp_path / "other", 2.0)
    with pytest.raises(CannotShareError) as error:
        adapters.digest(lora(1, now))
    assert error.value.reason == "lora_changed"
    assert adapters.holds(lora(1, now), before), "the workers read nothing anew"
    after = adapters.digest(lora(1, now, load_inplace=True))
    assert after == lora_digest(now) != before
    assert adapters.digest(lora(1, now)) == after
    assert not adapters.holds(lora(1, now), before)
    assert adapters.digest(lora(2, now)) == after, "a number that was not seen yet"


def test_an_adapter_loaded_in_place_holds_as_long_as_its_files(tmp_path: Path) -> None:
    folder, adapters = write(tmp_path / "one", 1.0), Adapters()
    each = lora(1, folder, load_inplace=True)
    digest = adapters.digest(each)
    assert adapters.holds(each, digest)
    write(folder, 2.0)
    assert not adapters.holds(each, digest)


def test_files_that_are_gone_were_not_replaced(tmp_path: Path) -> None:
    folder, adapters = write(tmp_path / "one", 1.0), Adapters()
    digest = adapters.digest(lora(1, folder))
    shutil.rmtree(folder)
    assert adapters.digest(lora(1, folder)) == digest
