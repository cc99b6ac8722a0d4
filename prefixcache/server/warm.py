"""Warm restart: the planner's snapshot goes with the pool's bytes, and both come back together or not at all."""

import logging

import msgspec

from prefixcache.core import commands as c
from prefixcache.core import events as e
from prefixcache.server.loop import Owner
from prefixcache.server.memory import HostMemory
from prefixcache.server.pinbook import Entry, pack, unpack

log = logging.getLogger(__name__)


def take_snapshot(owner: Owner, memory: HostMemory, pins: list[Entry]) -> None:
    """Keep the pool, and what is pinned in it, for the next start, if every reservation ended; nothing runs then."""
    reply = owner.call(e.SnapshotRequested())
    if not isinstance(reply, c.SnapshotTaken):
        why = reply.message if isinstance(reply, c.Refused) else "no snapshot"
        log.warning("the pool is not kept", extra={"facts": {"reason": why}})
        return
    try:
        memory.save(msgspec.msgpack.encode({**reply.snapshot, "pins": pack(pins)}))
    except OSError as error:
        log.warning("the pool could not be kept", extra={"facts": {"error": error}})


def restore(owner: Owner, memory: HostMemory) -> list[Entry]:
    """Give the planner what an earlier run kept; call it before anything else happens. Answers what was pinned."""
    content = memory.snapshot
    if content is None:
        return []
    try:
        snapshot = msgspec.msgpack.decode(content)
    except msgspec.DecodeError as error:
        log.warning("the kept pool has no readable snapshot", extra={"facts": {"error": error}})
        return []
    reply = owner.call(e.SnapshotRestored(snapshot))
    if isinstance(reply, c.SnapshotLoaded):
        log.info("the pool was found again", extra={"facts": {"namespaces": reply.namespaces, "blocks": reply.blocks}})
    else:
        why = reply.message if isinstance(reply, c.Refused) else "no answer"
        log.warning("the kept pool is not used", extra={"facts": {"reason": why}})
    return unpack(snapshot["pins"]) if isinstance(snapshot, dict) and "pins" in snapshot else []
