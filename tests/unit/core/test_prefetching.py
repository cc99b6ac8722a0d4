from __future__ import annotations

from prefixcache.core.events import DiskChanged
from prefixcache.core.ids import NamespaceKind
from prefixcache.core.pin_messages import Prefetched, PrefetchRequested
from prefixcache.core.reasons import Kind, Miss, Refusal
from prefixcache.core.spec import DiskSpec, NamespaceSpec, PartSpec
from tests.unit.core.disk_harness import DiskHarness
from tests.unit.core.harness import FULL, GRANULE, TOKENS, Harness, chain


class ColdCache(DiskHarness):
    """`abc` is on disk only, in a pool of 32 slots."""

    def __init__(self, slots: int = 32, disk: DiskSpec | None = None) -> None:
        super().__init__(slots, disk=disk)
        self.store("abc")
        self.flush()
        for letter in "stuvwxyz":
            self.store(letter * (slots // 8))
            self.flush()
        assert self.acquire("abc").planned_blocks == 0

    def prefetch(self, letters: str) -> Prefetched:
        return self.ask(PrefetchRequested(1, chain(letters)), Prefetched)


def test_what_is_on_disk_comes_to_memory_without_a_lease() -> None:
    cache = ColdCache()
    assert cache.prefetch("abc") == Prefetched(0, 3, None)
    assert cache.end_reads() == 3
    assert cache.acquire("abc").ready_blocks == 3
    stats = cache.planner.state.stats
    assert (stats.prefetches, stats.blocks_prefetched) == (1, 3)


def test_it_is_asked_for_once() -> None:
    cache = ColdCache()
    cache.prefetch("abc")
    assert cache.prefetch("abc") == Prefetched(0, 3, None)
    assert cache.end_reads() == 3
    assert cache.prefetch("abc") == Prefetched(3, 0, None)
    assert cache.planner.state.stats.blocks_prefetched == 3


def test_a_lease_that_joins_and_leaves_does_not_call_it_off() -> None:
    cache = ColdCache()
    cache.prefetch("abc")
    cache.release(cache.acquire("abc", deadline_s=100.0))
    cache.end_reads()
    assert cache.acquire("abc").ready_blocks == 3


def test_what_was_prefetched_is_not_the_next_to_go() -> None:
    cache = ColdCache()
    cache.prefetch("abc")
    cache.end_reads()
    cache.store("qqqq")
    cache.flush()
    cache.store("rrrr")
    assert cache.acquire("abc").ready_blocks == 3


def test_it_takes_a_part_of_what_may_be_loading_only() -> None:
    cache = ColdCache(disk=DiskSpec(reserve_share=0.0, loading_bytes=4 * GRANULE))
    assert cache.prefetch("abc") == Prefetched(0, 2, Miss.BEYOND_LIMIT)
    assert cache.planner.state.stats.prefetch_stops == {Miss.BEYOND_LIMIT: 1}
    assert cache.end_reads() == 2


def test_a_disk_that_is_off_is_the_reason() -> None:
    cache = ColdCache()
    cache.send(DiskChanged(False, False, "io_error"))
    assert cache.prefetch("abc") == Prefetched(0, 0, Miss.TIER_OFF)


def test_without_a_disk_it_says_what_is_there() -> None:
    cache = Harness()
    cache.store("ab")
    assert cache.ask(PrefetchRequested(1, chain("abc")), Prefetched) == Prefetched(2, 0, None)
    cache.refused(PrefetchRequested(7, chain("a")), Kind.NOT_FOUND, Refusal.NAMESPACE_UNKNOWN)
    foreign = Harness(spec=NamespaceSpec(TOKENS, (FULL,), (PartSpec(0, 4, GRANULE),), NamespaceKind.FOREIGN))
    foreign.store("ab")
    assert foreign.ask(PrefetchRequested(1, chain("abc")), Prefetched) == Prefetched(2, 0, None)
