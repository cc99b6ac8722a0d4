"""Events as the server sends them, and what one knows who applies them."""

from prefixcache.v1 import admin_pb2 as pb
from prefixcache.v1 import common_pb2 as common
from prefixcache_client.events import EventKind, KnownBlocks, WatchEvent, event_of

NS = b"n" * 32
KEYS = tuple(bytes([letter]) * 32 for letter in b"abcd")


def blocks(kind: EventKind, *keys: bytes, tier: str = "host", pool: int = 0) -> WatchEvent:
    return WatchEvent(kind, 1, NS, keys, tier=tier, pool=pool)


def test_a_message_becomes_an_event() -> None:
    message = pb.WatchEventsResponse(
        kind=pb.EVENT_KIND_MOVED, sequence=7, fingerprint=NS, keys=b"".join(KEYS[:2]), parent=KEYS[3],
        tier=common.TIER_DISK, snapshot=True, key_bytes=32, first_block=3, pool=2,
    )  # fmt: skip
    assert event_of(message) == WatchEvent(EventKind.MOVED, 7, NS, KEYS[:2], KEYS[3], "disk", 3, True, 2)
    short = event_of(pb.WatchEventsResponse(kind=pb.EVENT_KIND_STORED, keys=bytes(24), key_bytes=8))
    assert short.keys == (bytes(8),) * 3
    newer = pb.WatchEventsResponse()
    newer.kind = 77  # type: ignore[assignment]  # a server of a later release
    assert event_of(newer).kind is EventKind.UNKNOWN


def test_blocks_come_move_and_go() -> None:
    known = KnownBlocks()
    known.apply(blocks(EventKind.STORED, *KEYS[:3]))
    known.apply(blocks(EventKind.MOVED, KEYS[1], tier="disk"))
    known.apply(blocks(EventKind.REMOVED, KEYS[2]))
    known.apply(blocks(EventKind.REMOVED, KEYS[3]))
    assert known.tiers[NS] == {KEYS[0]: "host", KEYS[1]: "disk"}
    assert known.leading(NS, b"".join(KEYS)) == 2
    assert known.leading(NS, b"".join(KEYS[1:])) == 1
    assert known.leading(b"?" * 32, b"".join(KEYS)) == 0
    assert known.leading(NS, b"") == 0
    known.apply(WatchEvent(EventKind.CLEARED, 2, NS))
    assert known.leading(NS, b"".join(KEYS)) == 0


def test_a_copy_that_goes_does_not_take_its_block() -> None:
    known = KnownBlocks()
    known.apply(blocks(EventKind.STORED, KEYS[0]))
    for pool in (1, 2):
        known.apply(blocks(EventKind.STORED, KEYS[0], tier="gpu", pool=pool))
        known.apply(blocks(EventKind.STORED, KEYS[0], tier="gpu", pool=pool))  # told twice, in a snapshot
    known.apply(blocks(EventKind.REMOVED, KEYS[0], tier="gpu", pool=1))
    assert known.copies[NS] == {(2, KEYS[0])}
    assert known.leading(NS, KEYS[0]) == 1


def test_a_snapshot_voids_what_was_known_and_a_gap_doubts_it() -> None:
    known = KnownBlocks()
    assert not known.synced
    known.apply(blocks(EventKind.STORED, KEYS[0]))
    known.apply(WatchEvent(EventKind.SNAPSHOT_BEGIN, 5))
    known.apply(blocks(EventKind.STORED, KEYS[1]))
    assert not known.synced
    known.apply(WatchEvent(EventKind.SNAPSHOT_END, 6))
    assert (known.synced, known.sequence, known.tiers[NS]) == (True, 6, {KEYS[1]: "host"})
    known.apply(WatchEvent(EventKind.GAP, 9, lost=3))
    assert not known.synced
    assert known.tiers[NS] == {KEYS[1]: "host"}
