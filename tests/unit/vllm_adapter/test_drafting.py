"""A draft model's side beside the model's: asked together, loaded together or not at all, and nothing stored that the
draft model computed without what is in front of it."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prefixcache.identity.fingerprint import NamespaceIdentity
from prefixcache.identity.keys import block_keys
from prefixcache.identity.layout import GroupKind, LayerGroup, Layout
from prefixcache_client import Namespace
from prefixcache_vllm.draft_identity import DraftModel
from prefixcache_vllm.drafting import DraftSide, WithDrafts, shares
from prefixcache_vllm.identity import EngineIdentity, GroupPages
from prefixcache_vllm.options import Options
from prefixcache_vllm.orders import StepOrders
from prefixcache_vllm.scheduler import SchedulerSide
from tests.unit.vllm_adapter.fakes import SIZE, FakeAsker, FakeRequest, engine, image, step, until_read

SMALL = Layout.of(LayerGroup(GroupKind.FULL, (0,), 1, 32, 32, "bfloat16"))
IDENTITY = NamespaceIdentity(weights=b"d" * 32, layout=SMALL, block_tokens=SIZE)
MOST_TOKENS, PAGE = 1000, 32
TABLE = list(range(10, 20))


class Sides:
    """Both sides, and who answers each. `wait_s`: see WithDrafts."""

    def __init__(self, wait_s: float = 60.0, **options: Any) -> None:
        groups = (GroupPages({"draft_model.model.layers.0.self_attn.attn": 0}, PAGE),)
        model = EngineIdentity(IDENTITY, groups, "small")
        draft = DraftModel(model, MOST_TOKENS, 3, torch.bfloat16, "auto")
        self.main_asker, self.draft_asker = FakeAsker(), FakeAsker()
        self.main = SchedulerSide(engine(), Options(**options), self.main_asker)
        self.draft = DraftSide(draft, Options(**options), self.draft_asker)
        self.both = WithDrafts(self.main, self.draft, wait_s)

    def matched(self, each: FakeRequest, local: int = 0) -> Any:
        return self.both.matched(each, local)

    def admit(self, each: FakeRequest, table: list[int], main: int, draft: int, local: int = 0) -> StepOrders:
        """From arrival to pages, with so many blocks found; the orders of the step."""
        assert self.matched(each, local) == (None, False)
        self.main_asker.tell(main)
        self.draft_asker.tell(draft)
        external, _ = self.matched(each, local)
        self.both.placed(each, (table,), external or 0)
        each.num_computed_tokens = local + (external or 0)
        return self.both.step(step({}, {}))

    def arrive(self, each: FakeRequest, *, without_draft: bool = False) -> None:
        name = {each.request_id}
        self.both.loaded(name, (), (), name if without_draft else ())

    def compute(self, each: FakeRequest, table: list[int], count: int) -> list[Any]:
        """A step; the draft model's saves."""
        orders = self.both.step(step({each.request_id: count}, {each.request_id: (table,)}))
        each.num_computed_tokens += count
        return orders.draft.late_saves if orders.draft is not None else []


def request(name: str = "r", tokens: int = 200, **fields: Any) -> FakeRequest:
    return FakeRequest(name, list(range(1, tokens + 1)), **fields)


@pytest.fixture
def sides() -> Sides:
    return Sides()


def test_both_are_asked_and_loaded_together(sides: Sides) -> None:
    each = request()
    orders = sides.admit(each, TABLE, main=3, draft=3)
    assert orders.draft is not None
    (main,), (draft,) = orders.loads, orders.draft.loads
    assert (main.from_token, main.to_token, main.pages) == (draft.from_token, draft.to_token, draft.pages)
    assert main.fingerprint != draft.fingerprint == IDENTITY.fingerprint()
    root = Namespace(IDENTITY).epoch.root
    assert sides.draft_asker.asked[0].question.prompt.keys == block_keys(root, each.all_token_ids, SIZE)
    sides.arrive(each)
    each.output = list(range(500, 600))
    (order,) = sides.compute(each, TABLE, 80)
    assert (order.first_block, order.end_block) == (3, 4), "what it computes behind right pages is stored"
    numbers = sides.both.numbers()
    assert (numbers["loaded_tokens"], numbers["draft_loaded_tokens"]) == (192, 192)
    assert sides.both.finished(each, (TABLE,))
    assert sides.main_asker.open == sides.draft_asker.open == 0


def test_a_prompt_that_nobody_has_is_stored_for_both(sides: Sides) -> None:
    each = request()
    assert not sides.admit(each, TABLE, main=0, draft=0).loads
    orders = sides.both.step(step({"r": 200}, {"r": (TABLE,)}))
    assert orders.draft is not None
    assert not orders.draft.saves
    (main,), (draft,) = orders.saves, orders.draft.late_saves
    assert (main.first_block, main.end_block, main.pages) == (draft.first_block, draft.end_block, draft.pages)


@pytest.mark.parametrize(("found", "reason"), [(0, "not_stored"), (2, "shorter_than_model")])
def test_what_the_draft_model_lacks_holds_nobody_up_and_taints_what_follows(
    sides: Sides, found: int, reason: str
) -> None:
    each = request()
    orders = sides.admit(each, TABLE, main=3, draft=found)
    assert orders.loads[0].to_token == 192
    loads = orders.draft.loads if orders.draft is not None else []
    assert [order.to_token for order in loads] == [found * SIZE] * bool(found)
    assert sides.draft.book.reasons == {reason: 1}
    sides.arrive(each)
    each.output = list(range(500, 600))
    assert not sides.compute(each, TABLE, 80)
    sides.both.finished(each, (TABLE,))
    orders = sides.both.step(step({}, {}))
    assert orders.saves or orders.closing
    assert orders.draft is None or not orders.draft.saves


def test_a_load_that_fails_for_the_draft_model_is_no_failure_of_the_request(sides: Sides) -> None:
    each = request()
    sides.admit(each, TABLE, main=3, draft=3)
    sides.arrive(each, without_draft=True)
    each.output = list(range(500, 600))
    assert not sides.compute(each, TABLE, 80)
    assert sides.main.book.hits == 1
    assert sides.draft.book.reasons == {"load_failed": 1}
    # Another request gets its pages from vLLM's own cache.
    other = request("o", 400)
    sides.admit(other, TABLE[:6] + list(range(40, 50)), main=0, draft=0, local=192)
    assert not sides.compute(other, TABLE[:6] + list(range(40, 50)), 208)


def test_a_failure_on_one_rank_is_remembered_until_all_have_arrived(sides: Sides) -> None:
    each = request()
    sides.admit(each, TABLE, main=3, draft=3)
    sides.both.loaded((), (), (), {"r"})
    assert sides.draft_asker.open == 1, "another rank may still copy"
    sides.arrive(each)
    each.output = list(range(500, 600))
    assert not sides.compute(each, TABLE, 80)
    assert not sides.both._lost


def test_right_pages_of_vllms_own_cache_are_built_upon(sides: Sides) -> None:
    first, other = request(), request("o", 400)
    sides.admit(first, TABLE, main=0, draft=0)
    assert sides.compute(first, TABLE, 200)
    table = TABLE[:6] + list(range(40, 50))
    sides.admit(other, table, main=0, draft=0, local=192)
    (order,) = sides.compute(other, table, 208)
    assert order.end_block == 6


def test_an_answer_for_the_draft_model_is_waited_for_a_little() -> None:
    patient, hasty = Sides(wait_s=60.0), Sides(wait_s=0.0)
    for sides in (patient, hasty):
        assert sides.matched(request()) == (None, False)
        sides.main_asker.tell(3)
    assert patient.matched(request()) == (None, False)
    patient.draft_asker.tell(3)
    assert patient.matched(request()) == (192, True)
    assert hasty.matched(request()) == (192, True)
    hasty.both.placed(request(), (TABLE,), 192)
    assert hasty.draft.book.reasons == {"deadline": 1}
    assert hasty.draft_asker.open == 0, "an answer that comes now is given back"
    hasty.both.loaded({"r"}, (), ())
    assert hasty.main.book.hits == 1


def test_nothing_is_waited_for_where_the_model_has_nothing(sides: Sides) -> None:
    assert sides.matched(request()) == (None, False)
    sides.main_asker.tell(0)
    assert sides.matched(request()) == (0, False)


def test_loads_inside_the_step() -> None:
    """The step that loads computes as well: what it stores of the draft model waits until the load has ended."""
    sides = Sides(load="sync")
    for name, table, lost in (("a", list(range(10, 20)), False), ("b", list(range(30, 40)), True)):
        each = request(name)
        assert sides.matched(each) == (None, False)
        sides.main_asker.tell(3)
        sides.draft_asker.tell(3)
        assert sides.matched(each) == (192, False)
        sides.both.placed(each, (table,), 192)
        each.num_computed_tokens, each.output = 192, list(range(500, 600))
        assert not sides.compute(each, table, 64)
        sides.both.loaded((), (), (), {name} if lost else ())
        late = [sides.compute(each, table, 1) for _ in range(6)]
        assert [(order.first_block, order.end_block) for orders in late for order in orders] == [(3, 4)] * (not lost)
        sides.both.finished(each, (table,))


def test_steps_too_long_for_the_draft_model_leave_gaps(sides: Sides) -> None:
    long, short = request("long", 1100), request("short")
    tables = {"long": (list(range(100, 140)),), "short": (TABLE,)}
    for each in (long, short):
        sides.admit(each, tables[each.request_id][0], main=0, draft=0)
    long.num_computed_tokens = 900
    cached = SimpleNamespace(req_ids=["long"], num_computed_tokens=[900], resumed_req_ids=set(), new_block_ids=[None])
    output = step({"long": 150, "short": 200}, tables, scheduled_cached_reqs=cached)
    orders = sides.both.step(output)
    assert {order.request_id for order in orders.saves} == {"long", "short"}
    assert orders.draft is None or not orders.draft.late_saves
    short.num_computed_tokens, short.output = 200, list(range(500, 600))
    assert not sides.compute(short, TABLE, 80), "it attends to the gap"


def test_requests_left_alone(sides: Sides) -> None:
    each = request(mm_features=[image("cat", 3, 4)])
    until_read(lambda: sides.main._media_of(each))
    assert sides.matched(each) == (None, False)
    sides.main_asker.tell(3)
    assert sides.matched(each) == (192, True), "the model's are found"
    assert not sides.draft_asker.asked
    sides.both.placed(each, (TABLE,), 192)
    assert sides.draft.skipped == {"draft_images": 1}
    sides.arrive(each)
    sides.both.finished(each, (TABLE,))
    assert len(sides.draft._trust) == 0


def test_adapters_are_the_models(sides: Sides, tmp_path: Any) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.ones(2, 2)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text("{}")
    lora = SimpleNamespace(lora_int_id=1, lora_name="l", lora_path=str(tmp_path), load_inplace=False)
    sides.admit(request("plain"), TABLE, main=0, draft=0)
    sides.admit(request("adapted", lora_request=lora), list(range(40, 50)), main=0, draft=0)
    plain, adapted = (ask.question.namespace.epoch.fingerprint for ask in sides.main_asker.asked)
    assert plain != adapted
    assert sides.draft_asker.asked[0].question.prompt.keys == sides.draft_asker.asked[1].question.prompt.keys


def test_a_preempted_request_begins_anew(sides: Sides) -> None:
    each = request()
    sides.admit(each, TABLE, main=3, draft=0)
    sides.arrive(each)
    sides.compute(each, TABLE, 8)
    each.num_computed_tokens = 0
    orders = sides.admit(each, list(range(60, 70)), main=0, draft=0)
    assert not orders.loads
    (order,) = sides.compute(each, list(range(60, 70)), 200)
    assert (order.first_block, order.end_block) == (0, 3)


def test_weights_changed_in_place_change_both(sides: Sides) -> None:
    sides.both.reset()
    each = request()
    sides.both.matched(each, 0)
    assert sides.draft_asker.asked[0].question.namespace.epoch.fingerprint != IDENTITY.fingerprint()
    assert sides.main.fingerprints() != [engine().identity.fingerprint()]


def test_what_may_be_pinned_is_split() -> None:
    model = EngineIdentity(IDENTITY, (), "small")
    main, draft = shares(Options(pinned_share=0.25), engine(), model)
    assert main.pinned_share + draft.pinned_share == pytest.approx(0.25)
    assert main.pinned_share == pytest.approx(4 * draft.pinned_share), "twice the layers, twice the heads"
    assert dataclasses.replace(main, pinned_share=0.25) == Options(pinned_share=0.25)


def test_pages_of_a_request_that_left_while_its_step_loaded_are_not_believed() -> None:
    """They have another owner when the load has ended, and may hold what no draft model computed."""
    sides = Sides(load="sync")
    each = request("a")
    sides.matched(each)
    sides.main_asker.tell(3)
    sides.draft_asker.tell(3)
    assert sides.matched(each) == (192, False)
    sides.both.placed(each, (TABLE,), 192)
    each.num_computed_tokens = 192
    sides.compute(each, TABLE, 8)
    each.status = SimpleNamespace(name="PREEMPTED")
    for _ in range(4):
        sides.both.step(step({}, {}))
    other = request("b")
    sides.admit(other, TABLE, main=0, draft=0, local=64)
    other.num_computed_tokens = 64
    assert not sides.compute(other, TABLE, 136), "vLLM's own cache gave it pages that the load may not have written"
