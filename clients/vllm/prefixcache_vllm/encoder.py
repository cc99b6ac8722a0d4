"""What the KV of an image (or video, or sound) depends on beside its processed data and the model's weights.

Rules: what is not known to be without influence takes part; two digests too many lose sharing of images, one too few
loses truth. Text is not concerned. Attributes are read by name; nothing of vLLM is imported.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_FILES: Final = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Some models scale pixels on the device, by numbers that only these files have."""
_SETTINGS: Final = ("mm_processor_kwargs", "mm_device_do_normalize", "video_pruning_rate", "video_pruning_method")
_LEFT_OUT: Final = frozenset({"transformers_version", "_name_or_path", "dtype", "torch_dtype"})
"""Names, and what is in the namespace."""


@dataclass(frozen=True, slots=True)
class Encoder:
    """`settings`: 32 bytes over all that takes part. `refused`: why no item of this engine can be told from others; ""
    where they can."""

    settings: bytes
    refused: str = ""


NO_ENCODER: Final = Encoder(bytes(32))


def encoder_of(vllm_config: Any, folder: Path) -> Encoder:
    """`folder`: the checkpoint's."""
    model = vllm_config.model_config
    multimodal = getattr(model, "multimodal_config", None)
    if multimodal is None:
        return NO_ENCODER
    refused = ""
    if getattr(vllm_config, "ec_transfer_config", None) is not None:
        refused = "media_from_elsewhere"  # what encoders of other engines made, by names
    elif getattr(multimodal, "mm_encoder_attn_dtype", None) is not None:
        refused = "media_scales"  # of what the encoder saw before
    settings = {name: getattr(multimodal, name, None) for name in _SETTINGS}
    files = {name: (folder / name).read_bytes().hex() for name in _FILES if (folder / name).is_file()}
    parts = _plain([settings, _beside_the_text(model.hf_config), files])
    return Encoder(hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest(), refused)


def _beside_the_text(config: Any) -> Mapping[str, Any]:
    """What a model's config says that is not about its text; everything, where that is no part of its own."""
    stated = config if isinstance(config, Mapping) else config.to_dict()
    return {name: value for name, value in stated.items() if name != "text_config"}


def _plain(value: Any) -> Any:
    """Maps with strings as keys, lists, and strings of what is neither."""
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items() if name not in _LEFT_OUT}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return repr(value)
