"""A namespace as a worker sees it: whose blocks may be shared, how prompts become keys, and the weights epoch.

A namespace needs no server and makes no call; any number of clients and threads may use one. `invalidate` moves it to
a new weights epoch, so that nothing stored before is found again. Who may share with whom is decided in
prefixcache.identity.
"""

import dataclasses
import threading
from typing import Any, Final, NamedTuple

from prefixcache.identity import model
from prefixcache.identity.epochs import new_epoch
from prefixcache.identity.fingerprint import IdentityError, NamespaceIdentity, short_name
from prefixcache.identity.keychain import KeyChain
from prefixcache.identity.keys import KEY_BYTES, TOKEN_BYTES, Tokens, block_keys, pack_tokens, root_key
from prefixcache.identity.layout import Layout
from prefixcache_client.blocks import BlockFormat
from prefixcache_client.reasons import DYNAMIC_SCALES


class PromptKeys(NamedTuple):
    """A prompt already hashed: packed keys (n x 32 bytes) of its whole blocks, and its tokens, whole or not."""

    keys: bytes
    tokens: int


Prompt = Tokens | KeyChain | PromptKeys
"""Token ids (packed bytes, list, numpy array, CPU tensor), a key chain of the namespace, or keys made before."""

_NO_REASON: Final = ""


class Epoch(NamedTuple):
    """What changes with the weights: taken once per call, so that a call is of one epoch."""

    number: int
    fingerprint: bytes
    root: bytes


class Namespace:
    """Made by `Client.namespace`; or of any NamespaceIdentity.

    `reason_off`: why nothing is ever cached in it, "" where it is.
    """

    def __init__(
        self,
        identity: NamespaceIdentity,
        *,
        tenant_key: bytes | None = None,
        cache_salt: bytes = b"",
        label: str = "",
        reason_off: str = _NO_REASON,
    ) -> None:
        """`tenant_key`: None or 32 secret bytes; `cache_salt`: splits further; see prefixcache.identity.keys.root_key.

        Raises LayoutError or IdentityError for what cannot exist, ValueError for a bad key.
        """
        self.form = BlockFormat(identity.layout, identity.block_tokens, identity.codec, bool(identity.engine))
        self.reason_off = reason_off
        self._identity = identity
        self._tenant_key = tenant_key
        self._cache_salt = cache_salt
        self._lock = threading.Lock()
        self._epoch = self._at(identity.weights_epoch)
        self.label = label or short_name(self._epoch.fingerprint)

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return self.form.block_tokens

    @property
    def block_bytes(self) -> int:
        """Bytes of all parts of a block."""
        return self.form.block_bytes

    @property
    def epoch(self) -> Epoch:
        """The weights epoch in force, with its fingerprint and root key. Keep the root to yourself."""
        return self._epoch

    def invalidate(self, epoch: int | None = None) -> int:
        """Move on to a new weights epoch (the weights were changed in place); its number.

        Blocks of earlier epochs are never found again through this object; the server drops them as it needs room. Key
        chains made before are refused. Without `epoch` a number is drawn that no other process has. Workers that made
        the very same change (a trainer's step, sent to all of them) share blocks again when they pass one number, from
        0 to 2^63 - 1; whoever passes one vouches that it names these weights and no others.

        Raises ValueError for the epoch that is in force, and for numbers out of range.
        """
        with self._lock:
            if epoch == self._epoch.number:
                raise ValueError(f"epoch {epoch} is in force: changed weights need another number")
            self._epoch = self._at(new_epoch() if epoch is None else epoch)
            return self._epoch.number

    def chain(self) -> KeyChain:
        """The keys of a growing conversation: append tokens, and pass the chain wherever a prompt is wanted."""
        return NamespaceChain(self._epoch.root, self.block_tokens)

    def hash(self, prompt: Prompt, epoch: Epoch | None = None) -> PromptKeys:
        """The keys of a prompt's whole blocks.

        Raises ValueError or TypeError for tokens that are none, keys that are no multiple of 32 bytes, and a chain of
        another namespace or epoch.
        """
        root = (epoch or self._epoch).root
        if isinstance(prompt, PromptKeys):
            if len(prompt.keys) % KEY_BYTES or prompt.tokens < len(prompt.keys) // KEY_BYTES * self.block_tokens:
                raise ValueError("keys are 32 bytes for each whole block of the prompt's tokens")
            return prompt
        if isinstance(prompt, KeyChain):
            return self._of_chain(prompt, root)
        packed = pack_tokens(prompt)
        return PromptKeys(block_keys(root, packed, self.block_tokens), len(packed) // TOKEN_BYTES)

    def _of_chain(self, chain: KeyChain, root: bytes) -> PromptKeys:
        keys = chain.keys
        if len(keys) != chain.block_count * KEY_BYTES:
            raise ValueError("this chain was imported without the keys before it: pass PromptKeys with all of them")
        if isinstance(chain, NamespaceChain) and (chain.root != root or chain.block_tokens != self.block_tokens):
            raise ValueError("this chain belongs to another namespace, or to an earlier weights epoch")
        return PromptKeys(keys, chain.token_count)

    def _at(self, number: int) -> Epoch:
        fingerprint = dataclasses.replace(self._identity, weights_epoch=number).fingerprint()
        root = root_key(fingerprint, tenant_key=self._tenant_key, cache_salt=self._cache_salt)
        return Epoch(number, fingerprint, root)


def namespace_of(layout: Layout, weights_digest: bytes, secrets: "Secrets", **identity: Any) -> Namespace:
    """See Client.namespace."""
    scales = (identity.get("k_scales"), identity.get("v_scales"))
    if "dynamic" in scales:
        # Identity refuses these, rightly; a worker goes on without the cache, and its counters say why.
        known = identity | {"k_scales": (), "v_scales": ()}
        return secrets.namespace(NamespaceIdentity(weights=weights_digest, layout=layout, **known), DYNAMIC_SCALES)
    return secrets.namespace(NamespaceIdentity(weights=weights_digest, layout=layout, **identity))


def namespace_from_hf(
    config: object, weights_digest: bytes, kv_dtype: object, secrets: "Secrets", **options: Any
) -> Namespace:
    """See Client.namespace_from_hf."""
    try:
        return secrets.namespace(model.namespace_from_hf(config, weights_digest, kv_dtype, **options).identity)
    except IdentityError as error:
        if error.reason != DYNAMIC_SCALES:
            raise
    static = options | {"k_scales": (), "v_scales": ()}
    found = model.namespace_from_hf(config, weights_digest, kv_dtype, **static)
    return secrets.namespace(found.identity, DYNAMIC_SCALES)


class Secrets(NamedTuple):
    """What separates tenants, and the label people see; none of it is part of the identity."""

    tenant_key: bytes | None = None
    cache_salt: bytes = b""
    label: str = ""

    def namespace(self, identity: NamespaceIdentity, reason_off: str = _NO_REASON) -> Namespace:
        """The namespace of `identity` with these secrets."""
        return Namespace(
            identity,
            tenant_key=self.tenant_key,
            cache_salt=self.cache_salt,
            label=self.label,
            reason_off=reason_off,
        )


class NamespaceChain(KeyChain):
    """A key chain that remembers where it began, so that one of another epoch is not taken for this one's."""

    __slots__ = ("root",)

    def __init__(self, root: bytes, block_tokens: int) -> None:
        super().__init__(root, block_tokens)
        self.root = root
