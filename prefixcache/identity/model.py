"""From a Hugging Face config to a layout and a namespace.

Rules:
1. A config is read, never imported: objects of transformers 4.57 and 5.x, vLLM's, and dicts of a config.json will do.
2. A model whose KV this module cannot describe for certain is refused with the reason; the caller may pass a Layout of
   its own. A wrong layout would be wrong bytes.
3. MLA is stored as its latent by vLLM, SGLang and transformers 5.x, expanded into heads by transformers 4.57: the
   caller says which, and the two never share.

What belongs here: layer types, heads, windows. It must not know tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypedDict, Unpack

from prefixcache.identity.canonical import Value
from prefixcache.identity.fingerprint import NamespaceIdentity, Scales
from prefixcache.identity.hfconfig import Config, ConfigError, integer, read, required, text_config
from prefixcache.identity.keys import DEFAULT_BLOCK_TOKENS, foreign_key, root_key
from prefixcache.identity.layout import CANONICAL_PACKING, GroupKind, LayerGroup, Layout, Part
from prefixcache.identity.rope import rope_normal_form

Mla = Literal["latent", "expanded"]

# Layer types whose KV is that of every token, and those of which only a window is read.
_FULL_TYPES = {"full_attention", "attention", "chunked_attention", "global_attention"}
_SLIDING_TYPES = {"sliding_attention", "local_attention"}

# Signs of caches that this module does not describe. Each is refused, not guessed.
_UNSUPPORTED = {
    "is_encoder_decoder": "an encoder-decoder model keeps a cross-attention cache as well",
    "cross_attention_layers": "cross-attention layers keep KV of images",
    "use_bidirectional_attention": "with bidirectional attention the KV of a token depends on later tokens",
    "index_topk": "a sparse-attention indexer keeps keys of its own",
    "global_head_dim": "head sizes differ between layers",
    "is_heterogeneous": "heads differ between layers",
}

# Fields that change what the layers compute, with the type they are written as. Every engine reads the same ones.
_NUMERIC_FIELDS: Mapping[str, type] = {
    "hidden_size": int, "intermediate_size": int, "num_hidden_layers": int, "num_attention_heads": int,
    "num_experts_per_tok": int, "hidden_act": str, "norm_eps": float, "attn_logit_softcapping": float,
    "query_pre_attn_scalar": float, "attention_multiplier": float, "embedding_multiplier": float,
    "residual_multiplier": float, "routed_scaling_factor": float, "clip_qkv": float,
}  # fmt: skip
# Other names of the same fields: a config object answers to both, the dict of a config.json to one.
_OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("n_embd",),
    "intermediate_size": ("n_inner",),
    "num_hidden_layers": ("n_layer", "num_layers"),
    "num_attention_heads": ("n_head",),
    "hidden_act": ("hidden_activation", "activation_function", "activation"),
    "norm_eps": ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"),
}


class NamespaceOptions(TypedDict, total=False):
    """Keyword arguments of `namespace_from_hf`; see NamespaceIdentity for those of the same name.

    `mla`: how the engine keeps MLA. `packing`, `stages`: of the layout. `scale_bytes`: bytes of scales per head, layer
    and block. `fixed_length`: tokens, for rotations that depend on length (see rope). `layout`: used instead of the
    config's.
    """

    block_tokens: int
    tenant: str
    lora: bytes
    epoch: int
    quantisation: str
    compute_dtype: str
    k_scales: Scales
    v_scales: Scales
    codec: str
    engine: str
    overrides: Mapping[str, Value]
    mla: Mla
    packing: str
    stages: tuple[int, ...]
    scale_bytes: int
    fixed_length: int | None
    layout: Layout


@dataclass(frozen=True)
class Namespace:
    """A namespace as a client uses it: identity, fingerprint, parts of a block, roots of key chains."""

    identity: NamespaceIdentity

    @cached_property
    def fingerprint(self) -> bytes:
        """32 bytes; workers whose fingerprints differ never see each other's blocks."""
        return self.identity.fingerprint()

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The parts of a block, part i at index i."""
        return self.identity.layout.parts(self.identity.block_tokens)

    @property
    def layout(self) -> Layout:
        """Shape of a block's bytes."""
        return self.identity.layout

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return self.identity.block_tokens

    @property
    def block_bytes(self) -> int:
        """Bytes of all parts of a block."""
        return sum(part.bytes for part in self.parts)

    @property
    def spec_map(self) -> dict[str, Value]:
        """The map that the fingerprint is the hash of; plain values, canonical msgpack can take it."""
        return self.identity.to_map()

    def root(self, *, tenant_key: bytes | None = None, cache_salt: bytes = b"") -> bytes:
        """The parent of every first block's key (see keys.root_key)."""
        return root_key(self.fingerprint, tenant_key=tenant_key, cache_salt=cache_salt)

    def foreign(self, engine_key: bytes, *, tenant_key: bytes | None = None) -> bytes:
        """The key for an engine's own block key. Raises ConfigError unless the namespace names its engine."""
        if not self.identity.engine:
            raise ConfigError("a foreign key needs a namespace with an engine", "namespace_kind")
        return foreign_key(self.root(tenant_key=tenant_key), engine_key)


def namespace_from_hf(
    config: Config, weights_digest: bytes, kv_dtype: object, **options: Unpack[NamespaceOptions]
) -> Namespace:
    """The namespace of a model running from `config`, the engine's own config object or the dict of a config.json.

    `weights_digest`: 32 bytes of prefixcache.identity.weights. `kv_dtype`: "bfloat16", torch.bfloat16, ... Raises
    ConfigError for a model or rotation that cannot be described, LayoutError and IdentityError for settings out of
    range.
    """
    layout = options.get("layout") or layout_from_hf(
        config,
        kv_dtype,
        mla=options.get("mla", "latent"),
        packing=options.get("packing", CANONICAL_PACKING),
        stages=options.get("stages", ()),
        scale_bytes=options.get("scale_bytes", 0),
    )
    compute_dtype = options.get("compute_dtype", "")
    identity = NamespaceIdentity(
        weights=bytes(weights_digest),
        layout=layout,
        block_tokens=options.get("block_tokens", DEFAULT_BLOCK_TOKENS),
        weights_epoch=options.get("epoch", 0),
        quantisation=options.get("quantisation", "none"),
        compute_dtype=dtype_name(compute_dtype) if compute_dtype else "",
        k_scales=options.get("k_scales", ()),
        v_scales=options.get("v_scales", ()),
        codec=options.get("codec", "none"),
        rope=rope_normal_form(config, fixed_length=options.get("fixed_length")),
        config=numeric_config(config),
        overrides=options.get("overrides", {}),
        lora=options.get("lora", b""),
        tenant=options.get("tenant", ""),
        engine=options.get("engine", ""),
    )
    return Namespace(identity)


def layout_from_hf(
    config: Config,
    kv_dtype: object,
    *,
    mla: Mla = "latent",
    packing: str = CANONICAL_PACKING,
    stages: tuple[int, ...] = (),
    scale_bytes: int = 0,
) -> Layout:
    """The layout of a model's KV cache. Raises ConfigError for a model that this module cannot describe for certain."""
    text = text_config(config)
    _refuse_unsupported(config, text)
    dtype, (heads, k_dim, v_dim) = dtype_name(kv_dtype), _head_shape(text, mla)
    window = _window(text)
    full: list[int] = []
    sliding: list[int] = []
    for layer, kind in enumerate(layer_types(text)):
        (sliding if window and kind in _SLIDING_TYPES else full).append(layer)
    groups = []
    if full:
        groups.append(LayerGroup(GroupKind.FULL, tuple(full), heads, k_dim, v_dim, dtype, 0, scale_bytes))
    if sliding:
        groups.append(
            LayerGroup(GroupKind.SLIDING, tuple(sliding), heads, k_dim, v_dim, dtype, window, scale_bytes)
        )  # fmt: skip
    return Layout.of(*groups, packing=packing, stages=stages)


def layer_types(config: Config) -> list[str]:
    """The attention type of every layer with KV of its own. Raises ConfigError for a type that keeps something else."""
    text = text_config(config)
    count = required(integer(text, "num_hidden_layers", "n_layer", "num_layers"), "num_hidden_layers")
    stated = read(text, "layer_types")
    types = [str(kind) for kind in stated] if isinstance(stated, list | tuple) else _implied_types(text, count)
    if len(types) != count:
        raise ConfigError(f"layer_types has {len(types)} entries for {count} layers")
    for layer, kind in enumerate(types):
        if kind not in _FULL_TYPES | _SLIDING_TYPES:
            raise ConfigError(f"layer {layer} is of type {kind!r}, whose state is not described yet", "layer_type")
    # The last layers of Gemma 3n read the cache of earlier ones and keep none.
    return types[: count - (integer(text, "num_kv_shared_layers") or 0)]


def numeric_config(config: Config) -> dict[str, Value]:
    """The config's fields that change what the layers compute, so that an override of one is another namespace."""
    text = text_config(config)
    result: dict[str, Value] = {}
    for name, kind in _NUMERIC_FIELDS.items():
        value = read(text, name, *_OTHER_NAMES.get(name, ()))
        if isinstance(value, int | float | str):
            result[name] = kind(value)
    return result


def dtype_name(dtype: object) -> str:
    """`bfloat16` for "bfloat16", torch.bfloat16 or numpy's dtype of that name."""
    return str(dtype).removeprefix("torch.")


def _implied_types(text: Config, count: int) -> list[str]:
    """Layer types of a config that states none: what the engines derive from the older fields."""
    if not _window(text):
        return ["full_attention"] * count
    model = str(read(text, "model_type") or "")
    pattern = integer(text, "sliding_window_pattern", "_sliding_window_pattern")
    pattern = pattern or {"gemma2": 2, "gemma3_text": 6, "cohere2": 4}.get(model)
    if pattern:
        return ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(count)]
    first = 0  # Mistral, Phi 3: a window on every layer; the Qwen 2 family from max_window_layers on
    if read(text, "use_sliding_window") is not None:
        first = integer(text, "max_window_layers") or 0
    return ["sliding_attention" if layer >= first else "full_attention" for layer in range(count)]


def _window(text: Config) -> int:
    """Tokens a query of a sliding layer sees, itself included; 0 for none."""
    if read(text, "use_sliding_window") is False:
        return 0
    return integer(text, "sliding_window") or 0


def _head_shape(text: Config, mla: Mla) -> tuple[int, int, int]:
    """(KV heads, elements of K, elements of V) of one token in one layer."""
    heads = required(integer(text, "num_attention_heads", "n_head"), "num_attention_heads")
    rank = integer(text, "kv_lora_rank")
    if rank is not None:
        rotated = required(integer(text, "qk_rope_head_dim"), "qk_rope_head_dim")
        if mla == "latent":
            return 1, rank + rotated, 0
        plain = required(integer(text, "qk_nope_head_dim"), "qk_nope_head_dim")
        return heads, plain + rotated, required(integer(text, "v_head_dim"), "v_head_dim")
    size = integer(text, "head_dim")
    if size is None:
        size = required(integer(text, "hidden_size", "n_embd"), "head_dim or hidden_size") // heads
    shared = read(text, "multi_query") is True and read(text, "new_decoder_architecture") is not True
    kv_heads = 1 if shared else integer(text, "num_key_value_heads", "num_kv_heads") or heads
    return kv_heads, size, size


def _refuse_unsupported(config: Config, text: Config) -> None:
    for name, why in _UNSUPPORTED.items():
        if read(config, name) or read(text, name):
            raise ConfigError(f"{name} is set: {why}; pass a Layout instead", "model_unsupported")
