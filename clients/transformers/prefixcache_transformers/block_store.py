"""What this adapter needs of a store of KV blocks, and one that lives in memory.

Rules:
1. A store knows keys and the bytes of parts; it must not know models, caches or tokens' meaning.
2. It may lose anything at any time and never fails a request: what goes wrong is a shorter lease or a refused store.
3. Tensors handed to `copy_to` and `store` may have any strides. Bytes are copied in and out, never shared, so nobody
   can change what is stored.

`MemoryBlockStore` is for tests and for one process that wants prefix reuse without a daemon.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from prefixcache.identity.fingerprint import NamespaceIdentity
from prefixcache.identity.keys import KEY_BYTES
from prefixcache.identity.layout import GroupKind, Layout

__all__ = ["STORE_FAILURES", "BlockLease", "BlockStore", "MemoryBlockStore", "PartBlocks", "StoreOpener", "split_keys"]

# What a store may raise when it fails; a request then goes on without it. Anything else is a defect and is raised.
STORE_FAILURES = (OSError, RuntimeError)


@dataclass(frozen=True, slots=True)
class PartBlocks:
    """One part of consecutive blocks, the first of which is block `first_block` of the prompt.

    `tensor`: [blocks, ...]; what follows the first axis holds the part in canonical order when read in C order.
    """

    part: int
    first_block: int
    tensor: torch.Tensor


class BlockLease(Protocol):
    """Blocks that stay valid until `release`."""

    @property
    def blocks(self) -> int:
        """Length of the restorable prefix, in blocks."""

    def first_block(self, part: int) -> int:
        """The first block of this part that the lease holds; above 0 where a sliding group needs its window only."""

    def copy_to(self, targets: Sequence[PartBlocks]) -> bool:
        """Copy blocks into the targets. False: the bytes must not be used (the lease was lost while copying)."""

    def release(self, used_blocks: int) -> None:
        """End the lease and tell how many blocks from block 0 were used."""


class BlockStore(Protocol):
    """Where blocks are kept. Keys are packed, 32 bytes each, from block 0 of the prompt."""

    def acquire(self, keys: bytes, prompt_tokens: int) -> BlockLease:
        """A lease on the longest restorable prefix, possibly of 0 blocks."""

    def store(self, keys: bytes, parts: Sequence[PartBlocks]) -> int:
        """Store blocks that are missing; all parts cover the same blocks. Returns how many became visible."""


StoreOpener = Callable[[NamespaceIdentity], tuple[bytes, BlockStore]]
"""identity of a namespace -> (root key, its store)"""


def split_keys(keys: bytes) -> list[bytes]:
    """Packed keys as a list of single ones."""
    return [keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES)]


class MemoryBlockStore:
    """Blocks in this process, without any bound. Safe for several threads."""

    def __init__(self, layout: Layout, block_tokens: int) -> None:
        self._lock = threading.Lock()
        self._blocks: dict[bytes, tuple[bytes, ...]] = {}
        self._parts = layout.parts(block_tokens)
        # Blocks each part needs before a prefix length: None for all of them.
        self._needed = [
            group.window_blocks(block_tokens) if group.kind is GroupKind.SLIDING else None
            for group in (layout.groups[part.group] for part in self._parts)
        ]

    def __len__(self) -> int:
        return len(self._blocks)

    def acquire(self, keys: bytes, prompt_tokens: int) -> MemoryLease:
        """A lease on the leading blocks that are here."""
        held = []
        with self._lock:
            for key in split_keys(keys):
                if key not in self._blocks:
                    break
                held.append(self._blocks[key])
        first = [0 if needed is None else max(0, len(held) - needed) for needed in self._needed]
        return MemoryLease(held, first)

    def store(self, keys: bytes, parts: Sequence[PartBlocks]) -> int:
        """Store what is not here yet."""
        names, stored = split_keys(keys), 0
        first = parts[0].first_block
        for offset in range(len(parts[0].tensor)):
            name = names[first + offset]
            content = tuple(_to_bytes(part.tensor[offset]) for part in parts)
            if [len(part) for part in content] != [part.bytes for part in self._parts]:
                raise ValueError("the tensors are not of the layout's size")
            with self._lock:
                stored += name not in self._blocks
                self._blocks.setdefault(name, content)
        return stored

    def part(self, key: bytes, part: int) -> bytes:
        """The bytes of one part of one block. Raises KeyError."""
        return self._blocks[key][part]

    def drop(self, keys: bytes) -> None:
        """Forget these blocks, as an eviction would."""
        with self._lock:
            for key in split_keys(keys):
                self._blocks.pop(key, None)

    def digest(self) -> int:
        """A value that changes when any stored byte does."""
        with self._lock:
            return hash(frozenset(self._blocks.items()))


class MemoryLease:
    """Blocks of a MemoryBlockStore; they are immutable bytes, so the lease cannot be lost."""

    def __init__(self, held: list[tuple[bytes, ...]], first: list[int]) -> None:
        self._held = held
        self._first = first
        self.used_blocks: int | None = None

    @property
    def blocks(self) -> int:
        """Length of the restorable prefix, in blocks."""
        return len(self._held)

    def first_block(self, part: int) -> int:
        """The first block of this part that may be read."""
        return self._first[part]

    def copy_to(self, targets: Sequence[PartBlocks]) -> bool:
        """Copy into the targets. Raises IndexError for a block the lease does not hold."""
        for target in targets:
            if target.first_block < self._first[target.part]:
                raise IndexError(f"block {target.first_block} is before the leased window")
            for block, tensor in enumerate(target.tensor, start=target.first_block):
                content = torch.frombuffer(bytearray(self._held[block][target.part]), dtype=tensor.dtype)
                tensor.copy_(content.view(tensor.shape))
        return True

    def release(self, used_blocks: int) -> None:
        """Remember what was used, for tests."""
        self.used_blocks = used_blocks


def _to_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
