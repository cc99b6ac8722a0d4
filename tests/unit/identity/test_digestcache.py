"""The cache of digests: right or empty, never wrong, and never in the way."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefixcache.identity.digestcache import MAX_ENTRIES, DigestCache, Stamp, default_path, file_stamp

OLD = 1_000_000_000_000_000_000
DIGEST = bytes(range(32))


def stamp(number: int = 0, *, mtime_ns: int = OLD) -> Stamp:
    return ((1, number, mtime_ns, 10),)


def test_a_digest_is_remembered_by_another_object(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "cache.json"
    assert DigestCache(path).get(stamp()) is None
    DigestCache(path).put(stamp(), DIGEST)
    assert DigestCache(path).get(stamp()) == DIGEST
    assert DigestCache(path).get(stamp(1)) is None
    assert [file.name for file in path.parent.iterdir()] == ["cache.json"]
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_changed_file_has_another_stamp(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"one")
    first = file_stamp([file])
    os.utime(file, ns=(OLD, OLD))
    second = file_stamp([file])
    file.write_bytes(b"longer")
    os.utime(file, ns=(OLD, OLD))
    third = file_stamp([file])
    copy = tmp_path / "g"
    copy.write_bytes(b"longer")
    os.utime(copy, ns=(OLD, OLD))
    assert len({first, second, third, file_stamp([copy])}) == 4
    assert file_stamp([file, copy]) == file_stamp([copy, file])


def test_a_file_that_may_still_change_unseen_is_not_remembered(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"new")
    cache = DigestCache(tmp_path / "cache.json")
    cache.put(file_stamp([file]), DIGEST)
    assert cache.get(file_stamp([file])) is None


def test_the_oldest_are_dropped(tmp_path: Path) -> None:
    cache = DigestCache(tmp_path / "cache.json")
    for number in range(MAX_ENTRIES + 3):
        cache.put(stamp(number), DIGEST)
    assert [cache.get(stamp(number)) is None for number in range(5)] == [True, True, True, False, False]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.binary(max_size=100)
    | st.sampled_from(
        [
            b"", b"[]", b"null", b"{}", b'{"schema": 1}', b'{"schema": 1, "digests": []}', b"[" * 50_000,
            b'{"schema": 1, "digests": {"1:0:1000000000000000000:10": 5}}',
            b'{"schema": 1, "digests": {"1:0:1000000000000000000:10": "00"}}',
            b'{"schema": 1, "digests": {"1:0:1000000000000000000:10": "no hex"}}',
            b'{"schema": 2, "digests": {"1:0:1000000000000000000:10": "' + b"00" * 32 + b'"}}',
        ]
    )
)  # fmt: skip
def test_a_corrupt_cache_counts_as_empty_and_is_replaced(tmp_path: Path, content: bytes) -> None:
    cache = DigestCache(tmp_path / "cache.json")
    (tmp_path / "cache.json").write_bytes(content)
    assert cache.get(stamp()) is None
    cache.put(stamp(), DIGEST)
    assert cache.get(stamp()) == DIGEST


def test_a_place_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    cache = DigestCache(tmp_path / "file" / "cache.json")
    cache.put(stamp(), DIGEST)
    assert cache.get(stamp()) is None
    taken = tmp_path / "taken"
    (taken / "cache.json").mkdir(parents=True)
    cache = DigestCache(taken / "cache.json")
    cache.put(stamp(), DIGEST)
    assert cache.get(stamp()) is None
    assert [file.name for file in taken.iterdir()] == ["cache.json"]


def test_the_users_own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path() == DigestCache().path == tmp_path / "prefixcache" / "weights.json"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for value in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert default_path() == tmp_path / "home" / ".cache" / "prefixcache" / "weights.json"


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("no home")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    cache = DigestCache()
    assert cache.path is None
    cache.put(stamp(), DIGEST)
    assert cache.get(stamp()) is None
