"""Sizes, durations, addresses, both ways."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.server import units


@pytest.mark.parametrize(
    ("text", "expected"),
    [("4GiB", 4 << 30), ("512 MiB", 512 << 20), ("1.5g", 3 << 29), ("4096", 4096), ("10MB", 10**7), ("2k", 2048)],
)
def test_sizes(text: str, expected: int) -> None:
    assert units.parse_size(text) == expected


@pytest.mark.parametrize(("text", "expected"), [("30s", 30), ("250ms", 0.25), ("5m", 300), ("1h", 3600), ("7", 7)])
def test_durations(text: str, expected: float) -> None:
    assert units.parse_duration(text) == expected


@pytest.mark.parametrize("text", ["", "-1", "4GiBB", "1e9", "GiB", "1 2", "0x10"])
def test_what_is_neither(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        units.parse_size(text)
    with pytest.raises(ValueError, match="expected"):
        units.parse_duration(text)


@given(st.integers(0, 1 << 50))
def test_a_size_that_was_shown_reads_as_the_same(size: int) -> None:
    assert units.parse_size(units.format_size(size)) == size


@pytest.mark.parametrize(
    ("text", "expected"),
    [("h:1", ("h", 1)), (":80", ("127.0.0.1", 80)), ("[::1]:0", ("::1", 0)), ("0.0.0.0:65535", ("0.0.0.0", 65535))],
)
def test_addresses(text: str, expected: tuple[str, int]) -> None:
    assert units.parse_host_port(text) == expected
    assert units.parse_host_port(units.format_host_port(*expected)) == expected


@pytest.mark.parametrize("text", ["h", "h:", "h:x", "h:65536", "h:-1"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        units.parse_host_port(text)


@pytest.mark.parametrize(("text", "expected"), [("On", True), ("1", True), ("no", False), ("FALSE", False)])
def test_switches(text: str, expected: bool) -> None:  # parametrized
    assert units.parse_bool(text) is expected


def test_devices() -> None:
    assert units.parse_devices("") == []
    wish = "cuda:0=8GiB, cuda:GPU-6a3f=1.5g,cpu=64MiB"
    assert units.parse_devices(wish) == [("cuda:0", 8 << 30), ("cuda:GPU-6a3f", 3 << 29), ("cpu", 64 << 20)]


@pytest.mark.parametrize("text", ["cuda:0", "cuda=1GiB", "gpu:0=1GiB", "cpu=", "cpu=0", "cpu=1MiB,cpu=1MiB", "=1MiB"])
def test_devices_that_cannot_be(text: str) -> None:
    with pytest.raises(ValueError, match=r"cuda:0=8GiB|a size|twice|above 0"):
        units.parse_devices(text)
