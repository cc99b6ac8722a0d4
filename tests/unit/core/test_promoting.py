"""What goes up to a GPU pool, who is told of it, and how it comes down again."""

from __future__ import annotations

from typing import Any

from prefixcache.core.commands import Acquired, Change, CopySlots, PromoteSlots, Published, SessionReady, SetGenerations
from prefixcache.core.events import (
    ClearRequested,
    CopyDone,
    DeviceLost,
    LookupRequested,
    PartFailedVerification,
    PromotionDone,
    SessionEnded,
    SessionOpened,
)
from prefixcache.core.gpu import GpuTier
from prefixcache.core.ids import GroupKind, Tier
from prefixcache.core.reasons import CopyDrop, Kind, PromotionSkip, Refusal
from prefixcache.core.spec import GpuSpec, GroupSpec, NamespaceSpec, PartSpec
from tests.unit.core.harness import FULL, GRANULE, TOKENS, Harness, chain

G = b"g" * 16
TWO_PARTS = NamespaceSpec(TOKENS, (FULL,), (PartSpec(0, 1, 2 * GRANULE), PartSpec(0, 1, GRANULE)))


def with_gpu(gpu_slots: int = 16, slab_slots: int = 4, **config: Any) -> Harness:
    """Session G maps the GPU pool, A and B do not."""
    h = Harness(gpu_slots=gpu_slots, slab_slots=slab_slots, **config)
    h.ask(SessionOpened(G, True, gpu_pools=(1,)), SessionReady)
    return h


def tier(h: Harness) -> GpuTier:
    return h.planner.state.gpus[1]


def use(h: Harness, letters: str, session: bytes = G) -> list[PromoteSlots]:
    """One lease over a prompt, used; answers what that made the executor copy."""
    h.release(h.acquire(letters, session), session=session)
    return [command for command in h.all if isinstance(command, PromoteSlots)]


def promoted(h: Harness, letters: str) -> None:
    """Stores a prompt, hits it twice, and ends the copies."""
    h.store(letters)
    h.hit(letters)
    while copies := use(h, letters):
        for copy in copies:
            assert h.send(PromotionDone(copy.copy, ok=True)) == []


def pools(h: Harness, letters: str, session: bytes = G) -> list[tuple[int, int, int]]:
    """(pool, first block, blocks) of each run of a lease that is given back unused."""
    acquired = h.acquire(letters, session)
    h.release(acquired, 0, session=session)
    return [(run.pool, run.first_block, len(run.slots)) for run in acquired.runs]


def pools_of(acquired: Acquired, h: Harness) -> list[int]:
    """Pools of a lease that is given back used."""
    h.release(acquired, session=G)
    return [run.pool for run in acquired.runs]


def test_the_second_hit_copies_a_prefix_up() -> None:
    h = with_gpu()
    reserved = h.store("abc")
    assert use(h, "abc") == []
    (copy,) = use(h, "abc")
    assert (copy.source_pool, copy.target_pool) == (0, 1)
    assert copy.parts[0].sources.tolist() == reserved.grants[0].slots.tolist()
    assert copy.parts[0].size_bytes == GRANULE
    generations = next(command for command in h.all if isinstance(command, SetGenerations))
    assert (generations.pool, generations.slots.tolist()) == (1, copy.parts[0].targets.tolist())
    assert pools(h, "abc") == [(0, 0, 3)], "named before it is there"
    h.send(PromotionDone(copy.copy, ok=True))
    acquired = h.acquire("abc", G)
    assert acquired.tokens == (3 * TOKENS, 0, 0, 0)
    assert acquired.runs[0].slots.tolist() == copy.parts[0].targets.tolist()
    assert set(acquired.runs[0].generations.tolist()) == {generations.generation}


def test_every_part_goes_up() -> None:
    h = with_gpu(spec=TWO_PARTS)
    promoted(h, "ab")
    acquired = h.acquire("ab", G)
    assert [(run.part, run.pool) for run in acquired.runs] == [(0, 1), (1, 1)]


def test_only_who_maps_the_pool_is_told() -> None:
    h = with_gpu()
    promoted(h, "abc")
    assert pools(h, "abc", b"a" * 16) == [(0, 0, 3)]
    assert pools(h, "abc") == [(1, 0, 3)]


def test_what_follows_the_copies_is_read_from_host_memory() -> None:
    h = with_gpu()
    promoted(h, "ab")
    h.store("abcd")
    acquired = h.acquire("abcd", G)
    assert acquired.tokens == (2 * TOKENS, 2 * TOKENS, 0, 0)
    assert [(run.pool, run.first_block, len(run.slots)) for run in acquired.runs] == [(1, 0, 2), (0, 2, 2)]
    assert pools(h, "abcd") == [(1, 0, 2), (0, 2, 2)]
    ahead = h.acquire("abcd", G, from_block=1)
    assert [(run.pool, run.first_block, len(run.slots)) for run in ahead.runs] == [(1, 1, 1), (0, 2, 2)]
    beyond = h.acquire("abcd", G, from_block=3)
    assert [(run.pool, run.first_block, len(run.slots)) for run in beyond.runs] == [(0, 3, 1)]
    assert beyond.tokens == (0, TOKENS, 0, 0)


def test_hits_are_counted_for_the_tier_they_were_read_from() -> None:
    h = with_gpu()
    promoted(h, "ab")
    h.store("abcd")
    before = list(h.planner.state.stats.tokens.hit)
    h.release(h.acquire("abcd", G), 3, session=G)
    after = h.planner.state.stats.tokens.hit
    assert [now - then for now, then in zip(after, before, strict=True)] == [2 * TOKENS, TOKENS, 0, 0]


def test_a_longer_prompt_goes_up_behind_its_parents() -> None:
    h = with_gpu()
    promoted(h, "ab")
    h.store("abcd")
    h.hit("abcd")
    (copy,) = use(h, "abcd")
    assert len(copy.parts[0].sources) == 2
    h.send(PromotionDone(copy.copy, ok=True))
    assert pools(h, "abcd") == [(1, 0, 4)]


def test_nothing_is_copied_twice_at_once() -> None:
    h = with_gpu()
    h.store("ab")
    h.hit("ab")
    assert len(use(h, "ab")) == 1
    assert use(h, "ab") == []


def test_bytes_under_way_have_a_bound() -> None:
    h = with_gpu(gpu=GpuSpec(moving_bytes=3 * GRANULE, job_bytes=2 * GRANULE))
    h.store("abcdef")
    h.hit("abcdef")
    (first,) = use(h, "abcdef")
    assert len(first.parts[0].sources) == 2
    assert h.planner.state.stats.promotions_skipped[PromotionSkip.BUSY] == 4
    h.send(PromotionDone(first.copy, ok=True))
    (second,) = use(h, "abcdef")
    assert len(second.parts[0].sources) == 2


def test_the_leaf_used_longest_ago_makes_room() -> None:
    h = with_gpu(gpu_slots=4)
    promoted(h, "ab")
    promoted(h, "xy")
    promoted(h, "ab")
    promoted(h, "mn")
    assert pools(h, "ab") == [(1, 0, 2)]
    assert pools(h, "mn") == [(1, 0, 2)]
    assert pools(h, "xy") == [(0, 0, 2)]
    assert tier(h).drops[CopyDrop.EVICTED] == 2


def test_more_hot_blocks_than_the_pool_holds_do_not_push_each_other_out_for_ever() -> None:
    h = with_gpu(gpu_slots=4)
    prompts = ["ab", "cd", "ef", "gh"]
    for prompt in prompts:
        h.store(prompt)
        h.hit(prompt)
    copied = hits = 0
    for _ in range(40):
        for prompt in prompts:
            hits += pools_of(h.acquire(prompt, G), h) == [1]
            for copy in [command for command in h.all if isinstance(command, PromoteSlots)]:
                copied += 1
                h.send(PromotionDone(copy.copy, ok=True))
    assert hits > 40, "in turn, the oldest would always go right before its next hit"
    assert copied < 80
    assert h.planner.state.stats.promotions_skipped[PromotionSkip.THRASHING] > 0


def test_a_pool_that_is_read_changes_with_what_is_hit() -> None:
    h = with_gpu(gpu_slots=4)
    for prompt in ("ab", "cd", "ef", "gh", "ij", "kl"):
        promoted(h, prompt)
        assert pools(h, prompt) == [(1, 0, 2)]
    assert h.planner.state.stats.promotions_skipped[PromotionSkip.THRASHING] == 0


def test_leased_copies_stay() -> None:
    h = with_gpu(gpu_slots=4)
    promoted(h, "abcd")
    held = h.acquire("abcd", G)
    promoted(h, "xy")
    assert h.planner.state.stats.promotions_skipped[PromotionSkip.NO_ROOM] >= 2
    assert pools(h, "xy") == [(0, 0, 2)]
    h.release(held, session=G)
    promoted(h, "xy")
    assert pools(h, "xy") == [(1, 0, 2)]


def test_a_failed_copy_is_no_copy() -> None:
    h = with_gpu()
    h.store("ab")
    h.hit("ab")
    (copy,) = use(h, "ab")
    h.send(PromotionDone(copy.copy, ok=False))
    assert pools(h, "ab") == [(0, 0, 2)]
    assert h.planner.state.stats.promotions_skipped[PromotionSkip.COPY_FAILED] == 2
    assert tier(h).slots.used_bytes == 0


def test_a_cleared_block_leaves_sight_at_once_and_its_slots_with_the_last_lease() -> None:
    h = with_gpu()
    promoted(h, "ab")
    held = h.acquire("ab", G)
    h.send(ClearRequested(1, chain("a")))
    h.store("ab")
    assert pools(h, "ab") == [(0, 0, 2)], "a copy outlived what was cleared"
    assert tier(h).slots.used_bytes == 2 * GRANULE
    h.release(held, session=G)
    assert tier(h).slots.used_bytes == 0


def test_a_lease_over_a_cut_path_still_holds_its_front() -> None:
    h = with_gpu(gpu_slots=4)
    promoted(h, "abcd")
    held = h.acquire("abcd", G)
    h.send(ClearRequested(1, chain("abc")))
    promoted(h, "xy")
    assert pools(h, "ab") == [(1, 0, 2)]
    assert pools(h, "xy") == [(0, 0, 2)]
    h.release(held, session=G)


def test_what_is_cleared_while_it_is_copied_never_comes() -> None:
    h = with_gpu()
    h.store("abcd")
    h.hit("abcd")
    (copy,) = use(h, "abcd")
    h.send(ClearRequested(1, chain("abc")))
    h.store("abcd")
    h.send(PromotionDone(copy.copy, ok=True))
    assert pools(h, "abcd") == [(1, 0, 2), (0, 2, 2)]
    assert h.planner.state.stats.promotions_skipped[PromotionSkip.STALE] == 2


def test_copies_go_with_their_block_in_host_memory() -> None:
    h = with_gpu(slots=4)
    promoted(h, "ab")
    h.store("wxyz")
    assert h.hit("ab") == 0
    assert tier(h).blocks == 0
    assert tier(h).drops[CopyDrop.WITH_HOST] == 2


def test_copies_go_with_a_block_whose_bytes_were_wrong() -> None:
    h = with_gpu()
    promoted(h, "abc")
    run = h.acquire("abc").runs[0]
    space = h.planner.state.namespaces[1]
    row = int((space.table.parts[0].slots == run.slots[1]).nonzero()[0][0])
    h.send(PartFailedVerification(1, 0, row, int(run.generations[1])))
    assert pools(h, "abc") == [(1, 0, 1)]


def test_host_blocks_stay_while_they_are_copied() -> None:
    h = with_gpu(slots=4)
    h.store("ab")
    h.hit("ab")
    (copy,) = use(h, "ab")
    h.store("wxyz")
    assert h.hit("ab") == 2
    h.send(PromotionDone(copy.copy, ok=True))
    assert pools(h, "ab") == [(1, 0, 2)]


def test_a_lost_device_makes_its_leases_misses() -> None:
    h = with_gpu()
    promoted(h, "ab")
    held = h.acquire("ab", G)
    (order,) = h.send(DeviceLost(1, "fell off the bus"))
    assert isinstance(order, SetGenerations)
    assert set(held.runs[0].slots.tolist()) <= set(order.slots.tolist())
    assert order.generation not in held.runs[0].generations.tolist()
    assert pools(h, "ab") == [(0, 0, 2)]
    assert tier(h).reason == "fell off the bus"
    h.release(held, 0, session=G)
    assert use(h, "ab") == []
    assert h.planner.state.stats.promotions_skipped[PromotionSkip.TIER_OFF] > 0
    assert h.send(DeviceLost(1, "again")) == []


def test_a_copy_under_way_to_a_lost_device_ends_as_nothing() -> None:
    h = with_gpu()
    h.store("ab")
    h.hit("ab")
    (copy,) = use(h, "ab")
    h.send(DeviceLost(1, ""))
    h.send(PromotionDone(copy.copy, ok=True))
    assert tier(h).blocks == 0
    assert tier(h).slots.used_bytes == 0


def test_other_classes_give_way_when_they_are_older() -> None:
    h = with_gpu(gpu_slots=8)
    promoted(h, "abcdefgh")
    h.open(2, TWO_PARTS)
    h.store("xy", namespace=2)
    for _ in range(2):
        h.release(h.acquire("xy", G, namespace=2), session=G)
    copies = [command for command in h.all if isinstance(command, PromoteSlots)]
    assert copies
    assert tier(h).drops[CopyDrop.EVICTED] > 0


def test_sources_are_not_given_away_when_their_slab_moves() -> None:
    h = with_gpu(slots=8)
    wide = NamespaceSpec(TOKENS, (FULL,), (PartSpec(0, 1, 3 * GRANULE),))
    h.open(2, wide)
    for letter in "abcdefgh":
        h.store(letter)
    held = [h.acquire(letter, G) for letter in "aceg"]
    h.reserve("x", namespace=2)
    (move,) = [command for command in h.all if isinstance(command, CopySlots)]
    moving = set(move.sources.tolist())
    index = next(place for place, lease in enumerate(held) if int(lease.runs[0].slots[0]) in moving)
    letter = "aceg"[index]
    h.release(h.acquire(letter, G), session=G)
    h.release(held[index], session=G)
    (copy,) = [command for command in h.all if isinstance(command, PromoteSlots)]
    h.send(CopyDone(move.copy, ok=True))
    for lease in held:
        if lease is not held[index]:
            h.release(lease, session=G)
    sources = set(copy.parts[0].sources.tolist())
    assert sources <= set(h.planner.mover.held_slots().tolist()), "a source was given away under its copy"
    h.send(PromotionDone(copy.copy, ok=True))
    assert pools(h, letter)[0][0] == 1
    assert not sources & set(h.planner.mover.held_slots().tolist())


def test_namespaces_with_windows_stay_in_host_memory() -> None:
    spec = NamespaceSpec(
        TOKENS, (FULL, GroupSpec(GroupKind.SLIDING, 2 * TOKENS)), (PartSpec(0, 1, GRANULE), PartSpec(1, 1, GRANULE))
    )
    h = with_gpu(spec=spec)
    h.store("ab")
    h.hit("ab")
    assert use(h, "ab") == []
    assert h.planner.state.stats.promotions_skipped[PromotionSkip.LAYOUT] == 2


def test_an_ended_session_gives_its_copies_back() -> None:
    h = with_gpu(gpu_slots=4)
    promoted(h, "abcd")
    h.acquire("abcd", G)
    h.send(SessionEnded(G))
    assert not tier(h).leases
    h.ask(SessionOpened(G, True, gpu_pools=(1,)), SessionReady)
    promoted(h, "xy")
    assert pools(h, "xy") == [(1, 0, 2)]


def test_a_session_that_says_something_else_is_refused() -> None:
    h = with_gpu()
    h.ask(SessionOpened(G, True, gpu_pools=(1,)), SessionReady)
    h.refused(SessionOpened(G, True), Kind.ALREADY_EXISTS, Refusal.SESSION_EXISTS)


def test_events_tell_of_copies() -> None:
    h = with_gpu(publish=True)
    h.store("ab")
    h.hit("ab")
    (copy,) = use(h, "ab")
    (stored,) = h.send(PromotionDone(copy.copy, ok=True))
    assert isinstance(stored, Published)
    assert (stored.change, stored.tier, stored.keys) == (Change.STORED, Tier.GPU, chain("ab"))
    news = [command for command in h.send(ClearRequested(1, chain("ab"))) if isinstance(command, Published)]
    gone = next(each for each in news if each.tier is Tier.GPU)
    assert (gone.change, gone.keys, gone.parent, gone.first_block) == (Change.REMOVED, chain("ab")[32:], chain("a"), 1)
    assert (stored.pool, gone.pool) == (1, 1)
    assert [each.change for each in news if each.tier is Tier.HOST] == [Change.REMOVED]


def test_a_lookup_changes_nothing_up_there() -> None:
    h = with_gpu()
    promoted(h, "ab")
    h.send(LookupRequested(1, chain("ab")))
    assert pools(h, "ab") == [(1, 0, 2)]


def test_unknown_copies_and_pools_are_refused() -> None:
    h = with_gpu()
    h.refused(PromotionDone(99, ok=True), Kind.NOT_FOUND, Refusal.COPY_UNKNOWN)
    h.refused(DeviceLost(9, "x"), Kind.NOT_FOUND, Refusal.ARGUMENT_INVALID)
