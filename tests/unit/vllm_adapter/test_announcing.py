"""Announced is what was confirmed, in that order, and no more waits than a bound."""

from prefixcache_vllm.announcing import MAX_WAITING, Announcements, RemovedBlocks, StoredBlocks
from prefixcache_vllm.options import Options
from prefixcache_vllm.scheduler import SchedulerSide
from tests.unit.vllm_adapter.fakes import SIZE, FakeAsker, FakeRequest, engine, image, step, until_read

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


def test_what_went_before_it_was_announced_is_taken_back() -> None:
    first, second = bytes(32), b"\x01" * 32
    blocks = StoredBlocks(first + second, None, (1, 2), 1)
    announcements = Announcements()
    announcements.ordered(1, blocks)
    announcements.removed([second, b"?" * 32])
    assert announcements.take() == [RemovedBlocks((second, b"?" * 32))]
    announcements.confirmed([1])
    assert announcements.take() == [blocks, RemovedBlocks((second,))]
    announcements.ordered(2, blocks)
    announcements.removed([first])
    announcements.stored([first])  # by somebody else, since
    announcements.confirmed([2])
    assert announcements.take()[1:] == [blocks]
    announcements.lost()
    assert announcements.take() == [RemovedBlocks(())]


def test_of_a_request_with_images_and_an_adapter() -> None:
    """What vLLM's own classes make of it is tested with the real engine."""
    side = SchedulerSide(engine(), Options(), FakeAsker())
    request = FakeRequest("r", list(range(1, 201)))
    request.mm_features = [image("cat", 70, 20, name="img")]
    until_read(lambda: side._media_of(request))
    side.announcements = Announcements()
    side.matched(request, 0)
    side.placed(request, ([1] * 10,), 0)
    (order,) = side.step(step({"r": 200}, {"r": ([1] * 10,)})).saves
    side.announcements.confirmed([order.number])
    (blocks,) = side.announcements.take()
    assert isinstance(blocks, StoredBlocks)
    assert (blocks.images, blocks.first_token, blocks.lora_id) == ((("img", 70, 20),), 0, None)


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
    assert isinstance(later, StoredBlocks)
    assert isinstance(earlier, StoredBlocks)
    assert earlier.parent is None
    assert later.parent == earlier.hashes()[-1]
    assert earlier.tokens + later.tokens == tuple(range(1, 3 * SIZE + 1))
    assert (later.hashes()[0], later.salt) == (second.keys[32:64], "s")
