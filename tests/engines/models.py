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
HIDDEN = 256
IMAGE_SIZE, PATCH_SIZE, PATCHES_TO_A_TOKEN = 80, 4, 4
_SPECIAL = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
IMAGE_TOKEN = VOCABULARY - len(_SPECIAL)
"""The token in whose place "idefics3" takes an image."""
IMAGE_TOKENS = (IMAGE_SIZE // PATCH_SIZE) ** 2 // PATCHES_TO_A_TOKEN + 3
"""How many that becomes; two in front and one behind it only say that there is an image."""


def make(kind: str, folder: Path) -> None:
    """A checkpoint of `kind` in bfloat16, written by transformers.

    "llama"; "gemma3", with windows; "llama-next", the first one's next revision; "draft", "llama" a little changed: a
    draft model that often agrees with it, and whose KV cache cannot be told from the model's by its shape; "idefics3",
    a "llama" that sees images.
    """
    import torch
    import transformers

    common: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 512, "num_attention_heads": 4,
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
    elif kind == "idefics3":
        config, model = _seeing(common), transformers.Idefics3ForConditionalGeneration
    else:
        raise ValueError(f"no model {kind!r}")
    torch.manual_seed(SEED)
    made = model(config).to(torch.bfloat16)
    if kind == "llama-next":
        made.model.layers[0].input_layernorm.weight.data.mul_(1.5)
    if kind == "draft":
        made.model.layers[0].input_layernorm.weight.data.mul_(1.05)
    made.save_pretrained(folder)
    tokenizer = _save_tokenizer(folder, _SPECIAL if kind == "idefics3" else ())
    if kind == "idefics3":
        _save_processor(folder, tokenizer)


def _seeing(text: dict[str, Any]) -> Any:
    """A model whose images are more tokens than a block. Of those vLLM can run, one that needs no torchvision."""
    import transformers
    from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig

    tower = Idefics3VisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, image_size=IMAGE_SIZE,
        patch_size=PATCH_SIZE, initializer_range=0.2,
    )  # fmt: skip
    return transformers.Idefics3Config(
        text_config=transformers.LlamaConfig(num_hidden_layers=LAYERS, **text).to_dict(),
        vision_config=tower.to_dict(),
        image_token_id=IMAGE_TOKEN,
        tie_word_embeddings=False,
        initializer_range=text["initializer_range"],
        pad_token_id=text["pad_token_id"],
    )


def _save_processor(folder: Path, tokenizer: Any) -> None:
    """What makes pixels of an image: one that has the tower's size is not resized, and never cut into several."""
    import transformers
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    side = {"longest_edge": IMAGE_SIZE}
    pixels = Idefics3ImageProcessorPil(size=side, max_image_size=side, do_image_splitting=False)
    transformers.Idefics3Processor(pixels, tokenizer, image_seq_len=IMAGE_TOKENS - 3).save_pretrained(folder)


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


def _save_tokenizer(folder: Path, special: tuple[str, ...]) -> Any:
    """Words w0, w1, ... are tokens 0, 1, ...: for servers, which want text. `special`: what the last ones are."""
    import tokenizers
    import transformers

    plain_words = [f"w{i}" for i in range(VOCABULARY - len(special))]
    ids = {word: i for i, word in enumerate([*plain_words, *special])}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="w0"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="w0", bos_token="w1", eos_token="w2", pad_token="w0",
        additional_special_tokens=list(special),
    )  # fmt: skip
    fast.save_pretrained(folder)
    return fast


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
