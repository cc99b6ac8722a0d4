"""The scheduler side of an engine with a draft model: the same requests in two namespaces.

Rules:
1. The model decides what is loaded and when. Its draft model's blocks are asked for at the same time, and loaded into
   the same pages if they are known to be there when the request gets its pages; an answer that is not there yet is
   waited for as long as DRAFT_SHARE of what the model's may take, and only where the model has something to load.
2. What the draft model lacks costs a request proposals, no tokens: nothing of it is an error of the request's.
3. Stored is only what the draft model would have computed with all its KV in place (see trust).
"""

import dataclasses
import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Final

from prefixcache_client import Namespace
from prefixcache_vllm.asking import Asker
from prefixcache_vllm.book import TOO_LATE, Entry, Phase
from prefixcache_vllm.counting import Numbers, of_drafts
from prefixcache_vllm.draft_identity import DraftModel
from prefixcache_vllm.identity import EngineIdentity
from prefixcache_vllm.options import Options
from prefixcache_vllm.orders import StepOrders
from prefixcache_vllm.scheduler import SchedulerSide
from prefixcache_vllm.trust import Trust

DRAFT_SHARE: Final = 0.02
_IMAGES: Final = "draft_images"
_SHORTER: Final = "shorter_than_model"

Table = tuple[list[int], ...]


class DraftSide(SchedulerSide):
    """A draft model's blocks of the requests the engine has."""

    def __init__(
        self, draft: DraftModel, options: Options, asker: Asker, *, loads: bool = True, saves: bool = True
    ) -> None:
        """Raises ValueError or OSError for a tenant key that cannot be read."""
        super().__init__(draft.engine, options, asker, loads=loads, saves=saves)
        self._group = draft.group
        self._most_tokens = draft.most_tokens
        self._ahead = 2 * (draft.proposals + 1)  # by so much what vLLM counts as computed may shrink again
        self._trust = Trust(draft.engine.groups[draft.group].page_tokens)

    def matched(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """See SchedulerSide."""
        self._trust.begin(request.request_id, local_tokens)
        return super().matched(request, local_tokens)

    def placed(self, request: Any, block_ids: Table, external_tokens: int) -> None:
        """The engine has made room for `external_tokens` tokens, which the model loads."""
        request_id, entry = request.request_id, self.book.get(request.request_id)
        if external_tokens <= 0 or not self._loads:
            super().placed(request, block_ids, 0)
            return
        found = self._found(entry)
        if entry is not None and entry.phase is Phase.ASKED:
            self.book.count(TOO_LATE)
        elif 0 < found < external_tokens:
            self.book.count(_SHORTER)
        loaded = min(found, external_tokens)
        super().placed(request, block_ids, loaded)
        if request_id in self._loading:
            self._trust.suspect(self._draft_pages(request_id))
        if loaded < external_tokens:
            self._trust.spoil(request_id, self._trust.local_tokens(request_id) + loaded)
            self._trust.mark(request_id, block_ids[self._group])

    def step(self, scheduler_output: Any) -> StepOrders:
        """See SchedulerSide. What is saved of requests that run goes to `late_saves`."""
        of_finished = len(self._orders.saves)
        orders = super().step(scheduler_output)
        for request_id in orders.leaving.intersection(self._loading):
            # Preempted in the step that loads: what was its pages may have another owner when the load has ended.
            self._loading[request_id] = (frozenset(), self._loading[request_id][1])
        if len(orders.saves) > of_finished:
            orders.saves, orders.late_saves = orders.saves[:of_finished], orders.saves[of_finished:]
        return orders

    def finished(self, request: Any, block_ids: Table) -> bool:
        """See SchedulerSide."""
        keep = super().finished(request, block_ids)
        self._trust.forget(request.request_id)
        return keep

    @property
    def loading(self) -> Iterable[str]:
        """Requests whose load has not ended on every rank."""
        return self._loading.keys()

    def _left_alone(self, request: Any) -> str:
        # A draft model sees placeholders, or the model's images: not what the same model sees that is served itself.
        return super()._left_alone(request) or (_IMAGES if getattr(request, "mm_features", None) else "")

    def _namespace(self, request: Any) -> Namespace:
        return self._namespaces[""]  # adapters are the model's

    def _save_scheduled(self, orders: StepOrders, scheduler_output: Any) -> None:
        scheduled = scheduler_output.num_scheduled_tokens
        computed = _computed(scheduler_output)
        ends = {name: count + computed.get(name, self._computed(name)) for name, count in scheduled.items()}
        runs = max(ends.values(), default=0) <= self._most_tokens
        for request_id, end in ends.items():
            if not runs:
                self._trust.spoil(request_id, max(0, end - scheduled[request_id] - self._ahead))
            self._trust.look(request_id, end, partial(self._draft_table, request_id))
        super()._save_scheduled(orders, scheduler_output)

    def _save(self, orders: StepOrders, entry: Entry, request: Any, computed: int, table: Table | None) -> None:
        if entry.phase is Phase.LOADING or table is None or not self._trust.right(entry.request_id):
            return
        super()._save(orders, entry, request, computed, table)
        self._trust.clear(self._trust.own_pages(entry.request_id, table[self._group], computed))

    def _end_load(self, request_id: str, *, ok: bool) -> None:
        if request_id in self._loading:
            if ok:
                self._trust.clear(self._draft_pages(request_id))
            else:
                self._trust.spoil(request_id, self._trust.local_tokens(request_id))
        super()._end_load(request_id, ok=ok)

    def _found(self, entry: Entry | None) -> int:
        """Tokens beyond vLLM's own that can be loaded, as far as is known."""
        if entry is None or entry.ticket is None or entry.phase is Phase.LOADING:
            return 0
        return max(0, entry.ticket.blocks * self._options.block_tokens - entry.from_token)

    def _draft_table(self, request_id: str) -> list[int] | None:
        table = self._tables.get(request_id)
        return None if table is None else table[self._group]

    def _draft_pages(self, request_id: str) -> frozenset[int]:
        return self._loading[request_id][0]

    def _computed(self, request_id: str) -> int:
        request = self._requests.get(request_id)
        return 0 if request is None else int(request.num_computed_tokens)


class WithDrafts:
    """Both sides as one: what the connector sees of SchedulerSide."""

    def __init__(self, main: SchedulerSide, draft: DraftSide, wait_s: float) -> None:
        """`wait_s`: how long a request whose prefix was found may wait for what is known of its draft model's."""
        self._main = main
        self._draft = draft
        self._wait_s = wait_s
        self._waits_until: dict[str, float] = {}
        self._lost: set[str] = set()

    def arrived(self, request: Any) -> None:
        """See SchedulerSide."""
        self._main.arrived(request)
        self._draft.arrived(request)

    def matched(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """See SchedulerSide."""
        draft, _ = self._draft.matched(request, local_tokens)  # asked first: it is rarely waited for
        found = self._main.matched(request, local_tokens)
        if draft is None and found[0]:
            now = time.monotonic()
            if now < self._waits_until.setdefault(request.request_id, now + self._wait_s):
                return None, False
        return found

    def placed(self, request: Any, block_ids: Table, external_tokens: int) -> None:
        """See SchedulerSide."""
        self._waits_until.pop(request.request_id, None)
        self._main.placed(request, block_ids, external_tokens)
        self._draft.placed(request, block_ids, external_tokens)

    def step(self, scheduler_output: Any) -> StepOrders:
        """See SchedulerSide."""
        orders, draft = self._main.step(scheduler_output), self._draft.step(scheduler_output)
        return dataclasses.replace(orders, draft=draft) if draft else orders

    def finished(self, request: Any, block_ids: Table) -> bool:
        """See SchedulerSide."""
        self._waits_until.pop(request.request_id, None)
        keep = [side.finished(request, block_ids) for side in (self._main, self._draft)]
        return any(keep)

    def loaded(
        self,
        arrived: Iterable[str],
        failed: Iterable[str],
        bad_pages: Iterable[int],
        without_draft: Iterable[str] = (),
    ) -> None:
        """See SchedulerSide. `without_draft`: whose load failed for the draft model on some rank; they arrive on all
        later, perhaps."""
        self._main.loaded(arrived, failed, bad_pages)
        self._lost.update(without_draft)
        self._draft.loaded(arrived, self._lost, ())
        self._lost.intersection_update(self._draft.loading)

    def numbers(self) -> Numbers:
        """See SchedulerSide."""
        return self._main.numbers() | of_drafts(self._draft.numbers())

    def reset(self) -> None:
        """See SchedulerSide."""
        self._main.reset()
        self._draft.reset()

    def close(self) -> None:
        """See SchedulerSide."""
        self._main.close()
        self._draft.close()


def shares(options: Options, main: EngineIdentity, draft: EngineIdentity) -> tuple[Options, Options]:
    """Options of both sides. What may be pinned for requests that do not run is split as their blocks' sizes are."""
    sizes = [Namespace(each.identity).block_bytes for each in (main, draft)]
    whole = options.pinned_share / sum(sizes)
    first, second = (dataclasses.replace(options, pinned_share=whole * size) for size in sizes)
    return first, second


def _computed(scheduler_output: Any) -> Mapping[str, int]:
    """How many tokens of its requests were computed before the step, where vLLM says so."""
    known = {each.req_id: each.num_computed_tokens for each in getattr(scheduler_output, "scheduled_new_reqs", ())}
    cached = getattr(scheduler_output, "scheduled_cached_reqs", None)
    if cached is not None:
        known.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return known
