"""`PrefixCacheConnector`: what vLLM calls. Each call is passed on to the side it belongs to; nothing is decided here.

vLLM makes one object in the scheduler's process and one in each worker's. What versions of vLLM do differently is found
by looking (a class or a method is there or not), never by version.
"""

import dataclasses
import logging
import sys
from collections.abc import Iterable
from typing import Any, Final

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from prefixcache_client import Client
from prefixcache_vllm.announcing import Announcements
from prefixcache_vllm.asking import DaemonAsker
from prefixcache_vllm.cost import ComputeCost
from prefixcache_vllm.draft_identity import DraftModel, draft_identity
from prefixcache_vllm.draft_worker import WithDraftWorker
from prefixcache_vllm.drafting import DRAFT_SHARE, DraftSide, WithDrafts, shares
from prefixcache_vllm.events import Confirmations, can_announce, event_of
from prefixcache_vllm.identity import CannotShareError, EngineIdentity, engine_identity
from prefixcache_vllm.options import Options, read_options
from prefixcache_vllm.orders import StepOrders
from prefixcache_vllm.packing import Packing, PageShape, UnknownFormError, cpu_packing
from prefixcache_vllm.ranks import Rank
from prefixcache_vllm.removals import Removals
from prefixcache_vllm.scheduler import NOTHING, SchedulerSide
from prefixcache_vllm.stats import PrefixCacheMetrics, PrefixCacheStats, metrics_page, stats_of
from prefixcache_vllm.worker import Ended, WorkerSide

log = logging.getLogger("prefixcache_vllm")

_RESULTS: Any = getattr(base, "KVConnectorTransferResults", None)
_HYBRID: Any = getattr(base, "SupportsHMA", object)
_SWITCH_S = 0.0005
_CANNOT_REPORT = "engine_cannot_report_failure"
_SAVES_FIRST = "engine_saves_before_drafts"


class PrefixCacheMetadata(base.KVConnectorMetadata):  # type: ignore[misc] # no vLLM where types are checked
    """A step's orders on their way to the workers."""

    def __init__(self, orders: StepOrders) -> None:
        self.orders = orders


_NO_ORDERS: Final = PrefixCacheMetadata(NOTHING)


class PrefixCacheConnector(base.KVConnectorBase_V1, _HYBRID):  # type: ignore[misc] # a base that old versions lack
    """See docs/vllm.md."""

    def __init__(self, vllm_config: Any, role: base.KVConnectorRole, kv_cache_config: Any = None) -> None:
        """Raises ValueError for settings that mean nothing. A daemon need not be there."""
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        options = read_options(transfer.kv_connector_extra_config)
        self._scheduler: SchedulerSide | None = None
        self._sides: SchedulerSide | WithDrafts | None = None
        self._worker: WorkerSide | None = None
        self._workers: WorkerSide | WithDraftWorker | None = None
        self._draft: DraftModel | None = None
        self._draft_packing: Packing = "plain"
        self._asker: DaemonAsker | None = None
        self._cost: ComputeCost | None = None
        self._removals: Removals | None = None
        self._ended: Ended | None = None
        self._unsaved: StepOrders | None = None
        self._late: StepOrders | None = None
        self._left_alone = 0
        self._packing: Packing = "plain"
        # Threads that copy or ask wait for the interpreter's lock, and an engine that waits for them never rests.
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
        self.reason_off = ""
        """Why nothing is cached; "" where it is."""
        if role is base.KVConnectorRole.SCHEDULER:
            # vLLM reads this after the connector is made; its default lets a request fail for a lost load.
            transfer.kv_load_failure_policy = "recompute"
        try:
            engine = self._identify(vllm_config, kv_cache_config, options)
        except CannotShareError as error:
            self.reason_off = error.reason
            log.warning("prefixcache is off: %s", error)
            return
        limits = options.limits(options.ask_timeout_s, f"vllm {engine.label}")
        client = Client(options.address or None, limits)
        if role is base.KVConnectorRole.SCHEDULER:
            self._schedule(vllm_config, engine, options, client)
        else:
            self._work(vllm_config, engine, options, client)

    def _schedule(self, vllm_config: Any, engine: EngineIdentity, options: Options, client: Client) -> None:
        transfer, draft = vllm_config.kv_transfer_config, self._draft
        directions = {"loads": transfer.is_kv_consumer, "saves": transfer.is_kv_producer}
        self._now = engine.loads_in_step(options)
        self._cost = None if options.recompute_s_per_token else ComputeCost()
        asker = self._asker = DaemonAsker(client, options.ask_timeout_s, options.load_timeout_s, self._cost)
        self._client = client
        if draft is None:
            self._sides = self._scheduler = SchedulerSide(engine, options, asker, **directions)
        else:
            ours, drafts = shares(options, engine, draft.engine)
            self._scheduler = SchedulerSide(engine, ours, asker, **directions)
            side = DraftSide(draft, drafts, asker, **directions)
            self._sides = WithDrafts(self._scheduler, side, DRAFT_SHARE * options.ask_timeout_s)
        events = getattr(vllm_config, "kv_events_config", None)
        if getattr(events, "enable_kv_cache_events", False) and can_announce():
            self._scheduler.announcements = Announcements()
            self._removals = Removals(client.watch)

    def _work(self, vllm_config: Any, engine: EngineIdentity, options: Options, client: Client) -> None:
        rank, queue = _rank(vllm_config.parallel_config), options.save_queue
        self._now = engine.loads_in_step(options)
        self._workers = self._worker = WorkerSide(client, engine, rank, queue, tells_requests=_RESULTS is not None)
        if self._draft is not None:
            draft = WorkerSide(client, self._draft.engine, rank, queue, tells_requests=True)
            self._workers = WithDraftWorker(self._worker, draft, self._draft_packing)

    def _identify(self, vllm_config: Any, kv_cache_config: Any, options: Options) -> EngineIdentity:
        engine = engine_identity(vllm_config, kv_cache_config, options)
        if len(engine.groups) > 1 and _RESULTS is None:
            raise CannotShareError(_CANNOT_REPORT, "this vLLM cannot be told that a load of several groups failed")
        dtype, kept_as = vllm_config.model_config.dtype, str(vllm_config.cache_config.cache_dtype)
        self._packing = _packing(vllm_config, engine, dtype, kept_as)
        if not engine.draft_layers:
            return engine
        try:
            self._find_draft(vllm_config, kv_cache_config, options, engine)
        except CannotShareError as error:
            log.warning("the draft model's KV is not kept: %s", error)
            return dataclasses.replace(engine, draft_off=error.reason)
        return engine

    def _find_draft(self, vllm_config: Any, kv_cache_config: Any, options: Options, main: EngineIdentity) -> None:
        draft = draft_identity(vllm_config, kv_cache_config, options)
        # Its loads happen where the model's do.
        engine = dataclasses.replace(draft.engine, silent_ranks=main.silent_ranks)
        draft = dataclasses.replace(draft, engine=engine)
        if not (can_announce() and _saves_after_drafts()):
            raise CannotShareError(_SAVES_FIRST, "this vLLM has a step saved before its draft model computed it")
        self._draft_packing = _packing(vllm_config, draft.engine, draft.dtype, draft.cache_dtype)
        self._draft = draft

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """See the base class."""
        if self._workers is not None:
            self._workers.register(kv_caches, self._packing)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """See the base class. Old versions call nothing else before a step that gives pages away."""
        super().bind_connector_metadata(connector_metadata)
        self._unsaved = self._late = _orders(connector_metadata)
        self.handle_preemptions(connector_metadata)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """See the base class."""
        if self._workers is not None:
            self._workers.let_go(_orders(kv_connector_metadata))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """See the base class."""
        if self._workers is not None:
            self._workers.load(_orders(self._get_connector_metadata()), now=self._now)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads are either over or of requests that do not run."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: all layers are saved at once, after the forward pass."""

    def wait_for_save(self) -> None:
        """See the base class. With a draft model it is called when that has computed the step's tokens too."""
        self._save()
        late, self._late = self._late, None
        if isinstance(self._workers, WithDraftWorker) and late is not None:
            self._workers.save_late(late)

    def _save(self) -> None:
        unsaved, self._unsaved = self._unsaved, None
        if self._workers is not None and unsaved is not None:
            self._workers.save(unsaved)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """See the base class."""
        if self._workers is None:
            return None, None
        self._save()  # versions up to 0.29 leave wait_for_save out in a step that computes nothing
        self._ended = self._workers.ended()
        return self._ended.saved, self._ended.arrived

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """See the base class."""
        saved, arrived = self.get_finished(finished_req_ids)
        failed = self._ended.failed if self._ended is not None else set()
        return _RESULTS(finished_sending=saved or set(), finished_recving=arrived or set(), failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See the base class."""
        return set() if self._ended is None else self._ended.bad_pages

    def get_kv_connector_kv_cache_events(self) -> Any:
        """See the base class."""
        numbers = self._worker.transfers.take_visible() if self._worker is not None else []
        without_draft = set() if self._ended is None else self._ended.without_draft
        return Confirmations(numbers, without_draft) if (numbers or without_draft) and can_announce() else None

    # The scheduler's side.

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: a save that is lost costs time, not a request."""
        return False

    def on_new_request(self, request: Any) -> None:
        """See the base class."""
        if self._sides is not None:
            self._sides.arrived(request)
        else:
            self._left_alone += 1

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See the base class."""
        return (0, False) if self._sides is None else self._sides.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See the base class."""
        if self._sides is not None:
            self._sides.placed(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> PrefixCacheMetadata:
        """See the base class."""
        orders = NOTHING if self._sides is None else self._sides.step(scheduler_output)
        if self._cost is not None:
            loads_in_it = self._now and bool(orders.loads)
            self._cost.begins(scheduler_output.num_scheduled_tokens, only_computes=not loads_in_it)
        return _NO_ORDERS if orders is NOTHING else PrefixCacheMetadata(orders)

    def update_connector_output(self, connector_output: Any) -> None:
        """See the base class."""
        if self._scheduler is None:
            return
        arrived = connector_output.finished_recving or ()
        failed = getattr(connector_output, "failed_recving", None) or ()
        bad_pages = getattr(connector_output, "invalid_block_ids", None) or ()
        told = getattr(connector_output, "kv_cache_events", None)
        confirmed = told if isinstance(told, Confirmations) else None
        if isinstance(self._sides, WithDrafts):
            without_draft = confirmed.without_draft() if confirmed is not None else ()
            self._sides.loaded(arrived, failed, bad_pages, without_draft)
        else:
            self._scheduler.loaded(arrived, failed, bad_pages)
        if self._scheduler.announcements is not None and confirmed is not None:
            self._scheduler.announcements.confirmed(confirmed.saves())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See the base class."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See SupportsHMA."""
        keep = self._sides is not None and self._sides.finished(request, block_ids)
        return keep, None

    def reset_cache(self) -> bool | None:
        """Nothing that was stored before is found again by this engine."""
        if self._sides is not None:
            self._sides.reset()
        return True

    def take_events(self) -> Iterable[Any]:
        """See the base class. Called when a step is over."""
        if self._cost is not None:
            self._cost.ends()
        side = self._scheduler
        if side is None or side.announcements is None:
            return []
        if self._removals is not None:
            self._removals.follow(side.fingerprints())
            self._removals.tell(side.announcements)
        return map(event_of, side.announcements.take())

    # Both sides.

    def get_kv_connector_stats(self) -> PrefixCacheStats | None:
        """See the base class."""
        side = self._workers or self._sides
        if side is not None:
            numbers = side.numbers()
        else:
            left_alone, self._left_alone = self._left_alone, 0
            numbers = {f"left_alone.{self.reason_off}": left_alone} if left_alone else {}
        return PrefixCacheStats(data=numbers) if numbers else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PrefixCacheStats | None:
        """See the base class."""
        return stats_of(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PrefixCacheMetrics | None:
        """See the base class."""
        return metrics_page(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """See the base class."""
        if self._workers is not None:
            self._workers.close()
        if self._removals is not None:
            self._removals.close()
        if self._scheduler is not None:
            self._scheduler.close()
        if self._asker is not None:
            self._asker.close()
            self._client.close()


def _orders(metadata: Any) -> StepOrders:
    assert isinstance(metadata, PrefixCacheMetadata)
    return metadata.orders


def _saves_after_drafts() -> bool:
    """Whether this vLLM calls `wait_for_save` when the draft model has run."""
    from vllm.v1.worker import kv_connector_model_runner_mixin as runner

    return hasattr(runner.KVConnectorModelRunnerMixin, "finalize_kv_connector")


def _packing(vllm_config: Any, engine: EngineIdentity, dtype: torch.dtype, kept_as: str) -> Packing:
    """How pages of one of the engine's models are kept. Raises CannotShareError."""
    if str(vllm_config.device_config.device_type) != "cpu":
        return "plain"
    try:
        return cpu_packing(dtype, _page_shapes(engine), kept_as, engine.identity.block_tokens)
    except UnknownFormError as error:
        raise CannotShareError(error.reason, str(error)) from error


def _page_shapes(engine: EngineIdentity) -> set[PageShape]:
    """What pages of one head hold, in every KV cache group."""
    groups = {layer: group for group in engine.identity.layout.groups for layer in group.layers}
    return {
        PageShape(1, pages.page_tokens, groups[layer].k_dim, groups[layer].v_dim)
        for pages in engine.groups
        for layer in pages.layers.values()
    }


def _rank(parallel: Any) -> Rank:
    from vllm import distributed

    number, stages = distributed.get_tensor_model_parallel_rank(), int(getattr(parallel, "pipeline_parallel_size", 1))
    stage = distributed.get_pp_group().rank_in_group if stages > 1 else 0
    return Rank(int(number), int(parallel.tensor_parallel_size), int(stage), stages)
