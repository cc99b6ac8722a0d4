"""Weights epochs: what tells KV computed with weights that were changed in place from all other KV.

Rule: two processes that changed the same checkpoint in different ways must never meet, so the number is drawn, not
counted. Processes that make the very same change may agree on a number of their own.
"""

import secrets
from typing import Final

_FIRST_DRAWN: Final = 1 << 62


def new_epoch() -> int:
    """A number for `NamespaceIdentity.weights_epoch` that nobody else draws: 62 random bits, above 2^62."""
    return _FIRST_DRAWN | secrets.randbits(62)
