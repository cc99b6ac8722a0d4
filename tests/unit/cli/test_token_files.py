"""Text through a tokenizer folder, as an engine would read it, without the network."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from prefixcache.cli import token_files
from prefixcache.cli.errors import CliError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer of three words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "one": 11, "two": 22}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.slow
def test_text_becomes_the_tokenizers_ids(folder: Path) -> None:
    packed = token_files.tokenize(b"two one\ntwo", "x", folder)
    assert np.frombuffer(packed, "<u4").tolist() == [22, 11, 22]


@pytest.mark.slow
def test_a_folder_without_tokenizer_and_bytes_that_are_no_text_are_refused(folder: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(CliError, match="holds no tokenizer"):
        token_files.tokenize(b"one", "x", empty)
    with pytest.raises(CliError, match="not UTF-8"):
        token_files.tokenize(b"\xff\xfe", "x", folder)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CliError, match=r"cannot read .*gone"):
        token_files.read_bytes(str(tmp_path / "gone"))
