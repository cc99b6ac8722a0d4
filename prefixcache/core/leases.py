"""A lease: the promise that slots stay valid until it ends.

Rules: one pin per lease (per key in a foreign namespace), never one per block. Its tokens are pending exactly as long
as it lives. Must not know: how it came about or who ends it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from prefixcache.core.commands import Acquired
from prefixcache.core.ids import LeaseId, SessionId
from prefixcache.core.radix import Node, Path, Pin, path_to
from prefixcache.core.reasons import Miss
from prefixcache.core.table import DIGEST_KNOWN

if TYPE_CHECKING:
    from prefixcache.core.loads import Load
    from prefixcache.core.namespaces import Namespace


class Lease:
    """`reply` is kept for a retried Acquire. `ready_end`, `runs`: what it can read by now; `cold`: which planned blocks
    were on disk only; `loads`: what it waits for; `stop`: why the rest will not come. `serial` orders leases: slots
    that were moved away under a lease come back when every lease that is older than the move has ended. In a foreign
    namespace blocks are counted in the order in which they can be read; `awaited`: places of those to come."""

    __slots__ = (
        "awaited", "cold", "deadline", "ended", "lease", "loads", "pins", "planned_tokens", "ready_end", "reply",
        "runs", "serial", "session", "space", "stop",
    )  # fmt: skip

    def __init__(self, lease: LeaseId, session: SessionId, space: Namespace, reply: Acquired) -> None:
        self.lease = lease
        self.session = session
        self.space = space
        self.pins: list[Pin] = []
        self.reply = reply
        self.ready_end = reply.from_block + reply.ready_blocks
        self.runs = reply.runs
        self.cold: NDArray[np.bool_] | None = None
        self.awaited: list[tuple[int, Pin]] = []
        self.stop: Miss | None = None
        self.loads: list[Load] = []
        self.deadline = reply.expires_at
        self.planned_tokens = reply.planned_blocks * space.block_tokens
        self.serial = 0
        self.ended = False


def attached_path(pins: list[Pin]) -> Path:
    """What is still in the tree of a pinned path: all of it, or up to where it was cut off."""
    paths = [path_to(pin.node, pin.depth) for pin in pins]
    whole = [path for path in paths if path.nodes and not path.nodes[0].start]
    return max(whole, key=lambda path: path.blocks, default=Path([], 0))


def known_digest(lease: Lease, part: int, block: int, generation: int) -> bytes:
    """xxh3-128 of a leased block's part, 16 bytes; empty while it is not known, or for slots of another generation.

    Foreign namespaces have no order of blocks to find one by, so theirs are never told.
    """
    node: Node | None = lease.pins[0].node if lease.pins and lease.space.foreign is None else None
    while node is not None and node.start > block:
        node = node.parent
    if node is None or block >= node.end:
        return b""
    column, row = lease.space.table.parts[part], int(node.row_array()[block - node.start])
    if not column.flags[row] & DIGEST_KNOWN or int(column.generations[row]) != generation:
        return b""
    digest: bytes = column.digests[row].tobytes()
    return digest
