"""One configuration out of flags, environment, file and defaults."""

from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from prefixcache.server import defaults
from prefixcache.server.config import Config, ConfigError, load


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "daemon.toml"


def test_flags_win_over_environment_over_file_over_defaults(file: Path) -> None:
    file.write_text('host-bytes = "1GiB"\nlease_ttl = "5s"\nmax_keys = 7\n[session]\nttl = "40s"\n')
    environ = {"PREFIXCACHE_HOST_BYTES": "2GiB", "PREFIXCACHE_LEASE_TTL": "6s"}
    loaded = load({"host_bytes": "3GiB", "listen": None}, environ, file)
    config = loaded.config
    assert (config.host_bytes, config.lease_ttl, config.max_keys, config.session_ttl) == (3 << 30, 6.0, 7, 40.0)
    sources = {item.key: item.source for item in loaded.describe()}
    assert sources["host_bytes"] == "flag --host-bytes"
    assert sources["lease_ttl"] == "env PREFIXCACHE_LEASE_TTL"
    assert sources["max_keys"] == sources["session_ttl"] == f"file {file}"
    assert sources["listen"] == "default"
    assert loaded.is_explicit("host_bytes")
    assert not loaded.is_explicit("listen")


def test_the_file_may_be_named_by_the_environment(file: Path) -> None:
    file.write_text("max_streams = 3\n")
    assert load(environ={"PREFIXCACHE_CONFIG": str(file)}).config.max_streams == 3


def test_every_key_can_be_set_by_its_variable_and_is_described() -> None:
    for item in load(environ={}).describe():
        assert item.env == f"PREFIXCACHE_{item.key.upper()}"
        again = load(environ={item.env: item.value})
        assert getattr(again.config, item.key) == getattr(load(environ={}).config, item.key), item.key
        assert {each.key: each.source for each in again.describe()}[item.key] == f"env {item.env}"
        assert item.doc
    assert {item.key for item in load(environ={}).describe()} == {field.name for field in fields(Config)}


def test_the_defaults_that_others_rely_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    config = load(environ={}).config
    assert config.socket == "/run/user/7/prefixcache/daemon.sock"
    assert (config.listen, config.http) == ("", "127.0.0.1:8440")
    assert not config.warm_restart
    assert not config.any_user


def test_the_socket_without_a_runtime_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert str(defaults.socket_path()) == "/run/prefixcache/daemon.sock"
    monkeypatch.setattr("os.geteuid", lambda: 1234)
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/somewhere")
    assert str(defaults.socket_path()) == "/somewhere/prefixcache-1234/daemon.sock"


@pytest.mark.parametrize(
    ("free", "expected"), [(64 << 30, 4 << 30), (8 << 30, 2 << 30), (10 << 20, 2 << 20), (0, 2 << 20)]
)
def test_the_pool_takes_a_quarter_of_what_is_free(monkeypatch: pytest.MonkeyPatch, free: int, expected: int) -> None:
    monkeypatch.setattr(defaults, "available_bytes", lambda: free)
    assert defaults.host_bytes() == expected


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"host_byts": "1GiB"}, ["unknown key 'host_byts'", "--host-byts", "did you mean 'host_bytes'"]),
        ({"zzz": "1"}, ["unknown key 'zzz'", "known keys"]),
        ({"host_bytes": "many"}, ["host_bytes", "flag --host-bytes", "4GiB"]),
        ({"host_bytes": "0"}, ["host_bytes", "above 0"]),
        ({"listen": "nowhere"}, ["listen", "HOST:PORT"]),
        ({"http": "127.0.0.1:99999"}, ["http", "HOST:PORT"]),
        ({"log_format": "xml"}, ["log_format", "human, json"]),
        ({"socket": "relative.sock"}, ["socket", "absolute"]),
        ({"socket": "/" + "x" * 200}, ["socket", "107"]),
        ({"max_message_bytes": "1KiB"}, ["max_message_bytes", "64KiB"]),
        ({"warm_restart": "perhaps"}, ["warm_restart", "true or false"]),
        ({"max_keys": ["1"]}, ["max_keys", "list"]),
        ({"warm_restart": "yes", "checksums": "no"}, ["warm_restart", "checksums"]),
    ],
)
def test_a_bad_value_names_its_key_and_what_would_do(flags: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        load(flags, {})
    for word in words:
        assert word in str(refused.value)


def test_a_mistyped_variable_is_refused_and_a_clients_own_is_not() -> None:
    with pytest.raises(ConfigError, match="PREFIXCACHE_HOST_BYTE"):
        load(environ={"PREFIXCACHE_HOST_BYTE": "1GiB"})
    load(environ={"PREFIXCACHE_ADDRESS": "unix:///x", "PREFIXCACHE_TENANT_KEY": "k"})


@pytest.mark.parametrize(
    ("content", "words"),
    [("host_bytes =", ["not TOML"]), ('[tape]\nbytes = "1GiB"', ["tape_bytes"]), ("x = 1979-05-27", ["'x'"])],
)
def test_a_bad_file_is_refused(file: Path, content: str, words: list[str]) -> None:
    file.write_text(content)
    with pytest.raises(ConfigError) as refused:
        load(environ={}, file=file)
    for word in [*words, str(file)]:
        assert word in str(refused.value)
    with pytest.raises(ConfigError, match="cannot read"):
        load(environ={}, file=file.with_name("absent"))


def test_it_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        load(environ={}).config.socket = "/x"  # type: ignore[misc]  # that is the point


def test_every_policy_orders_two_tiers(tmp_path: Path) -> None:
    for policy in ("lru", "tg", "arc"):
        assert load({"disk": str(tmp_path), "policy": policy}, environ={}).config.policy == policy


def test_the_policy_is_one_of_those_there_are() -> None:
    assert load(environ={}).config.policy == "lru"
    assert load({"policy": "tg"}, environ={}).config.policy == "tg"
    with pytest.raises(ConfigError, match=r"policy must be one of lru, lru2, .*, tg, got 'fifo'"):
        load({"policy": "fifo"}, environ={})


def test_devices_may_be_given_one_by_one_or_as_a_list(file: Path) -> None:
    wish = ("cuda:0=1GiB", "cuda:1=2GiB")
    file.write_text(f"gpu = {list(wish)}")
    for loaded in (
        load({"gpu": wish}, environ={}),
        load({"gpu": ",".join(wish)}, environ={}),
        load({"gpu": []}, environ={}, file=file),
        load(environ={"PREFIXCACHE_GPU": ",".join(wish)}),
    ):
        assert loaded.config.gpu == ",".join(wish)
    with pytest.raises(ConfigError, match="gpu: a device is listed twice"):
        load({"gpu": ["cpu=1MiB", "cpu=2MiB"]}, environ={})
