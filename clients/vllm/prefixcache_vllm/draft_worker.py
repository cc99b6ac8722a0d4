"""The worker side of an engine with a draft model: two sides that move the same requests' blocks of two namespaces.

Rules:
1. A request has arrived when both loads have ended, because both models read its pages from then on. It failed if the
   model's did; the draft model's failure is told apart.
2. A request's pages are kept until both have saved.
3. The draft model computes a step's tokens after the model, so that its saves begin at the very end (`save_late`).
"""

from collections import Counter
from collections.abc import Iterable, Mapping

import torch

from prefixcache_vllm.counting import Numbers, of_drafts
from prefixcache_vllm.orders import StepOrders
from prefixcache_vllm.packing import Packing
from prefixcache_vllm.worker import Ended, WorkerSide


class WithDraftWorker:
    """Both sides as one: what the connector sees of WorkerSide."""

    def __init__(self, main: WorkerSide, draft: WorkerSide, draft_packing: Packing) -> None:
        self._main = main
        self._draft = draft
        self._draft_packing = draft_packing
        self._loading: Counter[str] = Counter()
        self._closing: Counter[str] = Counter()
        self._failed: set[str] = set()
        self._bad_pages: set[int] = set()

    def register(self, kv_caches: Mapping[str, torch.Tensor], packing: Packing) -> None:
        """See WorkerSide."""
        self._main.register(kv_caches, packing)
        self._draft.register(kv_caches, self._draft_packing)

    def load(self, orders: StepOrders, *, now: bool) -> None:
        """See WorkerSide."""
        for side, theirs in self._both(orders):
            if not now:
                self._loading.update(order.request_id for order in theirs.loads)
            side.load(theirs, now=now)

    def save(self, orders: StepOrders) -> None:
        """See WorkerSide."""
        for side, theirs in self._both(orders):
            self._closing.update(theirs.closing)
            side.save(theirs)

    def save_late(self, orders: StepOrders) -> None:
        """Begin the saves of what the draft model computed in this step; it has."""
        if orders.draft is not None:
            self._draft.save(StepOrders(saves=orders.draft.late_saves, namespaces=orders.draft.namespaces))

    def let_go(self, orders: StepOrders) -> None:
        """See WorkerSide."""
        for side, theirs in self._both(orders):
            side.let_go(theirs)

    def ended(self) -> Ended:
        """See WorkerSide."""
        main, draft = self._main.ended(), self._draft.ended()
        self._failed |= main.failed
        arrived = _last(self._loading, (main.arrived, draft.arrived))
        failed = self._failed & arrived
        self._failed -= failed
        saved = _last(self._closing, (main.saved, draft.saved))
        self._bad_pages |= main.bad_pages
        if not failed and self._failed:  # told with the request that they belong to
            return Ended(saved, arrived, lost=main.lost, without_draft=draft.lost)
        bad_pages, self._bad_pages = self._bad_pages, set()
        return Ended(saved, arrived, failed, bad_pages, main.lost, draft.lost)

    def numbers(self) -> Numbers:
        """See WorkerSide."""
        return self._main.numbers() | of_drafts(self._draft.numbers())

    def close(self) -> None:
        """See WorkerSide."""
        self._draft.transfers.close(timeout_s=2.0)
        self._main.close()

    def _both(self, orders: StepOrders) -> Iterable[tuple[WorkerSide, StepOrders]]:
        yield self._main, orders
        if orders.draft is not None:
            yield self._draft, orders.draft


def _last(waiting: Counter[str], ended: Iterable[set[str]]) -> set[str]:
    """Of requests that ended on a side those that end on no other any more."""
    over = set()
    for names in ended:
        for name in names:
            waiting[name] -= 1
            if waiting[name] <= 0:
                del waiting[name]
                over.add(name)
    return over
