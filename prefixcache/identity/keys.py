"""Block keys: which prompt prefix a block of KV bytes belongs to.

Rules:
1. `root = HMAC-SHA256(tenant key, fingerprint || cache salt)`;
   `key[i] = SHA-256(key[i-1] || le_u32(len(extra)) || extra || tokens of block i as le_u32)`, `key[-1] = root`.
   A key so names its block and the whole prefix before it, and a conversation goes on from its last key anywhere.
2. Nothing else takes part: no environment, process seed, pickle or `hash()`. tests/vectors holds examples.
3. Only whole blocks have keys. Tokens behind the last whole block are the caller's (or KeyChain's) tail.
4. `extra` says what the token ids do not: images, prompt embeddings. It is empty, or canonical msgpack of a sorted
   list of [kind, id bytes, offset in block], each item in the block in which it begins (the chain carries it on).

What belongs here: bytes in, keys out. It must not know layouts, tiers or the network.
"""

import hashlib
import hmac
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from prefixcache.identity import canonical

KEY_BYTES: Final = 32
TOKEN_BYTES: Final = 4
DEFAULT_BLOCK_TOKENS: Final = 64
MAX_BLOCK_TOKENS: Final = 1 << 16
# Limits of one block's extra: far above any real block (an item per token of 256-byte ids), far below harm.
MAX_EXTRA_BYTES: Final = 1 << 24
# The key of a namespace without a tenant key. Public on purpose: it separates nothing, it only fixes the function.
PUBLIC_KEY: Final = hashlib.sha256(b"prefixcache/v1 public tenant key").digest()

Tokens = bytes | bytearray | memoryview | npt.NDArray[np.integer] | Sequence[int]

_NO_EXTRA = b"\0\0\0\0"


class Extra(NamedTuple):
    """Something beside the token ids. `offset`: tokens from the start, of the block or of the sequence as stated."""

    kind: str
    id: bytes
    offset: int


def root_key(fingerprint: bytes, *, tenant_key: bytes | None = None, cache_salt: bytes = b"") -> bytes:
    """The 32-byte parent of every first block in a namespace.

    `fingerprint`: 32 bytes from prefixcache.identity.fingerprint. `tenant_key`: None, or exactly 32 secret bytes;
    without it anybody who can guess a prompt can compute its keys. `cache_salt`: any bytes, splits a namespace further.
    Raises ValueError for a fingerprint or tenant key of another length, and for a tenant key of zeros.
    """
    _require_bytes("fingerprint", fingerprint, KEY_BYTES)
    if tenant_key is not None:
        _require_bytes("tenant_key", tenant_key, KEY_BYTES)
        if not any(tenant_key):
            raise ValueError("tenant_key is all zero: that is an unset key, not a secret")
    secret = PUBLIC_KEY if tenant_key is None else bytes(tenant_key)
    return hmac.digest(secret, bytes(fingerprint) + bytes(cache_salt), "sha256")


def pack_tokens(tokens: Tokens) -> bytes | memoryview:
    """Token ids as little-endian u32 bytes; bytes-like input is taken as already packed and returned without a copy.

    `tokens`: packed bytes, a 1-D integer array (numpy, or what numpy reads, as a CPU tensor), or a sequence of int.
    Raises ValueError when bytes are not a multiple of 4 or an id is outside u32, TypeError for anything but integers.
    """
    if isinstance(tokens, bytes | bytearray):
        packed = memoryview(tokens)
    elif isinstance(tokens, memoryview) and tokens.format == "B":
        packed = tokens if tokens.contiguous else memoryview(tokens.tobytes())
    elif isinstance(tokens, list | tuple):
        return _pack_sequence(tokens)
    else:
        return _pack_array(np.asarray(tokens))
    if packed.nbytes % TOKEN_BYTES:
        raise ValueError(f"packed tokens are {packed.nbytes} bytes, not a multiple of {TOKEN_BYTES}")
    return tokens if isinstance(tokens, bytes) else packed


def pack_extra(items: Iterable[Extra]) -> bytes:
    """The `extra` bytes of one block: b"" for no items, else canonical msgpack of the sorted, de-duplicated items.

    Offsets count tokens from the block's start. Raises ValueError for an empty kind or id, or a negative offset.
    """
    listed = sorted({(str(item.kind), bytes(item.id), int(item.offset)) for item in items})
    for kind, identity, offset in listed:
        if not kind or not identity:
            raise ValueError("an extra needs a kind and an id")
        if not 0 <= offset < MAX_BLOCK_TOKENS:
            raise ValueError(f"offset {offset} of extra {kind!r} is outside its block")
    return canonical.pack([list(item) for item in listed]) if listed else b""


def split_extras(extras: Iterable[Extra], block_tokens: int) -> dict[int, bytes]:
    """Extras placed by token position in the prompt, as {block number: extra bytes}, which `block_keys` takes."""
    _check_block_tokens(block_tokens)
    blocks: dict[int, list[Extra]] = {}
    for extra in extras:
        block, offset = divmod(extra.offset, block_tokens)
        if block < 0:
            raise ValueError(f"offset {extra.offset} of extra {extra.kind!r} is before the prompt")
        blocks.setdefault(block, []).append(Extra(extra.kind, extra.id, offset))
    return {block: pack_extra(items) for block, items in blocks.items()}


def block_keys(parent: bytes, tokens: Tokens, block_tokens: int, extras: Mapping[int, bytes] | None = None) -> bytes:
    """Keys of the whole blocks in `tokens`, packed (n x 32 bytes).

    `parent`: the root, or the key of the block before. `extras`: {block number in this call: `pack_extra` bytes}.
    Raises ValueError for a parent that is not 32 bytes, a block size outside 1..65536, or tokens `pack_tokens` refuses.
    """
    _require_bytes("parent", parent, KEY_BYTES)
    _check_block_tokens(block_tokens)
    packed = pack_tokens(tokens)
    blocks = len(packed) // (TOKEN_BYTES * block_tokens)
    if not blocks:
        return b""
    if extras:
        return _chain_with_extras(bytes(parent), packed, block_tokens, extras)
    bodies = _bodies(packed, blocks, block_tokens)
    sha256, key = hashlib.sha256, bytes(parent)
    return b"".join([key := sha256(key + body).digest() for body in bodies])


def foreign_key(root: bytes, engine_key: bytes) -> bytes:
    """The key of an engine's opaque block key in a namespace of kind `foreign`: SHA-256(root || le_u32(len) || it)."""
    _require_bytes("root", root, KEY_BYTES)
    if not engine_key:
        raise ValueError("engine key is empty")
    return hashlib.sha256(bytes(root) + _le_u32(len(engine_key)) + bytes(engine_key)).digest()


def _bodies(packed: bytes | memoryview, blocks: int, block_tokens: int) -> list[bytes]:
    """What is hashed behind the parent for blocks without extra: an empty extra's length, then the tokens.

    numpy lays all of them out in two copies; slicing and joining block by block costs 15% of the whole hash instead.
    """
    rows = np.zeros((blocks, 1 + block_tokens), dtype="<u4")
    tokens = np.frombuffer(packed, dtype="<u4", count=blocks * block_tokens)
    rows[:, 1:] = tokens.reshape(blocks, block_tokens)
    bodies: list[bytes] = rows.view(f"V{rows.shape[1] * TOKEN_BYTES}").ravel().tolist()
    return bodies


def _chain_with_extras(key: bytes, packed: bytes | memoryview, block_tokens: int, extras: Mapping[int, bytes]) -> bytes:
    size = TOKEN_BYTES * block_tokens
    keys = []
    for block in range(len(packed) // size):
        extra = extras.get(block, b"")
        if len(extra) > MAX_EXTRA_BYTES:
            raise ValueError(f"extra of block {block} is {len(extra)} bytes, more than {MAX_EXTRA_BYTES}")
        head = key + _le_u32(len(extra)) + extra if extra else key + _NO_EXTRA
        key = hashlib.sha256(head + packed[block * size : (block + 1) * size]).digest()
        keys.append(key)
    return b"".join(keys)


def _pack_sequence(tokens: Sequence[int]) -> bytes:
    try:
        ids = array("I", tokens)  # refuses floats, and what does not fit u32; twice as fast as numpy on a list
    except OverflowError as error:
        raise ValueError("token ids must be integers from 0 to 2^32-1") from error
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def _pack_array(ids: npt.NDArray[np.integer]) -> bytes | memoryview:
    if ids.ndim != 1:
        raise ValueError(f"tokens must be one sequence, got an array of shape {ids.shape}")
    if ids.size == 0:
        return b""
    if ids.dtype.kind not in "iu":
        raise TypeError(f"token ids must be integers, got an array of {ids.dtype}")
    if ids.dtype.itemsize > TOKEN_BYTES or ids.dtype.kind == "i":
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= 1 << 32:
            raise ValueError(f"token ids must be from 0 to 2^32-1, got {low} to {high}")
    return np.ascontiguousarray(ids, dtype="<u4").view(np.uint8).data


def _check_block_tokens(block_tokens: int) -> None:
    if not 1 <= block_tokens <= MAX_BLOCK_TOKENS:
        raise ValueError(f"block_tokens must be from 1 to {MAX_BLOCK_TOKENS}, got {block_tokens}")


def _require_bytes(name: str, value: bytes, size: int) -> None:
    if len(value) != size:
        raise ValueError(f"{name} must be {size} bytes, got {len(value)}")


def _le_u32(value: int) -> bytes:
    return value.to_bytes(4, "little")
