"""Two workers' sides as one: what is reported when both are through, and only once."""

from dataclasses import dataclass, field
from typing import Any, cast

from prefixcache_vllm.draft_worker import WithDraftWorker
from prefixcache_vllm.orders import LoadOrder, SaveOrder, StepOrders
from prefixcache_vllm.worker import Ended, WorkerSide
from tests.unit.vllm_adapter.fakes import IDENTITY, ticket


@dataclass
class FakeSide:
    """A WorkerSide that ends what it is told to end."""

    next: Ended = field(default_factory=Ended)
    loads: list[StepOrders] = field(default_factory=list)
    saves: list[StepOrders] = field(default_factory=list)
    let: list[StepOrders] = field(default_factory=list)

    def load(self, orders: StepOrders, *, now: bool) -> None:
        self.loads.append(orders)

    def save(self, orders: StepOrders) -> None:
        self.saves.append(orders)

    def let_go(self, orders: StepOrders) -> None:
        self.let.append(orders)

    def ended(self) -> Ended:
        ended, self.next = self.next, Ended()
        return ended

    def numbers(self) -> dict[str, Any]:
        return {"loads": 1}


def loads(*names: str) -> list[LoadOrder]:
    return [LoadOrder(name, IDENTITY.fingerprint(), ticket(2), 0, 128, ()) for name in names]


def worker() -> tuple[WithDraftWorker, FakeSide, FakeSide]:
    main, draft = FakeSide(), FakeSide()
    return WithDraftWorker(cast(WorkerSide, main), cast(WorkerSide, draft), "plain"), main, draft


def test_arrived_when_both_loads_have_ended() -> None:
    both, main, draft = worker()
    both.load(StepOrders(loads=loads("a", "b", "c"), draft=StepOrders(loads=loads("a", "b"))), now=False)
    main.next = Ended(arrived={"a", "c"})
    assert both.ended().arrived == {"c"}, "it has no draft model's"
    draft.next = Ended(arrived={"a", "b"}, failed={"b"}, lost={"b"})
    ended = both.ended()
    assert (ended.arrived, ended.failed, ended.without_draft) == ({"a"}, set(), {"b"})
    main.next = Ended(arrived={"b"}, failed={"b"}, bad_pages={7}, lost={"b"})
    ended = both.ended()
    assert (ended.arrived, ended.failed, ended.bad_pages) == ({"b"}, {"b"}, {7})
    assert both.ended() == Ended()


def test_a_failure_is_told_with_its_arrival() -> None:
    both, main, draft = worker()
    both.load(StepOrders(loads=loads("a"), draft=StepOrders(loads=loads("a"))), now=False)
    main.next = Ended(arrived={"a"}, failed={"a"}, bad_pages={7}, lost={"a"})
    ended = both.ended()
    assert not ended.arrived | ended.failed | ended.bad_pages
    draft.next = Ended(arrived={"a"})
    ended = both.ended()
    assert (ended.arrived, ended.failed, ended.bad_pages, ended.without_draft) == ({"a"}, {"a"}, {7}, set())


def test_loads_inside_a_step_are_not_counted() -> None:
    both, main, draft = worker()
    both.load(StepOrders(loads=loads("a"), draft=StepOrders(loads=loads("a"))), now=True)
    main.next, draft.next = Ended(bad_pages={7}, lost={"a"}), Ended(bad_pages={8}, lost={"a"})
    ended = both.ended()
    assert (ended.arrived, ended.bad_pages, ended.without_draft) == (set(), {7}, {"a"})
    assert not both._loading


def test_pages_are_kept_until_both_have_saved() -> None:
    both, main, draft = worker()
    both.save(StepOrders(closing=frozenset("ab"), draft=StepOrders(closing=frozenset("bc"))))
    main.next, draft.next = Ended(saved={"a", "b"}), Ended(saved={"c"})
    assert both.ended().saved == {"a", "c"}
    draft.next = Ended(saved={"b"})
    assert both.ended().saved == {"b"}


def test_late_saves_are_the_draft_models_and_begin_last() -> None:
    both, main, draft = worker()
    early, late = (SaveOrder(name, IDENTITY.fingerprint(), b"", 0, 1, ()) for name in "ab")
    names = {IDENTITY.fingerprint(): IDENTITY}
    orders = StepOrders(draft=StepOrders(saves=[early], late_saves=[late], namespaces=names))
    both.save(orders)
    assert [each.saves for each in draft.saves] == [[early]]
    both.save_late(orders)
    assert draft.saves[1].saves == [late]
    assert draft.saves[1].namespaces == names
    assert len(main.saves) == 1
    both.save_late(StepOrders())
    both.let_go(orders)
    assert (len(main.let), len(draft.let)) == (1, 1)


def test_numbers_of_both() -> None:
    assert worker()[0].numbers() == {"loads": 1, "draft_loads": 1}
