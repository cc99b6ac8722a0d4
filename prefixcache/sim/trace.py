"""Request traces: JSON lines, plain or gzipped, one request a line.

Rules: a row has `timestamp` (milliseconds), `input_length` (tokens) and `hash_ids` (one number per block of the prompt,
the last block maybe partial; one number = one unique prefix); other fields are ignored, blank lines too. A line that is
something else is an error with its number, or is skipped and counted where asked for. Must not know: planner, policies.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

_GZIP_MAGIC: Final = b"\x1f\x8b"
_MAX_TIME_MS: Final = 1 << 53
_MAX_ID: Final = (1 << 64) - 1
_FITTING_SHARE: Final = 0.9


class TraceError(Exception):
    """A trace that cannot be read; the message says where and why."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt. `ids`: its blocks, first to last."""

    time_s: float
    tokens: int
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Trace:
    """All requests in the order of their time; `skipped` lines were malformed."""

    name: str
    requests: tuple[Request, ...]
    skipped: int = 0

    @cached_property
    def unique_blocks(self) -> int:
        return len({block for request in self.requests for block in request.ids})

    @cached_property
    def blocks(self) -> int:
        return sum(len(request.ids) for request in self.requests)

    @cached_property
    def tokens(self) -> int:
        return sum(request.tokens for request in self.requests)

    def fits(self, block_tokens: int) -> bool:
        """Whether nearly all prompts have as many blocks as their tokens need at this block size."""
        fitting = sum(len(each.ids) == -(-each.tokens // block_tokens) for each in self.requests)
        return fitting >= _FITTING_SHARE * len(self.requests)


def read_trace(path: Path, *, skip_bad: bool = False) -> Trace:
    """Reads a trace file. Raises TraceError for a file that cannot be read, a malformed line, or no request at all."""
    requests: list[Request] = []
    skipped = 0
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            requests.append(_parse(line))
        except ValueError as error:
            if not skip_bad:
                raise TraceError(f"{path}, line {number}: {error}") from error
            skipped += 1
    if not requests:
        raise TraceError(f"{path} has no request" + (f" ({skipped} malformed lines)" if skipped else ""))
    requests.sort(key=lambda request: request.time_s)
    return Trace(path.name, tuple(requests), skipped)


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as plain:
            zipped = plain.read(2) == _GZIP_MAGIC
            plain.seek(0)
            if zipped:
                with gzip.GzipFile(fileobj=plain) as unzipped:
                    yield from unzipped
            else:
                yield from plain
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path} is damaged: {error}") from error
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror or error}") from error


def _parse(line: bytes) -> Request:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError("not UTF-8") from error
    except RecursionError as error:
        raise ValueError("not a request: nested too deeply") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    return _request(row)


def _request(row: dict[str, Any]) -> Request:
    timestamp = _field(row, "timestamp")
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float) or not abs(timestamp) <= _MAX_TIME_MS:
        raise ValueError(f"timestamp must be milliseconds, not {str(timestamp)[:40]}")
    tokens = _field(row, "input_length")
    if not _is_count(tokens):
        raise ValueError(f"input_length must be a count of tokens, not {tokens!r}")
    ids = _field(row, "hash_ids")
    if not isinstance(ids, list) or not all(_is_count(block) and block <= _MAX_ID for block in ids):
        raise ValueError("hash_ids must be a list of numbers from 0 to 2^64 - 1")
    return Request(timestamp / 1000, tokens, tuple(ids))


def _field(row: dict[str, Any], name: str) -> Any:
    if name not in row:
        raise ValueError(f"{name} is missing")
    return row[name]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
