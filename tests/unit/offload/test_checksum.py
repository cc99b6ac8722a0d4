"""The checksum of a part: a known value, and one flipped bit."""

import numpy as np

from prefixcache_offload.checksum import DIGEST_BYTES, checksum, matches


def test_known_value() -> None:
    # XXH3-128 of no bytes, from the xxHash specification's reference program
    assert checksum(np.zeros(0, np.uint8)).hex() == "99aa06d3014798d86001c324468d497f"


def test_one_flipped_bit_is_found() -> None:
    data = np.random.default_rng(1).integers(0, 256, 8192, dtype=np.uint8)
    digest = checksum(data)
    assert len(digest) == DIGEST_BYTES
    assert matches(data, digest)
    data[5000] ^= 16
    assert not matches(data, digest)
