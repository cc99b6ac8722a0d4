"""The keys of one request: its tokens in blocks, with what token ids do not say.

Rules: keys are made when asked for, from the tokens that came since. Images and the like are extras of the block in
which they begin (see prefixcache.identity.keys). It must not know vLLM.
"""

from collections.abc import Sequence

from prefixcache.identity.keychain import KeyChain
from prefixcache.identity.keys import KEY_BYTES, Extra


class RequestChain:
    """A key chain under one namespace's root. `fingerprint` names the namespace."""

    __slots__ = ("_chain", "_extras", "fingerprint")

    def __init__(self, root: bytes, fingerprint: bytes, block_tokens: int, extras: Sequence[Extra] = ()) -> None:
        """`extras`: offsets count from the request's first token."""
        self.fingerprint = fingerprint
        self._chain = KeyChain(root, block_tokens)
        self._extras = sorted(extras, key=lambda extra: extra.offset)

    @property
    def tokens(self) -> int:
        """How many tokens have been added."""
        return self._chain.token_count

    def add(self, tokens: Sequence[int]) -> None:
        """The next tokens. Raises ValueError for ids that are none."""
        if not tokens:
            return
        end = self._chain.token_count + len(tokens)
        now = [extra for extra in self._extras if extra.offset < end]
        self._extras = self._extras[len(now) :]
        self._chain.append(list(tokens), now)

    def keys(self, blocks: int | None = None) -> bytes:
        """Packed keys of the whole blocks, or of the first `blocks` of them."""
        keys = self._chain.keys
        return keys if blocks is None else keys[: blocks * KEY_BYTES]
