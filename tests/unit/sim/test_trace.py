"""Reading traces: what is read, and what is said about what cannot be."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from prefixcache.sim.trace import Request, Trace, TraceError, read_trace
from tests.unit.sim.traces import made_up, write

GOOD = '{"timestamp": 2000, "input_length": 700, "output_length": 3, "hash_ids": [5, 6], "more": null}\n'
EARLIER = '{"timestamp": 1500.5, "input_length": 0, "hash_ids": []}\n'


def test_rows_come_in_the_order_of_time(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(GOOD + "\n" + EARLIER)
    trace = read_trace(path)
    assert trace.requests == (Request(1.5005, 0, ()), Request(2.0, 700, (5, 6)))
    assert (trace.unique_blocks, trace.blocks, trace.tokens, trace.skipped) == (2, 2, 700, 0)


def test_requests_of_one_time_stay_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(GOOD + GOOD.replace("5, 6", "7"))
    assert [request.ids for request in read_trace(path).requests] == [(5, 6), (7,)]


def test_gzipped_is_read_whatever_its_name(tmp_path: Path) -> None:
    plain = write(made_up(50, 1), tmp_path / "a.jsonl")
    zipped = tmp_path / "b.trace"
    zipped.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_trace(zipped).requests == read_trace(plain).requests == made_up(50, 1).requests


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        ('{"input_length": 1, "hash_ids": []}', "timestamp is missing"),
        ('{"timestamp": true, "input_length": 1, "hash_ids": []}', "timestamp must be milliseconds"),
        ('{"timestamp": NaN, "input_length": 1, "hash_ids": []}', "timestamp must be milliseconds"),
        ('{"timestamp": 1e999, "input_length": 1, "hash_ids": []}', "timestamp must be milliseconds"),
        (f'{{"timestamp": {10**400}, "input_length": 1, "hash_ids": []}}', "timestamp must be milliseconds"),
        ("[" * 100_000, "not"),
        ('{"timestamp": 1, "input_length": -1, "hash_ids": []}', "input_length must be"),
        ('{"timestamp": 1, "input_length": 1.5, "hash_ids": []}', "input_length must be"),
        ('{"timestamp": 1, "input_length": 1, "hash_ids": 7}', "hash_ids must be a list"),
        ('{"timestamp": 1, "input_length": 1, "hash_ids": ["7"]}', "hash_ids must be a list"),
        ('{"timestamp": 1, "input_length": 1, "hash_ids": [18446744073709551616]}', "hash_ids must be a list"),
    ],
)
def test_a_malformed_line_is_named_or_skipped(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(GOOD + line + "\n" + EARLIER)
    with pytest.raises(TraceError, match=f"line 2: {says}"):
        read_trace(path)
    trace = read_trace(path, skip_bad=True)
    assert (len(trace.requests), trace.skipped) == (2, 1)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"\xff\xfe\xfa\n")
    with pytest.raises(TraceError, match="line 1: not UTF-8"):
        read_trace(path)


def test_what_is_no_trace_at_all(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with pytest.raises(TraceError, match=r"cannot read .*No such file"):
        read_trace(path)
    with pytest.raises(TraceError, match="cannot read"):
        read_trace(tmp_path)
    path.write_text("\n")
    with pytest.raises(TraceError, match="has no request"):
        read_trace(path)
    path.write_text("{\n")
    with pytest.raises(TraceError, match=r"has no request \(1 malformed lines\)"):
        read_trace(path, skip_bad=True)
    path.write_bytes(gzip.compress(GOOD.encode() * 1000)[:-20])
    with pytest.raises(TraceError, match="is damaged"):
        read_trace(path)


def test_the_block_size_that_fits() -> None:
    trace = made_up(30, 2)
    assert trace.fits(512)
    assert not trace.fits(64)
    assert Trace("empty prompt", (Request(0.0, 0, ()),)).fits(64)
