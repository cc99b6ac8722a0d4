"""A lease taken by one process and copied from by others: the scheduler of an engine acquires, its workers copy.

Rules:
1. The process that acquired keeps the lease and releases it when every copy is over; a ticket gives no right to.
2. A ticket is good on this host, with the same run of the daemon, until the lease ends. Each process compares the
   generations after its own copy; any difference is `lease_lost`.
3. Only memory that is mapped can be copied from by ticket: a stream belongs to the session that has the lease.

It must not know what a worker is.
"""

import time
from dataclasses import dataclass

from prefixcache_client.blocks import BlockFormat
from prefixcache_client.errors import Failure
from prefixcache_client.link import Link
from prefixcache_client.paths import MappedPath, MappedReads
from prefixcache_client.reasons import LEASE_LOST
from prefixcache_client.results import CopyResult
from prefixcache_client.runs import SlotRun
from prefixcache_client.tensors import KvTensors, as_tensors

NOT_MAPPED = "not_mapped"


@dataclass(frozen=True, slots=True)
class LeaseTicket:
    """What another process needs to copy leased blocks; plain data that pickles.

    `ends_at`: time.monotonic() of this host at which the lease is over. `blocks`: length of the prefix, from block 0;
    `from_block`: the first block leased.
    """

    incarnation: bytes
    lease: bytes
    ends_at: float
    from_block: int
    blocks: int
    runs: tuple[SlotRun, ...]


def copy_by_ticket(
    link: Link, form: BlockFormat, ticket: LeaseTicket, tensors: object, timeout_s: float
) -> CopyResult:  # fmt: skip
    """See Client.copy_by_ticket."""
    try:
        moved = _copy(link, form, ticket, as_tensors(tensors), timeout_s)
    except Failure as failure:
        return CopyResult(ok=False, tokens=0, size_bytes=0, reason=failure.reason)
    link.counters.loaded(moved)
    return CopyResult(ok=True, tokens=ticket.blocks * form.block_tokens, size_bytes=moved)


def _copy(link: Link, form: BlockFormat, ticket: LeaseTicket, target: KvTensors, timeout_s: float) -> int:
    session = link.opened(timeout_s)
    if session.incarnation != ticket.incarnation:
        raise Failure(LEASE_LOST, "the daemon was started anew")
    if not isinstance(session.path, MappedPath | MappedReads):
        raise Failure(NOT_MAPPED, "the daemon's memory is not mapped here, and a stream needs the lease's own session")
    _check_time(ticket)
    covered = [target.covers(form, part) for part in range(len(form.parts))]
    cut = [run.within(covered[run.part]) for run in ticket.runs]
    moved = session.path.load(form, ticket.lease, [run for run in cut if run is not None], target)
    _check_time(ticket)
    return moved


def _check_time(ticket: LeaseTicket) -> None:
    if time.monotonic() >= ticket.ends_at:
        raise Failure(LEASE_LOST, "it ran out")
