"""Block tables: asked for in new versions, put together in old ones."""

from types import SimpleNamespace

from prefixcache_vllm.tables import BlockTables
from tests.unit.vllm_adapter.fakes import step


def old_step(new: dict[str, tuple[list[int], ...]], more: dict[str, object], resumed: object) -> SimpleNamespace:
    cached = SimpleNamespace(req_ids=list(more), new_block_ids=list(more.values()), **resumed)  # type: ignore[arg-type] # a dict
    requests = [SimpleNamespace(req_id=name, block_ids=ids) for name, ids in new.items()]
    return SimpleNamespace(scheduled_new_reqs=requests, scheduled_cached_reqs=cached)


def test_new_versions_are_asked() -> None:
    tables = BlockTables()
    tables.step(step({"r": 1}, {"r": ([1, 2], [3])}))
    assert tables.get("r") == ([1, 2], [3])
    assert tables.get("other") is None


def test_a_state_that_tells_only_of_new_blocks_is_not_asked() -> None:
    tables = BlockTables()
    first = old_step({"r": ([1, 2],)}, {}, {"resumed_req_ids": set()})
    first.kv_connector_block_state = SimpleNamespace(block_ids={"r": ([1, 2],)})
    tables.step(first)
    then = old_step({}, {"r": None}, {"resumed_req_ids": set()})
    then.kv_connector_block_state = SimpleNamespace(block_ids={})
    tables.step(then)
    assert tables.get("r") == ([1, 2],)


def test_old_versions_tell_what_is_new() -> None:
    tables = BlockTables()
    tables.step(old_step({"r": ([1, 2],)}, {}, {"resumed_req_ids": set()}))
    tables.step(old_step({}, {"r": ([3],)}, {"resumed_req_ids": set()}))
    tables.step(old_step({}, {"r": None}, {"resumed_req_ids": set()}))
    assert tables.get("r") == ([1, 2, 3],)
    tables.step(old_step({}, {"r": ([7, 8],)}, {"resumed_req_ids": {"r"}}))
    assert tables.get("r") == ([7, 8],)
    tables.step(old_step({}, {"r": ([9],)}, {"resumed_from_preemption": [True]}))
    assert tables.get("r") == ([9],)
    tables.forget("r")
    assert tables.get("r") is None
