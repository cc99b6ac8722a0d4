"""What a running model's KV depends on: its weights as they are now, its adapters, its config.

Rules:
1. Sharing with other engines goes by the digest of the checkpoint's files. It is used only where a sample of every
   tensor in memory is what the files say; merged adapters, training and quantised loading get a digest of their own.
2. LoRA adapters that are active are digested apart from the base; so is how strongly they are mixed in.
3. What no checkpoint holds and the KV depends on all the same, the rotation's frequencies, is looked at as well.

What belongs here: model -> NamespaceIdentity. peft is looked at through its layers' attributes and never imported.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from prefixcache.identity.fingerprint import NamespaceIdentity
from prefixcache.identity.model import namespace_from_hf
from prefixcache.identity.tensors import TensorFileError, TensorRecord, read_tensors, weight_files
from prefixcache.identity.weights import state_dict_digest, weights_digest
from prefixcache_transformers.probe import CacheShape
from prefixcache_transformers.rotation import changed_rotation

__all__ = ["AdapterState", "adapter_state", "model_identity"]

AdapterState = tuple[tuple[str, ...], tuple[str, ...]]
"""(active adapters, adapters merged into the weights) by name; both empty for a plain model."""

_SAMPLE_ELEMENTS = 64
_LORA = ".lora_"


def adapter_state(model: PreTrainedModel) -> AdapterState:
    """Which adapters act on the model now. Cheap enough for every request."""
    if "peft" not in sys.modules:
        return (), ()
    for layer in _adapter_layers(model):
        merged = tuple(layer.merged_adapters)
        active = () if layer.disable_adapters else tuple(layer.active_adapters)
        return tuple(name for name in active if name not in merged), merged
    return (), ()


def model_identity(
    model: PreTrainedModel, shape: CacheShape, *, block_tokens: int, epoch: int, tenant: str, codec: str = "raw"
) -> NamespaceIdentity:
    """The identity of the KV that `model` computes now.

    Raises ConfigError for a model whose KV cannot be shared, such as one whose rotation depends on the prompt's length.
    """
    active, _ = adapter_state(model)
    tensors = {name: tensor for name, tensor in _plain_names(model.state_dict()).items() if _LORA not in name}
    quantisation = getattr(model.config, "quantization_config", None)
    rotation = changed_rotation(model)
    namespace = namespace_from_hf(
        model.config,
        _weights(model, tensors),
        shape.dtype,
        layout=shape.layout,
        block_tokens=block_tokens,
        epoch=epoch,
        tenant=tenant,
        codec=codec,
        compute_dtype=str(model.dtype),
        lora=_lora_digest(model, active) if active else b"",
        overrides={"rotation": rotation} if rotation else {},
        quantisation="none" if quantisation is None else _quantisation_name(quantisation),
    )
    return namespace.identity


def _weights(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> bytes:
    folder = _checkpoint_folder(model)
    if folder is not None:
        try:
            if _same_as_files(folder, tensors):
                return weights_digest(folder)
        except (TensorFileError, OSError):
            pass  # no safetensors there: what is in memory is the truth anyway
    return state_dict_digest(tensors)


def _checkpoint_folder(model: PreTrainedModel) -> Path | None:
    """Where the weights were loaded from, when that is on this disk."""
    name = str(getattr(model.config, "_name_or_path", "") or "")
    if not name:
        return None
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import try_to_load_from_cache

    for file in ("model.safetensors.index.json", "model.safetensors"):
        found = try_to_load_from_cache(name, file, revision=getattr(model.config, "_commit_hash", None))
        if isinstance(found, str):
            return Path(found).parent
    return None


def _same_as_files(folder: Path, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether every tensor of the files is in memory under its name, with the same values at start, middle and end."""
    with ExitStack() as stack:
        return all(
            record.name in tensors and _same_samples(record, tensors[record.name])
            for record in read_tensors(weight_files(folder), stack)
        )


def _same_samples(record: TensorRecord, tensor: torch.Tensor) -> bool:
    dtype = getattr(torch, record.dtype, None)
    if not isinstance(dtype, torch.dtype) or tuple(tensor.shape) != record.shape:
        return False
    count = min(_SAMPLE_ELEMENTS, tensor.numel())
    flat = tensor.detach().reshape(-1)
    for first in {0, (tensor.numel() - count) // 2, tensor.numel() - count}:
        content = bytearray(record.read(first * dtype.itemsize, count * dtype.itemsize))
        stored = torch.frombuffer(content, dtype=dtype).to(tensor.dtype) if content else flat[:0].cpu()
        if not torch.equal(stored, flat[first : first + count].cpu()):
            return False
    return True


def _plain_names(state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state dict under the names a model without peft's wrappers has."""
    return {name.removeprefix("base_model.model.").replace(".base_layer.", "."): t for name, t in state_dict.items()}


def _adapter_layers(model: PreTrainedModel) -> Iterator[Any]:
    return (layer for layer in model.modules() if hasattr(layer, "merged_adapters") and hasattr(layer, "base_layer"))


def _lora_digest(model: PreTrainedModel, active: tuple[str, ...]) -> bytes:
    """32 bytes over the tensors of the active adapters and their scaling, layer by layer."""
    tensors = {
        name: tensor
        for name, tensor in _plain_names(model.state_dict()).items()
        if _LORA in name and any(f".{adapter}" in name for adapter in active)
    }
    scaling = [[float(layer.scaling.get(name, 0.0)) for name in active] for layer in _adapter_layers(model)]
    return hashlib.sha256(state_dict_digest(tensors) + repr((len(active), scaling)).encode()).digest()


def _quantisation_name(quantisation: Any) -> str:
    settings = quantisation if isinstance(quantisation, Mapping) else quantisation.to_dict()
    return repr(sorted((str(name), str(value)) for name, value in settings.items()))
