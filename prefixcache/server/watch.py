"""One watcher's stream: news from the log, and a snapshot where one is wanted, as messages in the right order.

Rules:
1. Never ahead of what happened: a slice of the snapshot is looked at under the planner's lock, and told behind all news
   up to that moment. So who applies the messages in their order knows, from SNAPSHOT_END on, exactly what is held.
2. The lock is held for a slice of a few hundred nodes at most.
3. What was lost is told as a GAP, and with a snapshot all begins anew.
Must not know: transports, threads, waiting.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from prefixcache.core.commands import Change, Published
from prefixcache.core.ids import KEY_BYTES, Tier
from prefixcache.core.state import State
from prefixcache.core.telling import Tour, tours
from prefixcache.server.event_log import EventLog
from prefixcache.v1 import admin_pb2 as pb
from prefixcache.v1 import common_pb2 as common

SHORT_KEY_BYTES: Final = 8
_SLICE_NODES: Final = 128
_KINDS: Final = {
    Change.STORED: pb.EVENT_KIND_STORED,
    Change.REMOVED: pb.EVENT_KIND_REMOVED,
    Change.MOVED: pb.EVENT_KIND_MOVED,
    Change.CLEARED: pb.EVENT_KIND_CLEARED,
}
TIERS: Final = {Tier.GPU: common.TIER_GPU, Tier.HOST: common.TIER_HOST, Tier.DISK: common.TIER_DISK}


@dataclass(slots=True)
class Source:
    """What all watchers read. `label_of`: a namespace's name for people, by fingerprint. The counts are of all of them:
    snapshots begun, gaps told and events lost in them, streams that went on where an earlier one ended."""

    log: EventLog
    state: State
    lock: threading.RLock
    incarnation: bytes
    label_of: Callable[[bytes], str] = lambda _: ""
    snapshots: int = 0
    gaps: int = 0
    lost: int = 0
    resumed: int = 0


@dataclass(slots=True, frozen=True)
class Wish:
    """fingerprints: empty for all. after: the last number known, of the server `incarnation` (empty: none)."""

    snapshot: bool = False
    fingerprints: frozenset[bytes] = field(default_factory=frozenset)
    incarnation: bytes = b""
    after: int = 0
    key_bytes: int = KEY_BYTES


class Watch:
    """`messages` is iterated once, and closed."""

    def __init__(self, source: Source, wish: Wish, *, slice_nodes: int = _SLICE_NODES) -> None:
        self._source = source
        self._wish = wish
        self._slice_nodes = slice_nodes
        self._at = source.log.last
        self._named: set[bytes] = set()
        self._touring = False
        self._gaps = 0
        self._spaces: deque[bytes] = deque()  # fingerprints whose tours have not begun
        self._tours: list[Tour] = []

    def messages(self) -> Iterator[pb.WatchEventsResponse | None]:
        """What to send, in order; None where there is nothing to say yet. Never ends by itself."""
        try:
            yield from self._begin()
            while True:
                yield from self._slice() if self._touring else self._news(self._source.log.last)
                if not self._touring and self._at == self._source.log.last:
                    yield None
        finally:
            with self._source.lock:
                self._end_tours()

    def keepalive(self) -> pb.WatchEventsResponse:
        """How far everything was told."""
        return self._mark(pb.EVENT_KIND_KEEPALIVE, self._at)

    def look(self) -> None:
        """Let go of a tour that would have to begin anew anyhow, so that the tree need not tell it more and more. Call
        it with the lock held, now and then."""
        if self._tours and not self._source.log.reaches(self._at):
            self._end_tours()

    def _begin(self) -> Iterator[pb.WatchEventsResponse]:
        source, wish = self._source, self._wish
        known = not wish.incarnation or wish.incarnation == source.incarnation
        if wish.incarnation and known and source.log.reaches(wish.after):
            source.resumed += 1
            self._at = wish.after
            yield self.keepalive()
        elif wish.incarnation:
            yield from self._gap(max(source.log.last - wish.after, 0) if known else 0)
        elif wish.snapshot:
            yield self._begin_snapshot()
        else:
            yield self.keepalive()

    def _news(self, until: int) -> Iterator[pb.WatchEventsResponse]:
        """Everything up to event `until`, which has happened. A gap ends it, and the snapshot under way."""
        log = self._source.log
        while self._at < until:
            event = log.get(self._at + 1)
            if event is None:
                yield from self._gap(log.last - self._at)
                return
            self._at += 1
            yield from self._tell(event, self._at, snapshot=False)

    def _gap(self, lost: int) -> Iterator[pb.WatchEventsResponse]:
        source = self._source
        self._gaps += 1
        source.gaps += 1
        source.lost += lost
        self._at = source.log.last  # not the oldest that is kept: that one would be lost next
        gap = self._mark(pb.EVENT_KIND_GAP, self._at)
        gap.lost = lost
        yield gap
        if self._wish.snapshot:
            yield self._begin_snapshot()

    def _begin_snapshot(self) -> pb.WatchEventsResponse:
        source, wanted = self._source, self._wish.fingerprints
        source.snapshots += 1
        with source.lock:
            self._end_tours()
            self._at = source.log.last
            self._spaces = deque(each for each in source.state.by_fingerprint if not wanted or each in wanted)
        self._touring = True
        return self._mark(pb.EVENT_KIND_SNAPSHOT_BEGIN, self._at)

    def _slice(self) -> Iterator[pb.WatchEventsResponse]:
        """Some nodes of the snapshot, behind all news up to the moment at which they were looked at."""
        source = self._source
        gaps = self._gaps
        with source.lock:
            told = self._look_at_some()
            at = source.log.last
            done = not self._tours and not self._spaces
        yield from self._news(at)
        if gaps != self._gaps:
            return  # what was looked at is of no use any more
        for event in told:
            yield from self._tell(event, at, snapshot=True)
        if done:
            self._touring = False
            yield self._mark(pb.EVENT_KIND_SNAPSHOT_END, at)

    def _look_at_some(self) -> list[Published]:
        while self._tours or self._spaces:
            if not self._tours:
                space = self._source.state.by_fingerprint.get(self._spaces.popleft())
                self._tours = tours(space) if space is not None else []
            elif self._tours[-1].done:
                self._tours.pop().close()
            else:
                return self._tours[-1].next(self._slice_nodes)
        return []

    def _end_tours(self) -> None:
        while self._tours:
            self._tours.pop().close()

    def _tell(self, event: Published, sequence: int, *, snapshot: bool) -> Iterator[pb.WatchEventsResponse]:
        wanted = self._wish.fingerprints
        if wanted and event.fingerprint not in wanted:
            return
        if event.fingerprint not in self._named:
            self._named.add(event.fingerprint)
            # A stream that ends behind this message goes on with the event itself.
            yield self._name(event.fingerprint, sequence if snapshot else sequence - 1)
        size = self._wish.key_bytes
        yield pb.WatchEventsResponse(
            kind=_KINDS[event.change],
            sequence=sequence,
            fingerprint=event.fingerprint,
            keys=_cut(event.keys, size),
            parent=_cut(event.parent, size),
            tier=TIERS[event.tier],
            snapshot=snapshot,
            key_bytes=size,
            first_block=event.first_block,
            pool=event.pool,
        )

    def _name(self, fingerprint: bytes, sequence: int) -> pb.WatchEventsResponse:
        space = self._source.state.by_fingerprint.get(fingerprint)
        return pb.WatchEventsResponse(
            kind=pb.EVENT_KIND_NAMESPACE,
            sequence=sequence,
            fingerprint=fingerprint,
            label=self._source.label_of(fingerprint),
            block_tokens=space.block_tokens if space is not None else 0,
        )

    def _mark(self, kind: pb.EventKind.ValueType, sequence: int) -> pb.WatchEventsResponse:
        return pb.WatchEventsResponse(kind=kind, sequence=sequence, incarnation=self._source.incarnation)


def _cut(keys: bytes, size: int) -> bytes:
    if size == KEY_BYTES:
        return keys
    return b"".join(keys[at : at + size] for at in range(0, len(keys), KEY_BYTES))
