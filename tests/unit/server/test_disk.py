"""Opening a data directory: sizes, refusals, trouble; and namespaces as they stand in the log's book."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from prefixcache.core.ids import GroupKind, NamespaceKind
from prefixcache.core.spec import GroupSpec, NamespaceSpec, PartSpec
from prefixcache.server.config import Config, ConfigError
from prefixcache.server.disk import DiskStore, _in_pieces, disk_options
from prefixcache.server.disk_specs import pack_spec, unpack_spec
from prefixcache_offload.disk import ENTRY
from prefixcache_offload.pool import HostPool

MIB = 1 << 20
SPEC = NamespaceSpec(
    64, (GroupSpec(GroupKind.FULL), GroupSpec(GroupKind.SLIDING, 128)), (PartSpec(0, 2, 8192), PartSpec(1, 1, 100))
)


@pytest.fixture
def pool():  # type: ignore[no-untyped-def]  # a fixture that ends
    made = HostPool.create(0, MIB, MIB)
    yield made
    made.close()


def config(path: Path | str, **values: int) -> Config:
    return Config(disk=str(path), **({"disk_bytes": 64 * MIB} | values))  # type: ignore[arg-type]  # numbers only


def test_a_spec_comes_back_as_it_was() -> None:
    assert unpack_spec(pack_spec("Llama", SPEC)) == ("Llama", SPEC, ())
    foreign = NamespaceSpec(1, (GroupSpec(GroupKind.FULL),), (PartSpec(0, 1, 1),), NamespaceKind.FOREIGN)
    assert unpack_spec(pack_spec("Llama", SPEC, (2,) * len(SPEC.groups)))[2] == (2,) * len(SPEC.groups)
    assert unpack_spec(pack_spec("", foreign)) == ("", foreign, ())


@pytest.mark.parametrize(
    "packed",
    [b"", b"\xc1", msgspec.msgpack.encode([3, "", 64, "tokens", [], []]), msgspec.msgpack.encode([1, "", 64])],
)
def test_what_is_no_spec_is_refused(packed: bytes) -> None:
    with pytest.raises((ValueError, TypeError, msgspec.DecodeError)):
        unpack_spec(packed)


def test_a_small_cap_is_still_cut_into_segments() -> None:
    assert disk_options(config("x", disk_bytes=64 * MIB)).segment_bytes == 4 * MIB
    assert disk_options(config("x", disk_bytes=1 << 40)).segment_bytes == 256 * MIB
    assert disk_options(config("x", disk_bytes=MIB)).segment_bytes == MIB


def test_a_cap_below_one_segment_is_refused_with_the_sizes() -> None:
    with pytest.raises(ConfigError, match="smaller than one segment"):
        disk_options(config("x", disk_bytes=MIB, disk_segment_bytes=2 * MIB))


def test_a_directory_of_somebody_else_is_refused(tmp_path: Path, pool: HostPool) -> None:
    (tmp_path / "letter.txt").touch()
    with pytest.raises(ConfigError, match="not a prefixcache data directory"):
        DiskStore(config(tmp_path), pool, lambda: None)


def test_two_daemons_do_not_share_a_directory(tmp_path: Path, pool: HostPool) -> None:
    first = DiskStore(config(tmp_path), pool, lambda: None)
    with pytest.raises(ConfigError, match="another daemon"):
        DiskStore(config(tmp_path), pool, lambda: None)
    assert first.stop()


def test_a_directory_that_cannot_be_used_is_trouble_and_no_failure(tmp_path: Path, pool: HostPool) -> None:
    (tmp_path / "file").touch()
    store = DiskStore(config(tmp_path / "file" / "data"), pool, lambda: None)
    assert store.trouble().startswith("disk tier off: cannot use")
    assert store.stop()


def test_a_newer_format_is_refused(tmp_path: Path, pool: HostPool) -> None:
    assert DiskStore(config(tmp_path), pool, lambda: None).stop()
    told = (tmp_path / "format").read_text()
    (tmp_path / "format").write_text(told.replace('"format": 1', '"format": 2'))
    with pytest.raises(ConfigError, match="use a newer program"):
        DiskStore(config(tmp_path), pool, lambda: None)


@pytest.mark.parametrize(
    ("length", "joined", "most"), [(1, True, 128), (4, True, 400), (1000, True, 1024), (1000, False, 128)]
)
def test_what_a_restart_tells_at_once_is_bounded_by_what_it_costs(length: int, joined: bool, most: int) -> None:
    """Chains of `length` blocks, newest first; a block that is a node of its own costs as much as eight in one node."""
    numbers = np.arange(4000, dtype=np.uint32)[::-1]
    entries = np.zeros(len(numbers), ENTRY)
    entries["key"][:, :4] = (numbers + 1).view(np.uint8).reshape(-1, 4)
    entries["parent"][:, :4] = np.where(numbers % length, numbers, 0).astype(np.uint32).view(np.uint8).reshape(-1, 4)
    pieces = list(_in_pieces(entries, joined=joined))
    assert np.array_equal(np.concatenate(pieces), entries)
    assert most // 2 < max(len(piece) for piece in pieces) <= most
    assert [len(piece) for piece in _in_pieces(entries[:1], joined=joined)] == [1]
