"""`prefixcache describe`: token files of every form, the right keys asked for, the answer by tier."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from prefixcache.cli import token_files
from prefixcache.cli.errors import CliError
from prefixcache.identity import block_keys, root_key
from prefixcache.v1 import admin_pb2, common_pb2
from tests.unit.cli.conftest import FINGERPRINT, OTHER_FINGERPRINT, FakeAdmin, Run, a_namespace, some_stats

TOKENS = list(range(1000, 1200))
PACKED = np.array(TOKENS, "<u4").tobytes()


def answer() -> admin_pb2.DescribePrefixResponse:
    """Two of three blocks found, one of them also in the next tier."""
    host, disk = common_pb2.TIER_HOST, common_pb2.TIER_DISK
    blocks = [
        admin_pb2.BlockDescription(block=0, tiers=[host], leases=2, idle_s=1.0),
        admin_pb2.BlockDescription(block=1, tiers=[disk], idle_s=3.0),
    ]
    tiers = common_pb2.TierTokens(host=64, disk=64)
    return admin_pb2.DescribePrefixResponse(
        block_tokens=64, tokens=192, tiers=tiers, blocks=blocks, stop=common_pb2.REASON_NOT_CACHED
    )


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompt.json"
    path.write_text(json.dumps(TOKENS))
    return path


def test_asks_for_the_keys_of_whole_blocks_and_tells_tokens_by_tier(
    admin: FakeAdmin, run: Run, token_file: Path
) -> None:
    admin.described = answer()
    result = run("describe", str(token_file), "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    request = admin.requests[-1]
    assert isinstance(request, admin_pb2.DescribePrefixRequest)
    assert request.fingerprint == FINGERPRINT
    assert request.keys == block_keys(root_key(FINGERPRINT), PACKED, 64)
    assert request.tokens == b""
    assert told["tokens"] == {"gpu": 0, "host": 64, "disk": 64, "peer": 0}
    assert (told["cached_tokens"], told["prompt_tokens"], told["stop"]) == (128, 200, "not_cached")
    assert [block["tiers"] for block in told["blocks"]] == [["host"], ["disk"]]


def test_table_gathers_blocks_of_the_same_tiers(admin: FakeAdmin, run: Run, token_file: Path) -> None:
    admin.described = answer()
    shown = run("describe", str(token_file)).stdout
    assert "128 of 200 tokens cached (64.0%)" in shown
    assert "0 - 63" in shown
    assert "64 - 127" in shown


def test_salt_and_tenant_key_take_part(admin: FakeAdmin, run: Run, token_file: Path, tmp_path: Path) -> None:
    secret = tmp_path / "tenant.key"
    secret.write_bytes(b"s" * 32)
    secret.chmod(0o600)
    assert run("describe", str(token_file), "--cache-salt", "a", "--tenant-key-file", str(secret)).exit_code == 0
    request = admin.requests[-1]
    assert isinstance(request, admin_pb2.DescribePrefixRequest)
    assert request.keys == block_keys(root_key(FINGERPRINT, tenant_key=b"s" * 32, cache_salt=b"a"), PACKED, 64)


@pytest.mark.parametrize(("secret", "mode"), [(b"short", 0o600), (bytes(32), 0o600), (b"s" * 32, 0o644)])
def test_bad_tenant_keys_are_refused(run: Run, admin: FakeAdmin, token_file: Path, secret: bytes, mode: int) -> None:
    path = token_file.with_name("tenant.key")
    path.write_bytes(secret)
    path.chmod(mode)
    result = run("describe", str(token_file), "--tenant-key-file", str(path))
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")


@pytest.mark.parametrize(
    "content",
    [
        json.dumps(TOKENS).encode(),
        " ".join(map(str, TOKENS)).encode() + b"\n",
        "\n".join(map(str, TOKENS)).encode(),
        ", ".join(map(str, TOKENS)).encode(),
        PACKED,
    ],
    ids=["json", "spaces", "lines", "commas", "raw"],
)
def test_token_file_forms(content: bytes) -> None:
    assert token_files.parse_tokens(content, "x") == PACKED


@pytest.mark.parametrize(
    "content", [b"[1, 2.5]", b"[1, true]", b"[1", b"4294967296", b"[-1]", b"hello", b"\xff\xfe\xfd"]
)
def test_what_is_no_token_file_is_refused_without_showing_it(content: bytes) -> None:
    with pytest.raises(CliError, match="is not a token file") as caught:
        token_files.parse_tokens(content, "x")
    assert "--tokenizer" in caught.value.hint


def test_standard_input(admin: FakeAdmin, run: Run) -> None:
    assert run("describe", "-", "--json", stdin=PACKED).exit_code == 0
    request = admin.requests[-1]
    assert isinstance(request, admin_pb2.DescribePrefixRequest)
    assert len(request.keys) == 3 * 32


def test_less_than_a_block(admin: FakeAdmin, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_text("1 2 3")
    result = run("describe", str(path), "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["error"]["reason"] == "partial_block"


def test_missing_file_and_missing_tokenizer(run: Run, tmp_path: Path, token_file: Path) -> None:
    gone = run("describe", str(tmp_path / "gone"))
    assert (gone.exit_code, "cannot read" in gone.stderr) == (1, True)
    folder = run("describe", str(token_file), "--tokenizer", str(tmp_path / "gone"))
    assert (folder.exit_code, "no tokenizer folder" in folder.stderr) == (2, True)


def test_namespace_by_label_by_fingerprint_or_the_only_one(admin: FakeAdmin, run: Run, token_file: Path) -> None:
    admin.stats = some_stats(a_namespace("a"), a_namespace("b", OTHER_FINGERPRINT))
    for wanted in ("b", OTHER_FINGERPRINT.hex()[:6], OTHER_FINGERPRINT.hex().upper()):
        assert run("describe", str(token_file), "--namespace", wanted).exit_code == 0
        request = admin.requests[-1]
        assert isinstance(request, admin_pb2.DescribePrefixRequest)
        assert request.fingerprint == OTHER_FINGERPRINT
    undecided = run("describe", str(token_file))
    assert (undecided.exit_code, "several namespaces" in undecided.stderr) == (2, True)
    unknown = run("describe", str(token_file), "--namespace", "c")
    assert (unknown.exit_code, "there are: a (" in unknown.stderr) == (1, True)


def test_no_namespace_yet(admin: FakeAdmin, run: Run, token_file: Path) -> None:
    del admin.stats.namespaces[:]
    result = run("describe", str(token_file), "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["error"]["reason"] == "namespace_unknown"
