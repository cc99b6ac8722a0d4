"""Identity: what may be shared with what. Block keys, namespace fingerprints, weights digests, layouts.

Shared by the daemon's core and by every client, so it imports the standard library, msgpack and numpy only, and talks
to nobody. Everything in it is a function of its arguments, but for digestcache, which reads the clock and
XDG_CACHE_HOME to remember digests of files, and epochs, which draws numbers.
"""

from prefixcache.identity.canonical import CanonicalError
from prefixcache.identity.epochs import new_epoch
from prefixcache.identity.fingerprint import IdentityError, NamespaceIdentity
from prefixcache.identity.hfconfig import ConfigError
from prefixcache.identity.keychain import KeyChain
from prefixcache.identity.keys import (
    DEFAULT_BLOCK_TOKENS,
    KEY_BYTES,
    Extra,
    Tokens,
    block_keys,
    foreign_key,
    pack_extra,
    pack_tokens,
    root_key,
    split_extras,
)
from prefixcache.identity.layout import GroupKind, LayerGroup, Layout, LayoutError, Part
from prefixcache.identity.model import Namespace, layout_from_hf, namespace_from_hf
from prefixcache.identity.rope import rope_normal_form
from prefixcache.identity.tensors import TensorFileError
from prefixcache.identity.weights import state_dict_digest, weights_digest

__all__ = [
    "DEFAULT_BLOCK_TOKENS",
    "KEY_BYTES",
    "CanonicalError",
    "ConfigError",
    "Extra",
    "GroupKind",
    "IdentityError",
    "KeyChain",
    "LayerGroup",
    "Layout",
    "LayoutError",
    "Namespace",
    "NamespaceIdentity",
    "Part",
    "TensorFileError",
    "Tokens",
    "block_keys",
    "foreign_key",
    "layout_from_hf",
    "namespace_from_hf",
    "new_epoch",
    "pack_extra",
    "pack_tokens",
    "root_key",
    "rope_normal_form",
    "split_extras",
    "state_dict_digest",
    "weights_digest",
]
