"""Keys of a conversation that grows: hash what is new, keep what does not fill a block yet.

What belongs here: the state between two calls of `block_keys`. It must not know where the tokens come from.
"""

from collections.abc import Iterable

from prefixcache.identity import canonical
from prefixcache.identity.keys import (
    KEY_BYTES,
    TOKEN_BYTES,
    Extra,
    Tokens,
    block_keys,
    pack_extra,
    pack_tokens,
)

STATE_SCHEMA = 1


class KeyChain:
    """The block keys of one growing token sequence.

    `append` gives the same keys as one call over everything, however the tokens are cut. `export_state` is all that
    another process needs to go on: the last key and the tail, no prompt before it. Not safe for two threads at once.
    """

    __slots__ = ("_blocks_before", "_extras", "_keys", "_parent", "_tail", "block_tokens")

    def __init__(self, root: bytes, block_tokens: int) -> None:
        """`root`: 32 bytes from `root_key`. Raises ValueError as `block_keys` does."""
        block_keys(root, b"", block_tokens)  # checks both arguments
        self.block_tokens = block_tokens
        self._parent = bytes(root)
        self._keys = bytearray()
        self._tail = b""
        self._extras: list[Extra] = []
        self._blocks_before = 0

    @property
    def keys(self) -> bytes:
        """Packed keys (n x 32) of the whole blocks seen by this object; an imported chain starts empty."""
        return bytes(self._keys)

    @property
    def last_key(self) -> bytes:
        """The key the next block will hang on: that of the last whole block, or the root."""
        return bytes(self._keys[-KEY_BYTES:]) if self._keys else self._parent

    @property
    def token_count(self) -> int:
        """Tokens of the whole sequence, the tail and what came before an import included."""
        return self.block_count * self.block_tokens + len(self._tail) // TOKEN_BYTES

    @property
    def block_count(self) -> int:
        """Whole blocks of the whole sequence, those before an import included."""
        return self._blocks_before + len(self._keys) // KEY_BYTES

    def append(self, tokens: Tokens, extras: Iterable[Extra] = ()) -> bytes:
        """Add tokens, and return the packed keys of the blocks that became whole (b"" for none).

        `extras`: offsets count from the first token of the whole sequence and must lie within the appended tokens.
        Raises ValueError (and changes nothing) for tokens that `pack_tokens` refuses and for an extra outside of them.
        """
        packed = pack_tokens(tokens)
        first, last = self.token_count, self.token_count + len(packed) // TOKEN_BYTES
        added = list(extras)
        for extra in added:
            if not first <= extra.offset < last:
                raise ValueError(f"extra {extra.kind!r} at token {extra.offset} is outside of {first}..{last - 1}")
            pack_extra([Extra(extra.kind, extra.id, 0)])  # refuses a bad kind or id before anything changes
        pending = self._tail + packed if self._tail else packed
        by_block, waiting = self._split(self._extras + added, len(pending) // (TOKEN_BYTES * self.block_tokens))
        new = block_keys(self.last_key, pending, self.block_tokens, by_block)
        self._tail = bytes(pending[len(new) // KEY_BYTES * self.block_tokens * TOKEN_BYTES :])
        self._extras = waiting
        self._keys += new
        return new

    def export_state(self) -> bytes:
        """Canonical bytes from which `import_state` goes on in any process. It holds the tail's tokens: private."""
        return canonical.pack(
            {
                "schema": STATE_SCHEMA,
                "block_tokens": self.block_tokens,
                "blocks": self.block_count,
                "parent": self.last_key,
                "tail": self._tail,
                "extras": [[extra.kind, extra.id, extra.offset] for extra in self._extras],
            }
        )

    @classmethod
    def import_state(cls, state: bytes) -> "KeyChain":
        """A chain that goes on where `export_state` was called. Raises ValueError for bytes that are no such state."""
        value = canonical.unpack(state)
        if not isinstance(value, dict) or value.get("schema") != STATE_SCHEMA:
            raise ValueError(f"not the state of a key chain of schema {STATE_SCHEMA}")
        match value:
            case {
                "block_tokens": int(block_tokens),
                "blocks": int(blocks),
                "parent": bytes(parent),
                "tail": bytes(tail),
                "extras": list(extras),
            } if blocks >= 0:
                chain = cls(parent, block_tokens)
                chain._blocks_before = blocks
                if len(tail) >= block_tokens * TOKEN_BYTES:
                    raise ValueError("the state's tail holds a whole block")
                chain.append(tail, [_read_extra(item) for item in extras])
                return chain
        raise ValueError("the state of a key chain lacks a field")

    def _split(self, extras: list[Extra], whole_blocks: int) -> tuple[dict[int, bytes], list[Extra]]:
        """Extras of the blocks about to be hashed, by number in this call, and those that wait for the tail to fill."""
        blocks: dict[int, list[Extra]] = {}
        waiting = []
        for extra in extras:
            block, offset = divmod(extra.offset, self.block_tokens)
            block -= self.block_count
            if block >= whole_blocks:
                waiting.append(extra)
            else:
                blocks.setdefault(block, []).append(Extra(extra.kind, extra.id, offset))
        return {block: pack_extra(items) for block, items in blocks.items()}, waiting


def _read_extra(item: canonical.Value) -> Extra:
    match item:
        case [str(kind), bytes(identity), int(offset)]:
            return Extra(kind, identity, offset)
    raise ValueError("an extra in the state of a key chain is not [kind, id, offset]")
