"""Real text that is on every machine: a licence, and what Python says of its library."""

import pydoc
from pathlib import Path

from tests.engines.vllm_engine import ROOT

MODULES = "argparse", "datetime", "decimal", "logging", "subprocess"


def texts() -> list[str]:
    """Each some thousand characters long; none begins like another."""
    licence = (ROOT / "LICENSE").read_text()
    return [licence, licence[len(licence) // 2 :], *(pydoc.plain(pydoc.render_doc(name)) for name in MODULES)]


def token_ids(folder: Path, count: int) -> list[list[int]]:
    """The first `count` tokens of each, by the tokenizer of a checkpoint."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer(text)["input_ids"][:count] for text in texts()]
    assert all(len(each) == count for each in ids)
    return ids
