"""Settings: what may be said, and what is an error at start."""

from pathlib import Path
from typing import Any

import pytest

from prefixcache_sglang.options import Options, read_options


def test_our_keys_are_read_and_others_are_left_alone() -> None:
    said = {"interface_v1": 1, "prefixcache.address": "unix:///x", "prefixcache.ask_timeout_s": 1, "tp_lcm_size": 4}
    assert read_options(said) == Options(address="unix:///x", ask_timeout_s=1)
    assert read_options(None) == read_options({}) == Options()


@pytest.mark.parametrize(
    "said",
    [
        {"prefixcache.adress": "unix:///x"},
        {"prefixcache.address": 5},
        {"prefixcache.ask_timeout_s": "1"},
        {"prefixcache.ask_timeout_s": True},
        {"prefixcache.ask_timeout_s": 0},
        {"prefixcache.store_timeout_s": -1.0},
        {"prefixcache.load_timeout_s": -1.0},
    ],
)
def test_what_means_nothing_is_an_error(said: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="prefixcache"):
        read_options(said)


def test_the_secret_is_64_hex_digits(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("ab" * 32 + "\n")
    assert Options(tenant_key_file=str(file)).tenant_key() == b"\xab" * 32
    assert Options().tenant_key() is None
    file.write_text("ab")
    with pytest.raises(ValueError, match="64 hex digits"):
        Options(tenant_key_file=str(file)).tenant_key()
