"""Blocks as streams of pieces, for a worker that cannot map the pools.

Rules:
1. Pieces of at most 1 MiB; at most 64 MiB are staged at a time, whatever the request.
2. Nothing is trusted: a piece outside of what was asked, out of order, or missing at the end fails the whole load.
3. The server compares the generations here, as every reader does, and ends the stream when one differs. Where it sends
   the checksum made at commit, the bytes are verified against it (if xxhash is installed).

The staging buffer stands in for a pool, so that the copy into the caller's tensors is the same as from shared memory.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
from google.protobuf.message import DecodeError

from prefixcache.v1 import cache_pb2
from prefixcache_client import coding
from prefixcache_client.blocks import BlockFormat
from prefixcache_client.errors import Failure, Unreachable
from prefixcache_client.paths import copied
from prefixcache_client.reasons import CHECKSUM_MISMATCH, STREAM_TRUNCATED
from prefixcache_client.runs import SlotRun
from prefixcache_client.tensors import KvTensors
from prefixcache_client.transport import BlockStreams, unreadable
from prefixcache_offload.checksum import matches
from prefixcache_offload.mapping import Bytes
from prefixcache_offload.memory import Memory
from prefixcache_offload.units import SLOT_GRANULE

PIECE_BYTES: Final = 1 << 20
STAGING_BYTES: Final = 64 << 20


class StreamPath:
    """The byte path over gRPC; see prefixcache_client.paths.BytePath. `streams` is asked for at the first use."""

    def __init__(self, streams: Callable[[], BlockStreams], session_id: bytes, timeout_s: float) -> None:
        self._streams = streams
        self._session_id = session_id
        self._timeout_s = timeout_s

    def load(self, form: BlockFormat, lease: bytes, runs: Sequence[SlotRun], tensors: KvTensors) -> int:
        """See BytePath."""
        moved = 0
        for run in _bounded(form, runs):
            staged = _Staged(form, run)
            jobs = coding.plan(form, run, staged.slots, tensors)
            self._receive(lease, run, staged)
            moved += copied(coding.load, [(staged.memory, jobs)])
        return moved

    def save(self, form: BlockFormat, reservation: bytes, runs: Sequence[SlotRun], tensors: KvTensors) -> int:
        """See BytePath."""
        moved = 0
        for run in _bounded(form, runs):
            staged = _Staged(form, run)
            copied(coding.store, [(staged.memory, coding.plan(form, run, staged.slots, tensors))])
            self._send(reservation, run, staged)
            moved += run.count * staged.part_bytes
        return moved

    def view(self, form: BlockFormat, lease: bytes, run: SlotRun) -> Bytes:
        """See BytePath. The bytes are this process's own copy."""
        staged = _Staged(form, run)
        self._receive(lease, run, staged)
        return np.frombuffer(staged.data[: staged.part_bytes].tobytes(), np.uint8)

    def intact(self, runs: Sequence[SlotRun]) -> bool:
        """True: what came by stream was compared by the server, and nothing changes it any more."""
        return True

    def _receive(self, lease: bytes, run: SlotRun, staged: "_Staged") -> None:
        request = cache_pb2.ReadBlocksRequest(
            session=self._session_id,
            lease=lease,
            first_block=int(run.blocks[0]),
            blocks=run.count,
            part_mask=1 << run.part,
        )
        for payload in self._streams().read_blocks(request.SerializeToString(), self._timeout_s):
            try:
                piece = cache_pb2.ReadBlocksResponse.FromString(payload)
            except DecodeError as error:
                raise unreadable(error) from error
            staged.put(piece, run)
        if not staged.complete:
            raise Failure(STREAM_TRUNCATED, "the stream ended before all bytes had come")

    def _send(self, reservation: bytes, run: SlotRun, staged: "_Staged") -> None:
        pieces = _pieces(run, staged)

        def payloads() -> Iterator[bytes]:
            first = next(pieces)
            first.session, first.reservation = self._session_id, reservation
            yield first.SerializeToString()
            for piece in pieces:
                yield piece.SerializeToString()

        try:
            answer = cache_pb2.WriteBlocksResponse.FromString(self._streams().write_blocks(payloads(), self._timeout_s))
        except DecodeError as error:
            raise unreadable(error) from error
        if answer.bytes != run.count * staged.part_bytes:
            raise Failure(STREAM_TRUNCATED, f"the server took {answer.bytes} bytes of {run.count * staged.part_bytes}")


class _Staged:
    """Room for the blocks of one run, each at the start of a granule, filled strictly in order."""

    def __init__(self, form: BlockFormat, run: SlotRun) -> None:
        self.part_bytes = form.parts[run.part].bytes
        granules = form.slot_granules[run.part]
        self.data = np.empty(run.count * granules * SLOT_GRANULE, np.uint8)
        self.slots = (np.arange(run.count) * granules).astype(np.uint32)
        self.memory = Memory.of_bytes(self.data)
        self.stride = granules * SLOT_GRANULE
        self._at = 0
        self._total = run.count * self.part_bytes

    @property
    def complete(self) -> bool:
        """Whether every byte has come."""
        return self._at == self._total

    def put(self, piece: cache_pb2.ReadBlocksResponse, run: SlotRun) -> None:
        """Take the next piece. Raises Unreachable when it is not the next one."""
        row, offset = divmod(self._at, self.part_bytes)
        size = len(piece.data)
        expected = row < run.count and (piece.part, piece.block, piece.offset) == (run.part, run.blocks[row], offset)
        if not expected or not 0 < size <= self.part_bytes - offset:
            raise Unreachable("the server streams what was not asked for", reason=STREAM_TRUNCATED)
        start = row * self.stride + offset
        self.data[start : start + size] = np.frombuffer(piece.data, np.uint8)
        self._at += size
        if piece.checksum and offset + size == self.part_bytes:
            _verify(self.data[row * self.stride : row * self.stride + self.part_bytes], piece.checksum)


def _verify(part: Bytes, digest: bytes) -> None:
    """Raises Failure for bytes that are not those once committed. Without xxhash the transport's own sums must do."""
    with contextlib.suppress(ImportError):
        if not matches(part, digest):
            raise Failure(CHECKSUM_MISMATCH, "the bytes that came are not those that were stored")


def _pieces(run: SlotRun, staged: _Staged) -> Iterator[cache_pb2.WriteBlocksRequest]:
    for row, block in enumerate(run.blocks.tolist()):
        start = row * staged.stride
        for offset in range(0, staged.part_bytes, PIECE_BYTES):
            end = min(offset + PIECE_BYTES, staged.part_bytes)
            data = staged.data[start + offset : start + end].tobytes()
            yield cache_pb2.WriteBlocksRequest(part=run.part, block=block, offset=offset, data=data)


def _bounded(form: BlockFormat, runs: Sequence[SlotRun]) -> Iterator[SlotRun]:
    """Runs of consecutive blocks that fit the staging buffer."""
    for run in runs:
        most = max(STAGING_BYTES // (form.slot_granules[run.part] * SLOT_GRANULE), 1)
        gaps = (np.flatnonzero(np.diff(run.blocks) != 1) + 1).tolist()
        for start, stop in zip([0, *gaps], [*gaps, run.count], strict=True):
            for first in range(start, stop, most):
                last = min(first + most, stop)
                cut = run.within(range(int(run.blocks[first]), int(run.blocks[last - 1]) + 1))
                if cut is not None:
                    yield cut
