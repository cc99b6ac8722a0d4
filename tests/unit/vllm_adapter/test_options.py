"""Settings: only ours, only known ones, only sensible values."""

from pathlib import Path

import pytest

from prefixcache_vllm.options import Options, read_options


def test_reads_ours_and_leaves_others() -> None:
    options = read_options({"prefixcache.address": "unix:///x", "prefixcache.ask_timeout_s": 1, "other": 3})
    assert options == Options(address="unix:///x", ask_timeout_s=1)
    assert read_options({}) == Options()


@pytest.mark.parametrize(
    ("extra", "word"),
    [
        ({"prefixcache.adress": "x"}, "known are"),
        ({"prefixcache.block_tokens": "64"}, "must be int"),
        ({"prefixcache.block_tokens": True}, "must be int"),
        ({"prefixcache.prompt_only": 1}, "must be bool"),
        ({"prefixcache.load": "later"}, "async, sync"),
        ({"prefixcache.pinned_share": 0.0}, "pinned_share"),
        ({"prefixcache.block_tokens": 0}, "block_tokens"),
        ({"prefixcache.codec": "int3"}, "raw, int8, int4"),
    ],
)
def test_refuses(extra: dict[str, object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        read_options(extra)


def test_what_a_token_costs_is_told_by_every_client_of_the_engine() -> None:
    limits = read_options({"prefixcache.recompute_s_per_token": 0.001}).limits(0.5, "vllm")
    assert (limits.recompute_s_per_token, limits.timeout_s, limits.client_name) == (0.001, 0.5, "vllm")
    with pytest.raises(ValueError, match="recompute_s_per_token"):
        read_options({"prefixcache.recompute_s_per_token": -1}).limits(0.5, "vllm")


def test_tenant_key(tmp_path: Path) -> None:
    assert Options().tenant_key() is None
    file = tmp_path / "key"
    file.write_text("ab" * 32 + "\n")
    assert Options(tenant_key_file=str(file)).tenant_key() == b"\xab" * 32
    file.write_text("ab" * 31)
    with pytest.raises(ValueError, match="64 hex"):
        Options(tenant_key_file=str(file)).tenant_key()
