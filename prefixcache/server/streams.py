"""ReadBlocks and WriteBlocks: the bytes of blocks for workers that cannot map the pools.

Rules:
1. Pieces of at most 1 MiB, so that no message, lock or copy is long.
2. Reading does as every reader: copy, then compare the generation. A difference is LEASE_LOST, never data.
3. Writing holds the session's `writes` lock and the planner's time for one piece, having found the reservation
   alive: the slot cannot get another owner under the copy. Nothing becomes visible here; Commit checks that all
   bytes came.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from prefixcache.core.commands import Run
from prefixcache.core.events import ArrivalsCancelled
from prefixcache.server.arrivals import Arrivals, Subscription
from prefixcache.server.errors import CallError
from prefixcache.server.holdings import Lease, Reservation
from prefixcache.server.service import Shell
from prefixcache.server.sessions import Session
from prefixcache.v1 import cache_pb2 as pb
from prefixcache.v1 import common_pb2 as common

PIECE_BYTES = 1 << 20

Place = tuple[int, int, int]
Piece = pb.WriteBlocksRequest


class StreamCalls:
    """The two streams. Each iterates messages and raises CallError; sessions are looked up by the caller."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell

    def read_blocks(self, session: Session, request: pb.ReadBlocksRequest) -> Iterator[pb.ReadBlocksResponse]:
        """The bytes of leased blocks, block by block, part by part."""
        lease = self._lease(session, request.lease)
        ready = lease.places_end
        end = ready if request.blocks == 0 else request.first_block + request.blocks
        if end > ready:
            raise CallError(common.REASON_BAD_ARGUMENT, f"only {ready} blocks are ready, asked was up to {end}")
        mask = request.part_mask or (1 << 64) - 1
        # A part may come in several runs, one for each arrival.
        tables = [(run.part, _places(run)) for run in lease.runs if mask >> run.part & 1]
        for block in range(request.first_block, end):
            for part, places in tables:
                if block in places:
                    yield from self._read_part(session, request.lease, lease, (part, block), places[block])

    def arrivals(self, session: Session, request: pb.ArrivalsRequest) -> Arrivals:
        """What comes of a lease, to iterate over: one message at least, the last when nothing more will come."""
        return Arrivals(self.subscribe(session, request), self._shell.config.lease_ttl_max)

    def subscribe(self, session: Session, request: pb.ArrivalsRequest) -> Subscription:
        """What comes of a lease, told by calls."""
        lease = self._lease(session, request.lease)

        def cancel() -> None:
            with self._shell.owner.lock:
                if not lease.done and not self._shell.owner.failure:
                    self._shell.owner.call(ArrivalsCancelled(session.id, request.lease))

        return Subscription(self._shell.owner.lock, lease, cancel)

    def _read_part(
        self, session: Session, lease_id: bytes, lease: Lease, which: tuple[int, int], place: Place
    ) -> Iterator[pb.ReadBlocksResponse]:
        pool_id, slot, generation = place
        part, block = which
        pool = self._shell.pools.get(pool_id)
        if pool is None:
            text = f"block {block} is in GPU pool {pool_id}, which this session said it maps; copy it from there"
            raise CallError(common.REASON_BAD_ARGUMENT, text)
        source = pool.slot(slot, lease.namespace.part_bytes[part])
        for offset in range(0, source.size, PIECE_BYTES):
            data = source[offset : offset + PIECE_BYTES].tobytes()
            alive = self._shell.holdings.leases.get(lease_id) is lease
            if not alive or int(pool.control[slot]) != generation:
                raise CallError(common.REASON_LEASE_LOST, "the lease ended while its blocks were read; acquire again")
            session.last_seen = self._shell.owner.clock()
            last = offset + len(data) == source.size
            digest = self._shell.digest_of(lease_id, part, block, generation) if last else b""
            yield pb.ReadBlocksResponse(part=part, block=block, offset=offset, data=data, checksum=digest)

    def write_blocks(self, session: Session, first: Piece, rest: Iterator[Piece]) -> int:
        """Fill slots from pieces; the number of bytes written. `first` names the reservation and may carry a piece."""
        reservation_id = first.reservation
        reservation = self._reservation(session, reservation_id)
        total, at_head_end = 0, True
        for piece in _pieces(first, rest):
            self._write_piece(session, reservation_id, reservation, piece)
            total += len(piece.data)
            head = reservation.namespace.head_bytes[piece.part]
            at_head_end = (piece.offset + len(piece.data)) % head == 0
        if not at_head_end:
            raise CallError(
                common.REASON_STREAM_TRUNCATED,
                "the stream ended inside a part; the slots are still reserved, send the rest or the part again",
                bytes=total,
            )
        return total

    def _write_piece(self, session: Session, reservation_id: bytes, reservation: Reservation, piece: Piece) -> None:
        shell = self._shell
        pool_id, slot = _checked_place(reservation, piece)
        size = reservation.namespace.part_bytes[piece.part]
        with session.writes:
            with shell.owner.lock:
                if shell.holdings.reservations.get(reservation_id) is not reservation:
                    raise CallError(common.REASON_RESERVATION_EXPIRED, "the reservation ended while it was written")
                held = shell.owner.hold_time()
            try:
                target = shell.pools[pool_id].slot(slot, size)
                target[piece.offset : piece.offset + len(piece.data)] = np.frombuffer(piece.data, np.uint8)
                reservation.wrote(piece.part, piece.block, piece.offset, piece.offset + len(piece.data))
            finally:
                shell.owner.let_time_pass(held)
        session.last_seen = shell.owner.clock()

    def _lease(self, session: Session, lease_id: bytes) -> Lease:
        lease = self._shell.holdings.leases.get(lease_id)
        if lease is None:
            raise CallError(common.REASON_LEASE_UNKNOWN, "the lease is unknown: never granted, released, or expired")
        if lease.session != session.id:
            raise CallError(common.REASON_NOT_YOURS, "the lease belongs to another session")
        return lease

    def _reservation(self, session: Session, reservation_id: bytes) -> Reservation:
        reservation = self._shell.holdings.reservations.get(reservation_id)
        if reservation is None:
            raise CallError(common.REASON_RESERVATION_UNKNOWN, "the reservation is unknown: ended, or never granted")
        if session.id not in reservation.writers:
            raise CallError(common.REASON_NOT_YOURS, "the reservation belongs to another session")
        return reservation


def _places(run: Run) -> Mapping[int, Place]:
    """(pool, slot, generation) by block."""
    pairs = zip(run.slots.tolist(), run.generations.tolist(), strict=True)
    return {run.first_block + index: (run.pool, slot, generation) for index, (slot, generation) in enumerate(pairs)}


def _pieces(first: Piece, rest: Iterator[Piece]) -> Iterator[Piece]:
    if first.data:
        yield first
    yield from rest


def _checked_place(reservation: Reservation, piece: Piece) -> tuple[int, int]:
    """(pool, slot) of a piece. Raises CallError where it was not granted or does not lie inside its part."""
    place = reservation.slots.get((piece.part, piece.block))
    if place is None:
        raise CallError(common.REASON_BAD_ARGUMENT, f"part {piece.part} of block {piece.block} is not reserved")
    size = reservation.namespace.part_bytes[piece.part]
    if not piece.data or len(piece.data) > PIECE_BYTES or piece.offset + len(piece.data) > size:
        raise CallError(
            common.REASON_BAD_ARGUMENT,
            f"a piece has 1 to {PIECE_BYTES} bytes inside its part of {size}; got {len(piece.data)} at {piece.offset}",
        )
    return place
