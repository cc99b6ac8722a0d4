"""The log of the last events."""

from prefixcache.core.commands import Change, Published
from prefixcache.core.ids import Tier
from prefixcache.server.event_log import EventLog


def event(keys: bytes = bytes(32)) -> Published:
    return Published(Change.STORED, 1, bytes(32), keys, b"", 0, Tier.HOST)


def test_events_are_numbered_from_one() -> None:
    log = EventLog(1 << 20)
    assert (log.first, log.last) == (1, 0)
    assert log.reaches(0)
    assert not log.reaches(1)
    events = [event() for _ in range(3)]
    for each in events:
        log.append(each)
    assert (log.first, log.last) == (1, 3)
    assert [log.get(number) for number in (1, 2, 3, 4)] == [*events, None]


def test_the_oldest_go_and_a_reader_can_tell() -> None:
    log = EventLog(2_000)
    for _ in range(100):
        log.append(event())
    assert log.last == 100
    kept = log.last - log.first + 1
    assert 4 <= kept <= 6
    assert log.get(log.first - 1) is None
    assert log.get(log.first) is not None
    assert log.reaches(log.first - 1)
    assert not log.reaches(log.first - 2)


def test_an_event_larger_than_the_log_is_kept_alone() -> None:
    log = EventLog(1_000)
    log.append(event())
    log.append(event(bytes(32 * 1000)))
    assert (log.first, log.last) == (2, 2)
    assert log.get(2) is not None
