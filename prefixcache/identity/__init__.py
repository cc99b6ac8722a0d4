"""Identity: what may be shared with what. Block keys, namespace fingerprints, weights digests, layouts.

Shared by the daemon's core and by every client, so it imports the standard library, msgpack and numpy only, reads no
clock and no environment (but for the place of the weights digest cache), and talks to nobody.
"""

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

__all__ = [
    "DEFAULT_BLOCK_TOKENS",
    "KEY_BYTES",
    "Extra",
    "GroupKind",
    "KeyChain",
    "LayerGroup",
    "Layout",
    "LayoutError",
    "Part",
    "Tokens",
    "block_keys",
    "foreign_key",
    "pack_extra",
    "pack_tokens",
    "root_key",
    "split_extras",
]
