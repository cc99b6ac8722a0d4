"""Which rank's pages are whose: sizes that may share, and names that keep all others apart."""

from typing import Any

import pytest

from prefixcache_sglang.facts import CannotShareError
from prefixcache_sglang.placing import check, parents_of, pieces_of
from tests.unit.sglang_adapter.conftest import MakeBackend
from tests.unit.sglang_adapter.stub_sglang import Config, MlaPool, Pool, RunsPool, Shape, fill, indices, keys, raw

PAGES = [3, 1, 7]


def whole(pool: Pool, page: int) -> bytes:
    return raw(pool.page(page).reshape(2, 3, 4, -1, 8))


def test_what_one_rank_wrote_two_ranks_read_and_the_other_way_round(make: MakeBackend) -> None:
    one = Pool("page_first", Shape(heads=4))
    fill(one, 1)
    make(one, tp_lcm_size=2).batch_set_v1(keys(3, "a"), indices(one, PAGES))
    halves = [Pool("layer_first", Shape(heads=2)), Pool("page_head", Shape(heads=2))]
    ranks = [make(half, tp_lcm_size=2, tp_rank=rank, tp_size=2) for rank, half in enumerate(halves)]
    for rank, (half, backend) in enumerate(zip(halves, ranks, strict=True)):
        assert backend.batch_get_v1(keys(3, "a"), indices(half, PAGES)) == [True] * 3
        for page in PAGES:
            wanted = one.page(page).reshape(2, 3, 4, 4, 8)[:, :, :, 2 * rank : 2 * rank + 2]
            assert whole(half, page) == raw(wanted)
        fill(half, 10 + rank)
    assert ranks[0].batch_set_v1(keys(3, "b"), indices(halves[0], PAGES)) == [True] * 3
    reader = make(one, tp_lcm_size=2)
    assert reader.batch_exists(keys(3, "b")) == 0, "half of a page is none"
    assert reader.batch_get_v1(keys(3, "b"), indices(one, PAGES)) == [False] * 3
    assert ranks[1].batch_set_v1(keys(3, "b"), indices(halves[1], PAGES)) == [True] * 3
    assert reader.batch_get_v1(keys(3, "b"), indices(one, PAGES)) == [True] * 3
    for page in PAGES:
        both = one.page(page).reshape(2, 3, 4, 4, 8)
        assert [raw(both[:, :, :, 2 * rank : 2 * rank + 2]) for rank in (0, 1)] == [
            whole(half, page) for half in halves
        ]


def test_head_groups_of_page_unified_are_cut_anew(make: MakeBackend) -> None:
    for groups in (1, 2, 4):
        source = Pool("page_unified", Shape(heads=4, groups=groups))
        fill(source, groups)
        name = keys(1, f"g{groups}")
        make(source, tp_lcm_size=2).batch_set_v1(name, indices(source, [5]))
        target = Pool("page_first", Shape(heads=4))
        assert make(target, tp_lcm_size=2).batch_get_v1(name, indices(target, [5])) == [True]
        assert whole(target, 5) == whole(source, 5)


@pytest.mark.parametrize(
    "other",
    [
        {"tp_size": 2},
        {"tp_size": 2, "tp_rank": 1},
        {"attn_cp_size": 2},
        {"attn_cp_size": 2, "attn_cp_rank": 1},
        {"pp_size": 2},
        {"pp_size": 2, "pp_rank": 1},
    ],
)
def test_ranks_that_hold_something_else_find_nothing(make: MakeBackend, other: dict[str, Any]) -> None:
    source, same = Pool("page_first", Shape()), Pool("page_first", Shape())
    fill(source, 1)
    make(source).batch_set_v1(keys(2), indices(source, [1, 2]))
    assert make(same).batch_exists(keys(2)) == 2
    assert make(same, **other).batch_exists(keys(2)) == 0


def test_every_rank_has_pages_of_its_own(make: MakeBackend) -> None:
    pools = [Pool("page_first", Shape(heads=2)) for _ in range(2)]
    backends = [make(pool, tp_rank=rank, tp_size=2) for rank, pool in enumerate(pools)]
    for seed, (pool, backend) in enumerate(zip(pools, backends, strict=True)):
        fill(pool, seed)
        assert backend.batch_set_v1(keys(2), indices(pool, [1, 2])) == [True, True]
    for rank, pool in enumerate(pools):
        fresh = Pool("page_first", Shape(heads=2))
        assert make(fresh, tp_rank=rank, tp_size=2).batch_get_v1(keys(2), indices(fresh, [1, 2])) == [True, True]
        assert [raw(fresh.page(page)) for page in (1, 2)] == [raw(pool.page(page)) for page in (1, 2)]


def test_a_stage_with_other_layers_finds_nothing(make: MakeBackend) -> None:
    first, second = Pool("page_first", Shape()), Pool("page_first", Shape(first_layer=3))
    make(first).batch_set_v1(keys(1), indices(first, [0]))
    assert make(second).batch_exists(keys(1)) == 0


def test_latents_are_written_by_one_rank_and_read_by_all(make: MakeBackend) -> None:
    pools = [MlaPool("page_first", Shape()) for _ in range(2)]
    ranks = [make(pool, is_mla_model=True, tp_rank=rank, tp_size=2) for rank, pool in enumerate(pools)]
    fill(pools[0], 1)
    assert ranks[1].batch_set_v1(keys(2), indices(pools[1], [1, 2])) == [True, True]
    assert ranks[1].numbers.not_stored == {"not_the_writer": 2}
    assert ranks[0].batch_exists(keys(2)) == 0
    assert ranks[0].batch_set_v1(keys(2), indices(pools[0], [1, 2])) == [True, True]
    assert ranks[1].batch_get_v1(keys(2), indices(pools[1], [1, 2])) == [True, True]
    assert raw(pools[1].page(2)) == raw(pools[0].page(2))


def test_states_and_heads_of_a_model_of_latents_stay_with_their_rank(make: MakeBackend) -> None:
    """A mamba state, and a draft model's heads, differ from rank to rank though the latent does not."""
    for name, kind in (("mamba", RunsPool), ("draft", lambda: Pool("page_first", Shape(heads=1)))):
        pools = [kind() for _ in range(2)]
        ranks = [make(MlaPool("page_first", Shape()), is_mla_model=True, tp_rank=rank, tp_size=2) for rank in (0, 1)]
        for rank, pool in zip(ranks, pools, strict=True):
            rank.register_mem_host_pool_v2(pool, name)
        fill(pools[0], 1)
        assert ranks[0]._store(name, keys(2), indices(pools[0], [1, 2]), [None, None]) == [True, True]
        assert ranks[0]._present(name, keys(2), prefix=False).all()
        assert not ranks[1]._present(name, keys(2), prefix=False).any(), name


def test_data_parallel_replicas_share(make: MakeBackend) -> None:
    source, target = Pool("page_first", Shape()), Pool("page_first", Shape())
    make(source).batch_set_v1(keys(1), indices(source, [0]))
    assert make(target).batch_exists(keys(1)) == 1


def test_heads_that_cannot_be_cut_switch_the_pool_off(make: MakeBackend) -> None:
    pool = Pool("page_first", Shape(heads=3))
    backend = make(pool, tp_lcm_size=2)
    assert backend.batch_set_v1(keys(1), indices(pool, [0])) == [False]
    assert backend.batch_exists(keys(1)) == 0
    assert backend.numbers.not_stored == {"heads_uneven": 1}


def test_sizes_that_mean_nothing() -> None:
    assert [pieces_of(Config(tp_size=2, tp_lcm_size=each)) for each in (None, 2, 4)] == [1, 1, 2]
    with pytest.raises(CannotShareError, match="tp_lcm_size"):
        pieces_of(Config(tp_size=2, tp_lcm_size=3))
    with pytest.raises(CannotShareError, match="decode_context_parallel"):
        check(Config(dcp_size=2))


def test_parents_of_a_chain() -> None:
    assert parents_of(["b", "c"], ["a"]) == ["a", "b"]
    assert parents_of(["b", "c"], None) == [None, "b"]
    assert parents_of([], ["a"]) == []
