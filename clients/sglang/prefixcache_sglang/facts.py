"""What a running SGLang's KV depends on, beside the shapes of its pools: its weights and its settings.

Rules:
1. Attributes are read by name and nothing of SGLang is imported, so that every version will do.
2. What cannot be said for certain switches the cache off, with a reason: a served name says nothing about weights.
3. Blocks are shared among SGLang servers only (the keys are SGLang's), so settings take part as SGLang spells them:
   one more difference than needed costs hits, one less gives wrong bytes.

It must not know pools or tensors.
"""

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from prefixcache.identity.canonical import Value
from prefixcache.identity.tensors import TensorFileError
from prefixcache.identity.weights import weights_digest
from prefixcache_client.engine_settings import PREFIX
from prefixcache_sglang.options import Options

# Ways to load weights that end in what the checkpoint's files say.
_FROM_FILES: Final = {"auto", "safetensors", "fastsafetensors", "mistral", "layered"}
# Settings that change KV, or how a page is laid out.
_SETTINGS: Final = (
    "dtype", "kv_cache_dtype", "quantization", "json_model_override_args", "torchao_config", "attention_backend",
    "prefill_attention_backend", "decode_attention_backend", "model_impl", "context_length", "device",
    "rope_scaling", "enable_deterministic_inference",
)  # fmt: skip
_FILES: Final = ("quantization_param_path",)


class CannotShareError(ValueError):
    """Why some of this engine's KV is not cached. `reason` is a short, fixed word."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """`weights`: digest. `settings`: all else that KV of any pool depends on. `label`: for people."""

    weights: bytes
    settings: Mapping[str, Value]
    label: str
    draft_model: str = ""
    draft: dict[str, str] = field(default_factory=dict)

    def draft_digest(self) -> str:
        """The draft model's weights, "" where it has none of its own. Raises CannotShareError."""
        if self.draft_model and "weights" not in self.draft:
            self.draft["weights"] = _digest(checkpoint_folder(self.draft_model, None)).hex()
        return self.draft.get("weights", "")


def running_settings() -> Any:
    """The server's arguments of the engine in this process; None where there is no engine, or it does not tell."""
    for module, name in (
        ("sglang.srt.runtime_context", "get_server_args"),
        ("sglang.srt.server_args", "get_global_server_args"),
    ):
        told = getattr(sys.modules.get(module), name, None)
        if told is not None:
            try:
                return told()
            except (ValueError, RuntimeError):
                continue  # none is set in this process, or this version has it elsewhere
    return None


def engine_facts(model_name: str | None, settings: Any, options: Options) -> EngineFacts:
    """What the engine says of itself. `settings`: its server arguments, or None. Raises CannotShareError."""
    path = options.model or str(getattr(settings, "model_path", "") or "")
    if not path:
        raise CannotShareError(
            "weights_unknown",
            f"this SGLang does not tell which weights it serves as {model_name!r}; "
            f'add "{PREFIX}model": "/its/folder" to the extra config',
        )
    load_format = str(
        getattr(getattr(settings, "load_format", "auto"), "value", getattr(settings, "load_format", "auto"))
    )
    if load_format not in _FROM_FILES:
        raise CannotShareError("weights_unknown", f"weights of load format {load_format!r} have no digest")
    folder = checkpoint_folder(path, getattr(settings, "revision", None))
    said: dict[str, Value] = {name: _text(getattr(settings, name, None)) for name in _SETTINGS}
    said |= {name: _file_digest(getattr(settings, name, None)) for name in _FILES}
    said["config"] = _file_digest(folder / "config.json")
    draft = str(getattr(settings, "speculative_draft_model_path", "") or "")
    return EngineFacts(_digest(folder), said, str(model_name or folder.name), draft)


def checkpoint_folder(name: str, revision: str | None) -> Path:
    """Where the safetensors of a model are, by its folder or by its hub's name. Raises CannotShareError."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import try_to_load_from_cache  # SGLang has it downloaded

    for file in ("model.safetensors.index.json", "model.safetensors"):
        try:
            found = try_to_load_from_cache(name, file, revision=revision)
        except ValueError:  # no name of a hub's
            break
        if isinstance(found, str):
            return Path(found).parent
    raise CannotShareError(
        "weights_unknown", f"no safetensors of {name} on this disk; set {PREFIX}model to their folder"
    )


def _digest(folder: Path) -> bytes:
    try:
        return weights_digest(folder)
    except (TensorFileError, ValueError, OSError) as error:
        raise CannotShareError("weights_unknown", str(error)) from error


def _file_digest(path: str | Path | None) -> str:
    if path is None:
        return ""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise CannotShareError("settings_unreadable", str(error)) from error


def _text(value: object) -> str:
    """A setting in one form, whatever its type."""
    if isinstance(value, Mapping):
        return json.dumps(value, sort_keys=True, default=str)
    return str(getattr(value, "value", value))
