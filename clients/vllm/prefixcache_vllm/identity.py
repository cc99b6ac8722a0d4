"""What a running vLLM's KV depends on: its config as it is, to the identity every engine of the same model has.

Rules:
1. Attributes of vLLM's config objects are read by name and nothing of vLLM is imported, so that every version will do.
2. What cannot be said for certain switches the cache off, with a reason: weights that are not on this disk, layers
   whose KV is something else, parallel forms that cut blocks in other ways.
3. The layout is the checkpoint's, as in all adapters, and checked against the KV cache vLLM really has.
4. Layers of a draft model (speculative decoding) are not the model's: they are found by name, or by a number behind the
   model's last, and take no part (see draft_identity). Two layers that cannot be told apart switch the cache off.

It must not know tensors.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from prefixcache.identity.epochs import new_epoch
from prefixcache.identity.fingerprint import IdentityError, NamespaceIdentity
from prefixcache.identity.hfconfig import ConfigError
from prefixcache.identity.layout import DTYPE_BITS, GroupKind, Layout, LayoutError
from prefixcache.identity.model import namespace_from_hf
from prefixcache.identity.tensors import TensorFileError
from prefixcache.identity.weights import weights_digest
from prefixcache_client.blocks import BlockFormat
from prefixcache_offload.codecs.formats import RAW, CodecError
from prefixcache_vllm.encoder import NO_ENCODER, Encoder, encoder_of
from prefixcache_vllm.options import Options
from prefixcache_vllm.ranks import Rank, splits

# Ways to load weights that end in what the checkpoint's files say.
_FROM_FILES: Final = {"auto", "hf", "safetensors", "fastsafetensors", "mistral", "instanttensor"}
_KV_DTYPES: Final[Mapping[str, str]] = {
    "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2",
    "bfloat16": "bfloat16", "float16": "float16", "half": "float16", "float": "float32", "float32": "float32",
}  # fmt: skip
_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")
_DRAFT: Final = "draft_model."
"""How vLLM begins the names of a draft model's layers, which are numbered from 0 like the model's own."""

Takes = Callable[[str], bool]
"""Whether a layer of that name is one of the model's."""


class CannotShareError(ValueError):
    """Why this engine's KV is not cached. `reason` is a short, fixed word."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class GroupPages:
    """One of vLLM's KV cache groups: model layers by the name vLLM gives them, tokens a page."""

    layers: Mapping[str, int]
    page_tokens: int


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """The identity of an engine's KV, and how its pages are grouped."""

    identity: NamespaceIdentity
    groups: tuple[GroupPages, ...]
    label: str
    draft_layers: int = 0
    """Layers of a draft model beside it."""
    draft_off: str = ""
    """Why the KV of those layers is not kept; "" where it is, or where there are none."""
    encoder: Encoder = NO_ENCODER
    """What turns images and the like into KV."""
    lora_form: str = ""
    """What LoRA adapters are kept as."""
    silent_ranks: bool = False
    """Whether some ranks store nothing, because others have the same heads."""

    @property
    def hybrid(self) -> bool:
        """Whether some layers keep only a window, so that a restored prefix cannot be cut anywhere."""
        return any(group.kind is not GroupKind.FULL for group in self.identity.layout.groups)

    def loads_in_step(self, options: Options) -> bool:
        """Whether loads happen inside a step. Of several groups they cannot: a failure there is told by page, and the
        same page numbers are in every group. Nor where a rank stores nothing: what a step computes behind a load that
        failed on one rank stays invisible only because that rank's share of it never comes."""
        return options.load == "sync" and len(self.groups) == 1 and not self.silent_ranks


@dataclass(frozen=True, slots=True)
class RunModel:
    """One of an engine's models. `cache_dtype`: vLLM's setting for its KV cache. `takes`: which layers it has."""

    config: Any
    cache_dtype: str
    takes: Takes


def engine_identity(vllm_config: Any, kv_cache_config: Any, options: Options) -> EngineIdentity:
    """What this engine's KV depends on. Raises CannotShareError."""
    main = RunModel(vllm_config.model_config, str(vllm_config.cache_config.cache_dtype), _is_the_models)
    found = model_identity(vllm_config, kv_cache_config, options, main)
    known = sum(len(group.layers) for group in found.groups)
    total = sum(len(group.layer_names) for group in kv_cache_config.kv_cache_groups)
    return dataclasses.replace(
        found,
        draft_layers=total - known,
        encoder=encoder_of(vllm_config, _checkpoint_folder(main.config)),
        lora_form=str(getattr(getattr(vllm_config, "lora_config", None), "lora_dtype", "")),
        silent_ranks=int(vllm_config.parallel_config.tensor_parallel_size)
        > min(group.kv_heads for group in found.identity.layout.groups),
    )


def model_identity(vllm_config: Any, kv_cache_config: Any, options: Options, runs: RunModel) -> EngineIdentity:
    """What the KV of one of the engine's models depends on. Raises CannotShareError."""
    model = runs.config
    stages = _check_parallel(vllm_config.parallel_config, kv_cache_config)
    specs = _specs(kv_cache_config, runs.takes)
    try:
        namespace = namespace_from_hf(
            model.hf_config,
            _weights(vllm_config, model),
            _kv_dtype(model, runs.cache_dtype),
            block_tokens=options.block_tokens,
            tenant=options.tenant,
            compute_dtype=str(model.dtype),
            quantisation=_quantisation(model),
            k_scales="dynamic" if getattr(vllm_config.cache_config, "calculate_kv_scales", False) else (),
            fixed_length=int(model.max_model_len),
        )
    except (ConfigError, IdentityError) as error:
        raise CannotShareError(error.reason, str(error)) from error
    except LayoutError as error:
        raise CannotShareError("layout_unknown", str(error)) from error
    ranks = int(vllm_config.parallel_config.tensor_parallel_size)
    _check_layout(namespace.layout, specs, ranks, some=stages > 1)
    identity = namespace.identity if options.codec == RAW else _coded(namespace.identity, options.codec)
    groups = tuple(
        GroupPages(_layers(group.layer_names, namespace.layout, runs.takes), int(group.kv_cache_spec.block_size))
        for group in kv_cache_config.kv_cache_groups
    )
    return EngineIdentity(identity, groups, str(getattr(model, "served_model_name", "") or model.model))


def is_draft(layer: str) -> bool:
    """Whether a layer is a draft model's by its name."""
    return layer.startswith(_DRAFT)


def _is_the_models(layer: str) -> bool:
    return not is_draft(layer)


def in_new_epoch(identity: NamespaceIdentity) -> NamespaceIdentity:
    """The identity after the weights were changed in place: equal to no other, in this process or elsewhere."""
    return dataclasses.replace(identity, weights_epoch=new_epoch())


def layer_index(name: str) -> int | None:
    """The model layer in a name such as `model.layers.3.self_attn.attn`; None where there is none, or more than one."""
    found = _LAYER.findall(name)
    return int(found[0]) if len(found) == 1 else None


def _weights(vllm_config: Any, model: Any) -> bytes:
    load_format = str(getattr(vllm_config.load_config.load_format, "value", vllm_config.load_config.load_format))
    if load_format not in _FROM_FILES:
        raise CannotShareError("weights_unknown", f"weights of load format {load_format!r} have no digest")
    try:
        return weights_digest(_checkpoint_folder(model))
    except (TensorFileError, OSError) as error:
        raise CannotShareError("weights_unknown", str(error)) from error


def _checkpoint_folder(model: Any) -> Path:
    name = str(getattr(model, "model_weights", "") or model.model)
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import try_to_load_from_cache  # a model by its hub's name: vLLM has it downloaded

    for file in ("model.safetensors.index.json", "model.safetensors"):
        found = try_to_load_from_cache(name, file, revision=getattr(model, "revision", None))
        if isinstance(found, str):
            return Path(found).parent
    raise CannotShareError("weights_unknown", f"no safetensors of {name} on this disk")


def _coded(identity: NamespaceIdentity, codec: str) -> NamespaceIdentity:
    """Raises CannotShareError for KV that has no such form."""
    try:
        coded = dataclasses.replace(identity, codec=codec)
        BlockFormat(coded.layout, coded.block_tokens, codec)
    except (IdentityError, CodecError) as error:
        raise CannotShareError("codec_unsupported", str(error)) from error
    return coded


def _kv_dtype(model: Any, stated: str) -> str:
    if stated == "auto":
        return str(model.dtype)
    if stated not in _KV_DTYPES:
        raise CannotShareError("kv_dtype_unknown", f"a KV cache of {stated!r} is not understood")
    return _KV_DTYPES[stated]


def _quantisation(model: Any) -> str:
    if not getattr(model, "quantization", None):
        return "none"
    settings = getattr(model.hf_config, "quantization_config", None)
    listed = sorted((str(key), str(value)) for key, value in settings.items()) if isinstance(settings, Mapping) else ""
    return repr(("vllm", str(model.quantization), listed))


def _check_parallel(parallel: Any, kv_cache_config: Any) -> int:
    """How many stages its pipeline has. Raises CannotShareError for forms that cut blocks in other ways."""
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if int(getattr(parallel, name, 1)) > 1:
            raise CannotShareError(name.removesuffix("_size"), f"{name} above 1 is not supported yet")
    stages = int(getattr(parallel, "pipeline_parallel_size", 1))
    if stages > 1 and len(kv_cache_config.kv_cache_groups) > 1:
        raise CannotShareError(
            "pipeline_parallel", "stages of models with several KV cache groups are not supported yet"
        )
    return stages


@dataclass(frozen=True, slots=True)
class _Spec:
    layer: int
    heads: int
    head_size: int
    itemsize: int


def _specs(kv_cache_config: Any, takes: Takes) -> list[_Spec]:
    """What vLLM keeps for each layer. Raises CannotShareError for layers that keep something else than K and V."""
    specs = []
    for group in kv_cache_config.kv_cache_groups:
        each = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        for name in group.layer_names:
            if not takes(name):
                continue
            spec = group.kv_cache_spec if each is None else each[name]
            layer = layer_index(name)
            if layer is None or not all(hasattr(spec, field) for field in ("num_kv_heads", "head_size", "dtype")):
                raise CannotShareError("layer_unknown", f"layer {name} keeps a {type(spec).__name__}")
            specs.append(_Spec(layer, int(spec.num_kv_heads), int(spec.head_size), int(spec.dtype.itemsize)))
    if not specs:
        raise CannotShareError("no_kv_cache", "this model keeps no KV")
    return specs


def _check_layout(layout: Layout, specs: Iterable[_Spec], ranks: int, *, some: bool) -> None:
    """`some`: only some of the layers are here, those of a stage."""
    by_layer = {layer: group for group in layout.groups for layer in group.layers}
    seen = set()
    for spec in specs:
        group = by_layer.get(spec.layer)
        if group is None:
            continue  # a draft model's that is numbered behind the model's
        if spec.layer in seen:
            raise CannotShareError("layer_ambiguous", f"more than one KV cache is named as that of layer {spec.layer}")
        if not splits(group.kv_heads, ranks):
            raise CannotShareError("kv_heads_not_divisible", f"{group.kv_heads} KV heads on {ranks} ranks")
        heads = len(Rank(0, ranks).holds(group.kv_heads))
        size = group.k_dim  # MLA: the latent; else K and V alike
        if (spec.heads, spec.head_size) != (heads, size) or spec.itemsize * 8 != DTYPE_BITS[group.dtype]:
            raise CannotShareError(
                "layout_mismatch",
                f"layer {spec.layer} has {spec.heads} heads of {spec.head_size} values of {spec.itemsize} bytes; "
                f"{heads} of {size} {group.dtype} were expected",
            )
        seen.add(spec.layer)
    if seen != set(by_layer) and not (some and seen):
        raise CannotShareError("layout_mismatch", f"layers {sorted(set(by_layer) - seen)} keep no KV of their own")


def _layers(names: Iterable[str], layout: Layout, takes: Takes) -> dict[str, int]:
    known = {layer for group in layout.groups for layer in group.layers}
    indexed = {name: layer_index(name) for name in names if takes(name)}
    return {name: layer for name, layer in indexed.items() if layer is not None and layer in known}
