"""The worker side: orders of the scheduler side, carried out on this rank's KV cache.

Rules:
1. A step never waits for the daemon. What a step does itself are copies of memory: loads that the engine wants in the
   step ("sync"), and pages of windows, which the next step may give away.
2. Every load is reported: arrived, or failed so that the engine computes the tokens.
3. Where this rank's KV cannot be read, nothing is loaded or saved, and the reason is counted.
4. A step whose load failed inside it computes on pages that hold anything, and so do the steps that were scheduled
   before the engine knew: nothing of what they computed is saved, of any request, because others may share those pages.

It must not know vLLM; connector calls it with plain data.
"""

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch

from prefixcache.identity.fingerprint import NamespaceIdentity
from prefixcache_client import Client, CopyResult, Namespace, Portion, PromptKeys, StoreResult
from prefixcache_client.blocks import BlockFormat
from prefixcache_vllm.counting import Numbers, worker_numbers
from prefixcache_vllm.fences import Fence
from prefixcache_vllm.identity import EngineIdentity
from prefixcache_vllm.orders import LoadOrder, PageRun, SaveOrder, StepOrders
from prefixcache_vllm.packing import Packing, PageShape, UnknownFormError, View, layer_views
from prefixcache_vllm.pages import NULL_PAGE, LayerPages, PagedParts, PagedSpan, describe_layers, layers_in
from prefixcache_vllm.ranks import Rank
from prefixcache_vllm.transfers import LOAD_FAILED, Load, Save, SaveTask, Transfers

log = logging.getLogger("prefixcache_vllm")

_MAX_NAMESPACES: Final = 1024


@dataclass(slots=True)
class Ended:
    """What ended since the last step, by request id. `bad_pages`: of loads whose failure can be told by page only.

    `lost`: whose load failed, whether in its step or beside it. `without_draft`: whose draft model's did.
    """

    saved: set[str] = field(default_factory=set)
    arrived: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    bad_pages: set[int] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    without_draft: set[str] = field(default_factory=set)


class _Source(NamedTuple):
    """Where a save reads: the layers' tensors, and the request's pages in them by group."""

    parts: PagedParts
    pages: tuple[PageRun, ...]


class WorkerSide:
    """One rank. All methods are called by the engine's thread."""

    def __init__(
        self, client: Client, engine: EngineIdentity, rank: Rank, save_queue: int, *, tells_requests: bool
    ) -> None:
        """`tells_requests`: the engine can be told which requests' loads failed, and not only which pages are bad."""
        self._client = client
        self._engine = engine
        self._rank = rank
        self._transfers = Transfers(save_queue, client.open, counts_refusals=rank.first)
        self._form = BlockFormat(engine.identity.layout, engine.identity.block_tokens)
        self._stored = Portion(b"", tuple(rank.stores(shape.kv_heads) for shape in self._form.shapes))
        self._layers: dict[int, LayerPages] = {}
        self._parts: PagedParts = ()
        self._namespaces: dict[bytes, Namespace] = {}
        self._loading: dict[str, LoadOrder] = {}
        self._closing: set[str] = set()
        self._bad_pages: set[int] = set()
        self._lost: set[str] = set()
        self._staging = len(engine.groups) > 1
        self._tells_requests = tells_requests
        self._spoilt_steps = 0
        self.reason_off = "kv_cache_unknown"
        """Why nothing is moved; "" where things are."""

    @property
    def transfers(self) -> Transfers:
        """What is under way."""
        return self._transfers

    def register(self, kv_caches: Mapping[str, torch.Tensor], packing: Packing) -> None:
        """Learn where the KV of each layer is. `kv_caches`: by vLLM's layer names."""
        layout = self._engine.identity.layout
        shapes = {layer: group for group in layout.groups for layer in group.layers}
        try:
            for number, group in enumerate(self._engine.groups):
                for name, layer in group.layers.items():
                    spec = shapes[layer]
                    heads = len(self._rank.holds(spec.kv_heads))
                    shape = PageShape(heads, group.page_tokens, spec.k_dim, spec.v_dim)
                    views = layer_views(kv_caches[name], shape, packing)
                    self._layers[layer] = LayerPages(views, number, group.page_tokens)
        except UnknownFormError as error:
            log.warning("prefixcache is off in this worker: %s", error)
            self.reason_off = error.reason
            return
        try:
            self._parts = describe_layers(self._form, self._layers, self._rank)
            if self._rank.stages > 1:
                self._stored = dataclasses.replace(self._stored, layers=layers_in(self._form, self._layers))
        except (ValueError, KeyError) as error:
            log.warning("prefixcache is off in this worker: %s", error)
            self.reason_off = "layers_mismatch"
            return
        self.reason_off = ""

    def load(self, orders: StepOrders, *, now: bool) -> None:
        """Begin the step's loads; `now`: do them before this returns."""
        for order in orders.loads:
            namespace = self._namespace(order.fingerprint, orders.namespaces)
            fence = Fence.here(self._any_tensor())
            work = self._load_work(order, namespace, fence)
            if now:
                if not self._transfers.load_now(work).ok:
                    self._bad_pages |= _pages_of(order)
                    self._lost.add(order.request_id)
                    self._spoilt_steps = 1 + self._rank.stages  # at most one step more is under way than has stages
            else:
                self._loading[order.request_id] = order
                self._transfers.load(order.request_id, work)

    def save(self, orders: StepOrders) -> None:
        """Begin the step's saves, after its forward pass."""
        spoilt, self._spoilt_steps = self._spoilt_steps > 0, max(0, self._spoilt_steps - 1)
        for order in orders.saves:
            namespace = self._namespace(order.fingerprint, orders.namespaces)
            if spoilt:
                self._transfers.not_saved(order.end_block - order.first_block, LOAD_FAILED)
                self._give_up(order, namespace)
                continue
            source = _Source(self._parts, order.pages)
            if self._staging and not self.reason_off:
                source = self._staged(order)
            work = self._save_work(order, namespace, source, Fence.here(self._any_tensor()))
            blocks = order.end_block - order.first_block
            if not self._transfers.save(order.request_id, blocks, work, order.number):
                self._give_up(order, namespace)
        self._closing |= orders.closing

    def let_go(self, orders: StepOrders) -> None:
        """Before the forward pass: pages of leaving requests get other owners in it."""
        for request_id in orders.leaving:
            self._transfers.let_go(request_id)

    def ended(self) -> Ended:
        """What the engine is to be told after this step."""
        ended = Ended(bad_pages=self._bad_pages, lost=self._lost)
        self._bad_pages, self._lost = set(), set()
        for request_id, result in self._transfers.ended():
            self._note_load(request_id, result, ended)
        ended.saved = {request_id for request_id in self._closing if not self._transfers.saving(request_id)}
        self._closing -= ended.saved
        return ended

    def numbers(self) -> Numbers:
        """What was moved since the last call."""
        return worker_numbers(self._transfers.take_counts(), self._engine.identity.block_tokens)

    def close(self) -> None:
        """Finish what is under way, and go."""
        self._transfers.close(timeout_s=2.0)
        self._client.close()

    def _load_work(self, order: LoadOrder, namespace: Namespace, fence: Fence) -> Load:
        def work() -> CopyResult:
            if self.reason_off:
                return CopyResult(ok=False, tokens=0, size_bytes=0, reason=self.reason_off)
            span = PagedSpan(self._parts, order.pages, order.from_token, order.to_token, partial=True)
            with fence.after():
                return self._client.copy_by_ticket(namespace, order.ticket, span)

        return work

    def _save_work(self, order: SaveOrder, namespace: Namespace, source: _Source, fence: Fence) -> Save:
        size = namespace.block_tokens
        first, end = order.first_block * size, order.end_block * size

        def work(task: SaveTask) -> StoreResult:
            if not self._stored.writes(0):
                return StoreResult(0, 0, 0, {})
            if self.reason_off:
                self._give_up(order, namespace)
                return StoreResult(0, 0, 0, {self.reason_off: task.blocks}, self.reason_off)
            keys = PromptKeys(order.keys, end)
            span = PagedSpan(source.parts, source.pages, first, end, hold=task.hold)
            with fence.after():
                if self._rank.alone:
                    return self._client.store(namespace, keys, span, from_token=first)
                portion = dataclasses.replace(self._stored, ticket=order.ticket)
                return self._client.store_portion(namespace, keys, span, portion, first)

        return work

    def _staged(self, order: SaveOrder) -> _Source:
        """The same pages in memory of our own, copied here and now: windows give theirs away before the next step."""
        ids = [torch.tensor([page for page in run.ids if page != NULL_PAGE], dtype=torch.long) for run in order.pages]
        layers = {}
        for number, layer in self._layers.items():
            views: list[View] = []
            for tensor, axes, holds in layer.views:
                at = axes.index("b")
                blank = torch.empty_like(tensor.narrow(at, 0, 1))
                copied = tensor.index_select(at, ids[layer.group].to(tensor.device))
                views.append((torch.cat((blank, copied), at), axes, holds))
            layers[number] = LayerPages(views, layer.group, layer.page_tokens)
        parts = describe_layers(self._form, layers, self._rank)
        return _Source(parts, tuple(_renumbered(run) for run in order.pages))

    def _note_load(self, request_id: str, result: CopyResult, ended: Ended) -> None:
        order = self._loading.pop(request_id)
        ended.arrived.add(request_id)
        if not result.ok:
            log.warning(
                "%s: a prefix of %d tokens was not loaded (%s)", self._engine.label, order.to_token, result.reason
            )
            ended.failed.add(request_id)
            ended.lost.add(request_id)
            if not self._tells_requests:
                ended.bad_pages |= _pages_of(order)

    def _namespace(self, fingerprint: bytes, known: Mapping[bytes, NamespaceIdentity]) -> Namespace:
        namespace = self._namespaces.get(fingerprint)
        if namespace is None:
            if len(self._namespaces) >= _MAX_NAMESPACES:  # every change of weights and every adapter is one more
                self._namespaces.clear()
            namespace = Namespace(known[fingerprint], label=self._engine.label)
            self._namespaces[fingerprint] = namespace
        return namespace

    def _give_up(self, order: SaveOrder, namespace: Namespace) -> None:
        """The other ranks need not wait for this one's heads."""
        if not self._rank.alone and self._stored.writes(0):
            self._client.give_up(namespace, order.ticket)

    def _any_tensor(self) -> torch.Tensor | None:
        return next((layer.views[0][0] for layer in self._layers.values()), None)


def _pages_of(order: LoadOrder) -> set[int]:
    return {page for run in order.pages for page in run.ids if page != NULL_PAGE}


def _renumbered(run: PageRun) -> PageRun:
    """Pages in the order they were copied in, behind a null page."""
    numbers = iter(range(1, len(run.ids) + 1))
    return PageRun(run.first, tuple(NULL_PAGE if page == NULL_PAGE else next(numbers) for page in run.ids))
