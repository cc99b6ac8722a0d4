"""What the rows of vLLM's CPU tier depend on: the identity of the namespace they are kept in, or why there is none.

Rules:
1. The model is identified as the connector does it (identity.py). What else makes a row's bytes mean something else
   (row size, layers by group, chunk and hash sizes, parallel sizes, the machine's packing, vLLM's own version) takes
   part too: nobody here can look into a row.
2. vLLM's keys name tokens, salt, images and adapters by name. What they do not name for certain switches the tier off.
3. Attributes of vLLM's objects are read by name and nothing of vLLM is imported.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from prefixcache.identity.canonical import Value
from prefixcache.identity.fingerprint import IdentityError
from prefixcache.identity.layout import LayoutError
from prefixcache_client import Client, ForeignCache
from prefixcache_client.engine_settings import PREFIX, EngineSettings
from prefixcache_vllm.identity import CannotShareError, EngineIdentity, engine_identity
from prefixcache_vllm.options import Options, read_options

ENGINE: Final = "vllm"
_SAFE_HASHES: Final = {"sha256", "sha256_cbor"}
_TAKEN: Final = {each.name for each in fields(EngineSettings)} | {"ask_timeout_s", "load_timeout_s", "save_queue"}
_PARALLEL: Final = ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")


@dataclass(frozen=True, slots=True)
class Engine:
    """vLLM's config objects, and what tells its build and machine from others."""

    vllm_config: Any
    kv_cache_config: Any
    build: tuple[str, ...]


def tier_options(settings: Mapping[str, Any]) -> Options:
    """The settings of a tier's entry in `secondary_tiers`. Raises ValueError for one that means nothing here."""
    for name in settings:
        if name.removeprefix(PREFIX) not in _TAKEN or not name.startswith(PREFIX):
            known = ", ".join(PREFIX + each.name for each in fields(Options) if each.name in _TAKEN)
            raise ValueError(f"setting {name!r} means nothing to this tier; known are {known}")
    return read_options(settings)


def callers_configs() -> tuple[Any, Any]:
    """(vllm_config, kv_cache_config) of the engine that is being made.

    vLLM hands a tier a digest of its config without revision, quantisation and rotation. Whoever makes the tier has the
    whole of it, so it is looked up there. Raises CannotShareError.
    """
    frame = sys._getframe(1)
    while True:
        held = frame.f_locals
        if held.get("vllm_config") is not None and held.get("kv_cache_config") is not None:
            return held["vllm_config"], held["kv_cache_config"]
        if frame.f_back is None:
            raise CannotShareError("engine_unknown", "this vLLM does not show its config to whoever makes a tier")
        frame = frame.f_back


def chunk_cache(client: Client, engine: Engine, spec: Any, row_bytes: int, options: Options) -> ForeignCache:
    """The namespace of this engine's rows. `spec`: vLLM's OffloadingSpec. Raises CannotShareError."""
    _check(engine.vllm_config)
    model = engine_identity(engine.vllm_config, engine.kv_cache_config, options)
    try:
        namespace = client.foreign_namespace(
            ENGINE,
            model.identity.weights,
            (row_bytes, _chunk_tokens(spec)),
            form=_form(engine, model, spec),
            tenant=options.tenant,
            tenant_key=options.tenant_key(),
            label=f"{model.label} (CPU tier)",
        )
    except IdentityError as error:
        raise CannotShareError(error.reason, str(error)) from error
    except LayoutError as error:
        raise CannotShareError("layout_unknown", str(error)) from error
    return client.foreign(namespace)


def chained_groups(kv_cache_config: Any) -> frozenset[int]:
    """Groups of which a prefix needs every chunk, so that those in front should stay longest."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return frozenset(number for number, spec in enumerate(specs) if not getattr(spec, "sliding_window", None))


def _check(vllm_config: Any) -> None:
    if getattr(vllm_config, "lora_config", None) is not None:
        raise CannotShareError("lora_names", "vLLM's keys have adapters by name, and a name may come to mean another")
    multimodal = getattr(vllm_config.model_config, "multimodal_config", None)
    if multimodal is not None and not getattr(multimodal, "language_model_only", False):
        raise CannotShareError("media_names", "vLLM's keys have images by the names that it or a client gave them")
    algorithm = str(getattr(vllm_config.cache_config, "prefix_caching_hash_algo", "sha256"))
    if algorithm not in _SAFE_HASHES:
        raise CannotShareError("weak_hash", f"keys of {algorithm!r} may meet; use --prefix-caching-hash-algo sha256")


def _chunk_tokens(spec: Any) -> int:
    return int(spec.config.groups[0].tokens_per_block) * int(spec.config.cache.blocks_per_chunk)


def _form(engine: Engine, model: EngineIdentity, spec: Any) -> dict[str, Value]:
    config = spec.config
    groups: list[Value] = [
        [list(group.layer_names), int(group.tokens_per_block), int(getattr(group, "group_id", place))]
        for place, group in enumerate(config.groups)
    ]
    return {
        "model": model.identity.fingerprint(),
        "groups": groups,
        "blocks_per_chunk": int(config.cache.blocks_per_chunk),
        "tokens_per_hash": int(config.cache.tokens_per_hash),
        "dtype": str(config.model.dtype),
        "kv_layout": str(getattr(config, "kv_cache_layout", None) or ""),
        "parallel": [int(getattr(config.parallel, name)) for name in _PARALLEL],
        "replicated": bool(config.replicated_layout),
        "canonical": bool(getattr(config, "canonical_layout", False)),
        "hash": str(engine.vllm_config.cache_config.prefix_caching_hash_algo),
        "build": list(engine.build),
    }
