"""`--host-bytes 900TiB` was refused with a number of bytes that "is not a multiple of 4096 in 1..17592186044416"."""

from __future__ import annotations

import pytest

from prefixcache.server.config import ConfigError, load


def test_it_says_the_most_in_the_words_of_the_option() -> None:
    with pytest.raises(ConfigError, match=r"^host_bytes must be at most 16TiB, got 900TiB$"):
        load({"host_bytes": "900TiB"}, environ={})
    with pytest.raises(ConfigError, match=r"^host_bytes must be at least 4KiB, got 100$"):
        load({"host_bytes": "100"}, environ={})
    assert load({"host_bytes": "16TiB"}, environ={}).config.host_bytes == 1 << 44
