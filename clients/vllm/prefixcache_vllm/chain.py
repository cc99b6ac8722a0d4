"""The keys of one request: its tokens in blocks, with what token ids do not say.

Rules: keys are made when asked for, by whoever asks, and kept. Any thread may ask, without a lock: what is kept is one
immutable value, and two threads that make the same keys make the same bytes. So the engine's scheduler thread hands the
prompt over by reference and finds its keys made when it needs them. Images and the like are extras of the block in
which they begin (see prefixcache.identity.keys). It must not know vLLM.
"""

from collections.abc import Callable, Sequence

from prefixcache.identity.keys import KEY_BYTES, Extra, block_keys, split_extras


class RequestChain:
    """A key chain under one namespace's root. `fingerprint` names the namespace."""

    __slots__ = ("_extras", "_keys", "_limit", "_root", "_tokens", "block_tokens", "fingerprint")

    def __init__(
        self,
        root: bytes,
        fingerprint: bytes,
        block_tokens: int,
        tokens: Sequence[int],
        extras: Sequence[Extra] = (),
        limit: Callable[[], int | None] | None = None,
    ) -> None:
        """`tokens`: read later, by any thread; may grow behind what `keys` is asked for. `extras`: offsets count from
        the request's first token. `limit`: asked anew each time. Raises ValueError for an extra that is none."""
        self.fingerprint = fingerprint
        self.block_tokens = block_tokens
        self._limit = limit
        self._root = root
        self._tokens = tokens
        self._extras = split_extras(extras, block_tokens) if extras else {}
        self._keys = b""

    @property
    def limit(self) -> int | None:
        """Tokens in front of the first one whose KV cannot be told from others, None where there is none."""
        return None if self._limit is None else self._limit()

    @property
    def made(self) -> int:
        """Of how many blocks the keys are kept."""
        return len(self._keys) // KEY_BYTES

    def keys(self, blocks: int) -> bytes:
        """Packed keys of the first `blocks` blocks, all of which must be there. Raises ValueError for ids that are
        none."""
        keys, size = self._keys, self.block_tokens
        made = len(keys) // KEY_BYTES
        if made < blocks:
            extras = {block - made: extra for block, extra in self._extras.items() if block >= made}
            tokens = self._tokens[made * size : blocks * size]
            keys += block_keys(keys[-KEY_BYTES:] or self._root, tokens, size, extras)
            self._keys = keys
        return keys if made <= blocks else keys[: blocks * KEY_BYTES]
