"""SGLang's own memory pools, on the CPU: what its package needs for that, and how they are made.

Its wheel wants CUDA's libraries. Those it only imports (torchvision, triton) are replaced by modules that hold anything
and do nothing; nothing that computes or keeps KV is replaced.
"""

import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

ABSENT = {"torchvision", "triton", "IPython"}


class _Anything(types.ModuleType):
    """A module in which every name is something: a class where it looks like one, else a decorator that changes
    nothing."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []
        self.__version__ = "3.0.0"
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made: Any = type(name, (), {}) if name[0].isupper() else _Anything(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else lambda wrapped: wrapped


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


@cache
def prepare() -> None:
    """Make SGLang's pools importable in this process."""
    import transformers.utils
    import transformers.utils.import_utils

    for module in (transformers.utils, transformers.utils.import_utils):
        setattr(module, "is_torchvision_available", lambda: False)  # noqa: B010 # a function of theirs, replaced
    sys.meta_path.insert(0, _Finder())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it says about devices that are not here
        import sglang.srt.managers.cache_controller
        import sglang.srt.managers.scheduler_components.weight_updater  # noqa: F401


@dataclass(frozen=True)
class Shape:
    """Of one rank's pool."""

    layers: int = 3
    heads: int = 4
    dim: int = 16
    page: int = 8
    pages: int = 24
    first_layer: int = 0
    v_dim: int = 0
    dtype: str = "bfloat16"


def mha_pool(layout: str, shape: Shape = Shape(), drafts: int = 0, head_groups: int = 1) -> Any:  # frozen
    """SGLang's host pool for K and V of heads, beside a device pool that is in host memory as well."""
    prepare()
    from sglang.srt.mem_cache.pool_host.mha import get_mha_host_pool_cls

    device = mha_device(shape)
    info = device.get_device_pool_infos()[0].buffer_info
    draft = Shape(1, shape.heads, shape.dim, shape.page, shape.pages, v_dim=shape.v_dim, dtype=shape.dtype)
    groups = {"head_group_num": head_groups} if head_groups > 1 else {}
    return get_mha_host_pool_cls(info)(
        info,
        1.0,
        0,
        shape.page,
        layout,
        pin_memory=False,
        device_capacity_tokens=shape.page * shape.pages,
        start_layer=shape.first_layer,
        end_layer=shape.first_layer + shape.layers,
        draft_buffer_infos=tuple(mha_device(draft).get_device_pool_infos()[0].buffer_info for _ in range(drafts)),
        **groups,
    )


def mha_device(shape: Shape) -> Any:
    """SGLang's device pool, in host memory."""
    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    return MHATokenToKVPool(
        shape.page * shape.pages,
        shape.page,
        getattr(torch, shape.dtype),
        shape.heads,
        shape.dim,
        shape.layers,
        "cpu",
        False,
        v_head_dim=shape.v_dim or None,
        start_layer=shape.first_layer,
        end_layer=shape.first_layer + shape.layers,
    )


def mla_pool(layout: str, shape: Shape = Shape(heads=1), rope: int = 8) -> Any:  # frozen
    """SGLang's host pool for a latent that all ranks hold alike: `dim` values and `rope` rotated ones."""
    prepare()
    import torch
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    tokens, last = shape.page * shape.pages, shape.first_layer + shape.layers
    device = MLATokenToKVPool(
        tokens, shape.page, getattr(torch, shape.dtype), shape.dim, rope, shape.layers, "cpu", False,
        shape.first_layer, last,
    )  # fmt: skip
    info = device.get_device_pool_infos()[0].buffer_info
    return MLATokenToKVPoolHost(
        info, 1.0, 0, shape.page, layout, pin_memory=False, device_capacity_tokens=tokens,
        start_layer=shape.first_layer, end_layer=last, target_layer_num=shape.layers,
    )  # fmt: skip


def mamba_pool(slots: int = 12, layers: int = 2, side_state: bool = False) -> Any:
    """SGLang's host pool for states, one slot each; with `side_state` one that has no runs to tell."""
    prepare()
    import torch
    from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost

    info = MambaStateBufferInfo(
        temporal=torch.zeros(layers, slots, 4, 6, dtype=torch.float32),
        conv=(torch.zeros(layers, slots, 5, 3, dtype=torch.bfloat16),),
        extra_checkpoint_buffers=(torch.zeros(slots, 7, dtype=torch.float32),) if side_state else (),
    )
    return MambaPoolHost(info, 1.0, 0, device_capacity=slots, pin_memory=False, layout="page_first")


def config(**said: Any) -> Any:
    """What SGLang tells its backends of itself."""
    prepare()
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    fields: dict[str, Any] = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
        "is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": False, "model_name": "served",
    }  # fmt: skip
    return HiCacheStorageConfig(**{**fields, **said})


def backend(pool: Any, extra: dict[str, Any], **said: Any) -> Any:
    """Our backend as SGLang's factory makes it, with its main pool registered."""
    prepare()
    from sglang.srt.mem_cache.storage import StorageBackendFactory

    named = {
        "backend_name": "prefixcache", "module_path": "prefixcache_sglang", "class_name": "PrefixCacheStorage",
        "interface_v1": 1, **extra,
    }  # fmt: skip
    made = StorageBackendFactory.create_backend("dynamic", config(extra_config=named, **said), pool)
    made.register_mem_pool_host(pool)
    return made


def fill(pool: Any, seed: int) -> None:
    """Random bytes in every buffer of a pool."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for buffer in buffers(pool):
        flat = buffer.view(torch.uint8).reshape(-1)
        flat.copy_(torch.randint(0, 256, flat.shape, generator=generator, dtype=torch.uint8))


def buffers(pool: Any) -> list[Any]:
    """The tensors that hold a pool's bytes."""
    kept = pool.kv_buffer
    return list(kept) if isinstance(kept, list | tuple) else [kept]


def indices(pool: Any, pages: Sequence[int]) -> Any:
    """SGLang's host indices of these pages: every token's."""
    import torch

    size = pool.page_size
    return torch.cat([torch.arange(page * size, (page + 1) * size) for page in pages])


def page_of(pool: Any, number: int) -> bytes:
    """The bytes of one page as [K or V, layer, token, head, value], by SGLang's own description of its layouts."""
    buffer, size, layout = pool.kv_buffer, pool.page_size, pool.layout
    tokens = slice(number * size, number * size + size)
    if isinstance(buffer, tuple):
        return b"".join(
            raw(each[tokens].transpose(0, 1) if layout == "page_first" else each[number]) for each in buffer
        )
    if not hasattr(pool, "v_head_dim"):
        return raw({
            "layer_first": lambda: buffer[:, tokens],
            "page_first": lambda: buffer[tokens].transpose(0, 1),
        }.get(layout, lambda: buffer[number])())  # fmt: skip
    views = {
        "layer_first": lambda: buffer[:, :, tokens],
        "page_first": lambda: buffer[:, tokens].permute(0, 2, 1, 3, 4),
        "page_first_direct": lambda: buffer[:, number],
        "page_head": lambda: buffer[:, number].permute(0, 3, 2, 1, 4),
        "page_unified": lambda: buffer[number].permute(2, 1, 3, 0, 4, 5),
    }
    return raw(views[layout]())


def raw(tensor: Any) -> bytes:
    """The bytes of a tensor in its logical order."""
    import torch

    return bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())


def keys(count: int, name: str = "") -> list[str]:
    """Page hashes as SGLang makes them: a chain over tokens."""
    prepare()
    from sglang.srt.mem_cache.utils import get_hash_str

    made, before = [], None
    for number in range(count):
        before = get_hash_str([number, *name.encode()], before)
        made.append(str(before))
    return made
