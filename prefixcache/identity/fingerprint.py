"""Fingerprints: everything that must be equal for two workers' KV bytes to be interchangeable, in 32 bytes.

Rules:
1. fingerprint = SHA-256 of the canonical msgpack (see canonical) of `NamespaceIdentity.to_map()`. The map has a schema
   version; a change of any field's meaning is a new version.
2. No model name, no path, no engine block size and no rank takes part. What is computed from the same numbers is the
   same.
3. Scales that are computed at run time (dynamic) differ between prompts: such KV is not cached, reason
   `dynamic_scales`.

What belongs here: the map. It must not know how an engine spells its settings (see rope, model and weights).
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from prefixcache.identity import canonical
from prefixcache.identity.canonical import Value
from prefixcache.identity.keys import DEFAULT_BLOCK_TOKENS, KEY_BYTES, MAX_BLOCK_TOKENS
from prefixcache.identity.layout import CANONICAL_PACKING, DTYPE_BITS, GroupKind, Layout

SCHEMA: Final = 1
NONE: Final = "none"
DIGEST_BYTES: Final = 32
CODECS: Final[Mapping[str, str]] = {NONE: NONE, "raw": NONE, "int8": "int8.1", "int4": "int4.1"}
"""Forms in which blocks may be kept, by the name users give, as they stand in the map: with the version of the form,
so that a form whose bytes come to mean something else is another namespace."""

Scales = tuple[float, ...] | Literal["dynamic"]


class IdentityError(ValueError):
    """A namespace that cannot be cached or cannot exist. `reason` is the machine-readable cause."""

    def __init__(self, message: str, reason: str = "identity_invalid") -> None:
        """`message` is for people; `reason` goes into counters."""
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceIdentity:
    """What a namespace's KV bytes depend on.

    `weights`: digest from prefixcache.identity.weights, 32 bytes. `weights_epoch`: 0, or a number for weights that
    were changed in place (see epochs). `quantisation`: load-time quantisation of the weights, "none" or a name with
    its settings. `compute_dtype`: what the layers run in; "" for the KV dtype. `k_scales`, `v_scales`: static scales
    of quantised KV, one per layer or one for all, () for none; "dynamic" is refused. `codec`: the form in which
    blocks are kept, "raw" (also "none"), "int8" or "int4"; `layout` is that of raw ones. `rope`, `config`: normal
    forms of the model's config. `overrides`: what else an adapter changes, by name. `lora`: digest of the adapter's
    weights and settings, b"" for none. `tenant`: a name that separates; a secret separates better (see
    keys.root_key). `engine`: "" for token namespaces, the engine's name for one of kind `foreign`, whose keys are the
    engine's own.
    """

    weights: bytes
    layout: Layout
    block_tokens: int = DEFAULT_BLOCK_TOKENS
    weights_epoch: int = 0
    quantisation: str = NONE
    compute_dtype: str = ""
    k_scales: Scales = ()
    v_scales: Scales = ()
    codec: str = NONE
    rope: Mapping[str, Value] = field(default_factory=dict)
    config: Mapping[str, Value] = field(default_factory=dict)
    overrides: Mapping[str, Value] = field(default_factory=dict)
    lora: bytes = b""
    tenant: str = ""
    engine: str = ""

    def __post_init__(self) -> None:
        if len(self.weights) != DIGEST_BYTES or not any(self.weights):
            raise IdentityError(f"the weights digest must be {DIGEST_BYTES} bytes and not all zero")
        if len(self.lora) not in (0, DIGEST_BYTES):
            raise IdentityError(f"the LoRA digest must be empty or {DIGEST_BYTES} bytes, got {len(self.lora)}")
        if not 0 <= self.weights_epoch < 1 << 63:
            raise IdentityError(f"weights_epoch must be from 0 to 2^63-1, got {self.weights_epoch}")
        if not 1 <= self.block_tokens <= MAX_BLOCK_TOKENS:
            raise IdentityError(f"block_tokens must be from 1 to {MAX_BLOCK_TOKENS}, got {self.block_tokens}")
        if self.compute_dtype and self.compute_dtype not in DTYPE_BITS:
            raise IdentityError(f"unknown compute dtype {self.compute_dtype!r}")
        if "dynamic" in (self.k_scales, self.v_scales):
            raise IdentityError(
                "KV scales computed at run time differ from prompt to prompt, so this KV cannot be shared; "
                "use static scales or an unquantised KV dtype",
                "dynamic_scales",
            )
        self._check_codec()
        self.layout.parts(self.block_tokens)  # sizes must not overflow

    def to_map(self) -> dict[str, Value]:
        """The map whose canonical msgpack is hashed. The KV dtype is in the layout's groups."""
        return {
            "schema": SCHEMA,
            "weights": self.weights,
            "weights_epoch": self.weights_epoch,
            "quantisation": self.quantisation,
            "compute_dtype": self.compute_dtype or self.layout.groups[0].dtype,
            "k_scales": _scales(self.k_scales),
            "v_scales": _scales(self.v_scales),
            "codec": CODECS[self.codec],
            "block_tokens": self.block_tokens,
            "layout": self.layout.to_map(),
            "rope": dict(self.rope),
            "config": dict(self.config),
            "overrides": dict(self.overrides),
            "lora": self.lora,
            "tenant": self.tenant,
            "engine": self.engine,
        }

    def _check_codec(self) -> None:
        if self.codec not in CODECS:
            raise IdentityError(f"unknown codec {self.codec!r}; known are raw, int8 and int4", "codec_unknown")
        if CODECS[self.codec] == NONE:
            return
        kinds = {group.kind for group in self.layout.groups}
        opaque = "keys of an engine's own (a foreign namespace)" if self.engine else ""
        opaque = opaque or ("states" if GroupKind.STATE in kinds else "")
        opaque = opaque or ("packing of an engine's own" if self.layout.packing != CANONICAL_PACKING else "")
        if opaque:
            text = f"codec {self.codec!r} needs blocks whose numbers are known, not {opaque}; use codec='raw'"
            raise IdentityError(text, "codec_unsupported")

    def fingerprint(self) -> bytes:
        """32 bytes. Raises CanonicalError when `rope`, `config` or `overrides` hold what has no canonical form."""
        return fingerprint_of(self.to_map())


def fingerprint_of(identity_map: Mapping[str, Value]) -> bytes:
    """The fingerprint of a namespace's map: SHA-256 of its canonical msgpack, 32 bytes."""
    return hashlib.sha256(canonical.pack(identity_map)).digest()


def short_name(fingerprint: bytes) -> str:
    """The first 12 hex digits: for people and labels, never an identity. Raises IdentityError for a wrong length."""
    if len(fingerprint) != KEY_BYTES:
        raise IdentityError(f"a fingerprint is {KEY_BYTES} bytes, got {len(fingerprint)}")
    return fingerprint[:6].hex()


def _scales(scales: Scales) -> Value:
    return [float(scale) for scale in scales] if scales != "dynamic" else scales
