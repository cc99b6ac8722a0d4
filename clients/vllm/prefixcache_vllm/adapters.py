"""Which bytes stand behind an adapter's number: under that vLLM keeps a LoRA adapter, whatever name and files it has.

Rules:
1. An adapter is the bytes its files had when its number was first seen. Files that changed since, or other files under
   the same number, say nothing about what the workers have: such requests are left alone (`lora_changed`).
2. Where a request has its adapter loaded in place, the workers read the files anew in every step it runs in: so are
   they looked at here, and what runs with bytes that were replaced is not stored any more (`holds`).
3. What the engine keeps adapters as (`form`) takes part.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from prefixcache.identity.digestcache import Stamp, file_stamp
from prefixcache.identity.tensors import TensorFileError
from prefixcache.identity.weights import weights_digest
from prefixcache_vllm.identity import CannotShareError

CHANGED: Final = "lora_changed"
_FILES: Final = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(frozen=True, slots=True)
class _Adapter:
    folder: Path
    stamp: Stamp
    digest: bytes


class Adapters:
    """See the rules."""

    def __init__(self, form: str = "") -> None:
        self._form = form
        self._known: dict[int, _Adapter] = {}

    def digest(self, lora: Any) -> bytes:
        """32 bytes for vLLM's LoRARequest. Raises CannotShareError."""
        number, folder = int(lora.lora_int_id), Path(str(lora.lora_path))
        known = self._known.get(number)
        if known is not None and _same(known, folder):
            return known.digest
        if known is not None and not _in_place(lora):
            raise CannotShareError(CHANGED, f"what is in {folder} is not what adapter {number} was made of")
        self._known[number] = read = self._read(folder)
        return read.digest

    def holds(self, lora: Any, digest: bytes) -> bool:
        """Whether what runs under an adapter's number is still this."""
        known = self._known.get(int(lora.lora_int_id))
        return known is not None and known.digest == digest and (not _in_place(lora) or _same(known, known.folder))

    def _read(self, folder: Path) -> _Adapter:
        before = _stamp(folder)
        digest = lora_digest(folder, self._form)
        if before is None or before != _stamp(folder):
            raise CannotShareError(CHANGED, f"{folder} was written to while it was read")
        return _Adapter(folder, before, digest)


def lora_digest(folder: Path, form: str = "") -> bytes:
    """32 bytes over an adapter's weights and settings. Raises CannotShareError."""
    try:
        config = (folder / _FILES[0]).read_bytes()
        weights = weights_digest(folder / _FILES[1])
    except (OSError, TensorFileError) as error:
        raise CannotShareError("lora_unreadable", f"{folder}: {error}") from error
    return hashlib.sha256(weights + hashlib.sha256(config).digest() + form.encode()).digest()


def _same(known: _Adapter, folder: Path) -> bool:
    """Whether these are the files it was made of. Files that are gone were not replaced."""
    if folder != known.folder:
        return False
    now = _stamp(folder)
    return now is None or now == known.stamp


def _stamp(folder: Path) -> Stamp | None:
    try:
        return file_stamp([folder / name for name in _FILES])
    except OSError:
        return None


def _in_place(lora: Any) -> bool:
    return bool(getattr(lora, "load_inplace", False))
