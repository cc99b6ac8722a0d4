"""Whether a model rotates keys as its config says.

A rotation's frequencies are buffers that no checkpoint holds: they are computed in float32 when the model is made.
`model.half()`, `model.to(torch.bfloat16)` and DeepSpeed's `init_inference` cast them with everything else, and then
every key is another than the one that a model loaded in that dtype computes (frequencies are off by up to 0.4%, angles
by whole turns where prompts are long). Such a model's KV is its like's only.

What belongs here: looking at buffers. It must not know what a namespace is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch

__all__ = ["changed_rotation"]

_FREQUENCIES = "inv_freq"
_CLOSE = 1e-5
"""A device computes powers to the last bit its own way; a cast to float16 loses 50 times as much, to bfloat16 400."""


def changed_rotation(model: torch.nn.Module) -> bytes:
    """b"" where all frequencies are those of the config, else 32 bytes that say what they are instead."""
    changed = [
        (name, buffer) for name, module in model.named_modules() for buffer in _buffers(module) if _changed(module)
    ]  # fmt: skip
    if not changed:
        return b""
    digest = hashlib.sha256()
    for name, buffer in changed:
        digest.update(f"{name} {buffer.dtype} ".encode())
        digest.update(buffer.detach().double().cpu().numpy().tobytes())
    return digest.digest()


def _buffers(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    for name, buffer in sorted(module.named_buffers(recurse=False)):
        if name.endswith(_FREQUENCIES) and not name.startswith("original"):
            yield buffer


def _changed(module: torch.nn.Module) -> bool:
    frequencies = list(_buffers(module))
    if any(buffer.dtype is not torch.float32 for buffer in frequencies):
        return True
    config = getattr(module, "config", None)
    if config is None:
        return False  # nothing to hold it against
    try:
        as_made = list(_buffers(type(module)(config)))
    except (TypeError, AttributeError, KeyError, ValueError):
        return False  # made in another way; its dtype says that it was not cast
    return len(as_made) != len(frequencies) or not all(
        torch.allclose(buffer.cpu(), made.cpu(), rtol=_CLOSE, atol=0.0)
        for buffer, made in zip(frequencies, as_made, strict=True)
    )
