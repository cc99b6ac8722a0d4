"""Announced is what was confirmed, in that order, and no more waits than a bound."""

from prefixcache_vllm.announcing import MAX_WAITING, Announcements, StoredBlocks
from prefixcache_vllm.options import Options
from prefixcache_vllm.scheduler import SchedulerSide
from tests.unit.vllm_adapter.fakes import SIZE, FakeAsker, FakeRequest, engine, step

BLOCKS = StoredBlocks(bytes(64), None, (1, 2), 1)


def test_confirmed_in_order() -> None:
    announcements = Announcements()
    for number in (1, 2, 3):
        announcements.ordered(number, BLOCKS)
    announcements.confirmed([3, 1, 9])
    assert len(announcements.take()) == 2
    assert announcements.take() == []
    announcements.confirmed([3, 2])
    assert len(announcements.take()) == 1


def test_what_is_never_confirmed_is_forgotten() -> None:
    announcements = Announcements()
    for number in range(MAX_WAITING + 5):
        announcements.ordered(number, BLOCKS)
    announcements.confirmed(range(5))
    assert announcements.take() == []


def test_of_a_request() -> None:
    side = SchedulerSide(engine(), Options(), FakeAsker())
    side.announcements = Announcements()
    request = FakeRequest("r", list(range(1, 201)), cache_salt="s")
    side.matched(request, 0)
    side.placed(request, ([1] * 10,), 0)
    (first,) = side.step(step({"r": 100}, {"r": ([1] * 10,)})).saves
    request.num_computed_tokens = 100
    (second,) = side.step(step({"r": 100}, {"r": ([1] * 10,)})).saves
    side.announcements.confirmed([second.number, first.number])
    later, earlier = side.announcements.take()
    assert earlier.parent is None
    assert later.parent == earlier.hashes()[-1]
    assert earlier.tokens + later.tokens == tuple(range(1, 3 * SIZE + 1))
    assert (later.hashes()[0], later.salt) == (second.keys[32:64], "s")
