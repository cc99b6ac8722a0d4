"""Tiny models with random weights, made in seconds. Run as a program: `models.py KIND FOLDER`.

Embeddings are untied and weights drawn wide: else a random model says one token for ever, and equal outputs prove
nothing.
"""

import json
import sys
from pathlib import Path
from typing import Any

SEED = 7
VOCABULARY = 4096
WINDOW = 128
LAYERS = 3


def make(kind: str, folder: Path) -> None:
    """A checkpoint of `kind` in bfloat16, written by transformers.

    "llama"; "gemma3", with windows; "llama-next", the first one's next revision; "draft", "llama" a little changed: a
    draft model that often agrees with it, and whose KV cache cannot be told from the model's by its shape.
    """
    import torch
    import transformers

    common: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096, "tie_word_embeddings": False,
        "initializer_range": 0.08, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    if kind in {"llama", "llama-next", "draft"}:
        config: Any = transformers.LlamaConfig(num_hidden_layers=LAYERS, **common)
        model: Any = transformers.LlamaForCausalLM
    elif kind == "gemma3":
        kinds = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
        config = transformers.Gemma3TextConfig(
            num_hidden_layers=len(kinds), layer_types=kinds, sliding_window=WINDOW, **common
        )
        model = transformers.Gemma3ForCausalLM
    else:
        raise ValueError(f"no model {kind!r}")
    torch.manual_seed(SEED)
    made = model(config).to(torch.bfloat16)
    if kind == "llama-next":
        made.model.layers[0].input_layernorm.weight.data.mul_(1.5)
    if kind == "draft":
        made.model.layers[0].input_layernorm.weight.data.mul_(1.05)
    made.save_pretrained(folder)
    _save_tokenizer(folder)


def make_lora(folder: Path, seed: int, rank: int = 8) -> None:
    """An adapter for the queries, keys and values of a "llama", in peft's form."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        for name, outputs in (("q_proj", 256), ("k_proj", 128), ("v_proj", 128)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for half, shape in (("A", (rank, 256)), ("B", (outputs, rank))):
                tensors[f"{at}.lora_{half}.weight"] = (torch.randn(shape, generator=generator) * 0.1).to(torch.bfloat16)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "bias": "none",
        "target_modules": ["q_proj", "k_proj", "v_proj"], "base_model_name_or_path": "",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def _save_tokenizer(folder: Path) -> None:
    """Words w0, w1, ... are tokens 0, 1, ...: for servers, which want text."""
    import tokenizers
    import transformers

    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0")
    plain = tokenizers.Tokenizer(words)
    plain.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="w0", bos_token="w1", eos_token="w2", pad_token="w0"
    )
    fast.save_pretrained(folder)


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
