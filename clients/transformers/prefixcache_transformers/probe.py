"""What a model's KV cache looks like, found by running one token through it.

The truth is in the tensors: configs spell heads and head sizes in many ways, and some models differ layer by layer.
What belongs here: model -> Layout. It must not know where blocks are kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from prefixcache.identity.layout import GroupKind, LayerGroup, Layout
from prefixcache_transformers import compat

__all__ = ["CacheShape", "UnsupportedModelError", "probe"]


_NOTHING_KEPT = (
    "the model puts nothing into the cache it is given. Kernels that keep KV of their own cannot be cached: switch them"
    " off (with DeepSpeed, replace_with_kernel_inject=False)"
)


class UnsupportedModelError(ValueError):
    """A model whose cache holds something else than keys and values of tokens. `reason` is a short, fixed word."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The layout of a model's blocks, and where its layers' tensors live."""

    layout: Layout
    dtype: torch.dtype
    devices: tuple[torch.device, ...]  # by group


def probe(model: PreTrainedModel) -> CacheShape:
    """Run one token through `model` and read its cache. Raises UnsupportedModelError.

    Layers without states of their own (shared KV) are left out. Layers of equal shape are one group.
    """
    cache = compat.new_cache(model)
    device = next(model.parameters()).device
    with torch.no_grad():
        arguments = {compat.forward_cache_keyword(model): cache, "use_cache": True}
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device), **arguments)
    groups: list[LayerGroup] = []
    devices: dict[int, torch.device] = {}
    dtypes: set[torch.dtype] = set()
    for index, layer in enumerate(cache.layers):
        if type(layer) not in (compat.DynamicLayer, compat.RecordingSlidingLayer):
            if getattr(layer, "is_initialized", False) or not _is_placeholder(layer):
                raise UnsupportedModelError("unsupported_cache_layer", f"layer {index} is a {type(layer).__name__}")
            continue
        if not layer.is_initialized:
            continue
        devices[index] = layer.keys.device
        dtypes.update((layer.keys.dtype, layer.values.dtype))
        groups.append(_group(index, layer))
    if not groups:
        raise UnsupportedModelError("no_kv_cache", _NOTHING_KEPT)
    if len(dtypes) != 1:
        raise UnsupportedModelError("mixed_kv_dtypes", f"{sorted(map(str, dtypes))}")
    layout = Layout.of(*groups)
    by_group = tuple(devices[group.layers[0]] for group in layout.groups)
    return CacheShape(layout, dtypes.pop(), by_group)


def _is_placeholder(layer: object) -> bool:
    return type(layer).__name__ == "DummyLayer"  # 5.x's layer for models that share KV between layers


def _group(index: int, layer: compat.DynamicLayer) -> LayerGroup:
    window = compat.sliding_window(layer)
    return LayerGroup(
        kind=GroupKind.SLIDING if window else GroupKind.FULL,
        layers=(index,),
        kv_heads=layer.keys.shape[1],
        k_dim=layer.keys.shape[-1],
        v_dim=layer.values.shape[-1],
        dtype=str(layer.keys.dtype).removeprefix("torch."),
        window_tokens=window,
    )
