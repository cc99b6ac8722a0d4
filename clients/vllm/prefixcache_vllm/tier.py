"""`PrefixCacheTier`: a secondary tier of vLLM's own CPU offload, so that what leaves it is kept by the host's daemon.

What vLLM calls, in its scheduler's process; nothing is decided here (see spilling and chunks). Tiers from other
packages are there since vLLM 0.29; what versions do differently is found by looking.
"""

import dataclasses
import logging
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import LookupResult, OffloadingCounterMetadata, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from prefixcache_client import Client
from prefixcache_vllm.chunks import Engine, callers_configs, chained_groups, chunk_cache, tier_options
from prefixcache_vllm.identity import CannotShareError
from prefixcache_vllm.keyorder import in_prefix_order
from prefixcache_vllm.lanes import Outcome
from prefixcache_vllm.options import Options
from prefixcache_vllm.spilling import Spill

log = logging.getLogger("prefixcache_vllm")

CHUNKS: Final = "vllm:kv_offload_prefixcache_chunks"
_RESULTS: Final = {True: LookupResult.HIT, False: LookupResult.MISS, None: LookupResult.RETRY}


class PrefixCacheTier(SecondaryTierManager):  # type: ignore[misc] # no vLLM where types are checked
    """See docs/vllm.md."""

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **settings: Any,
    ) -> None:
        """Raises ValueError for settings that mean nothing. A daemon need not be there."""
        detector = () if backpressure_detector is None else (backpressure_detector,)  # old versions have none
        super().__init__(offloading_spec, primary_kv_view, tier_type, *detector)
        options = tier_options(settings)
        self._spill: Spill | None = None
        self._chained: frozenset[int] = frozenset()
        self._refused: list[int] = []
        self.reason_off = ""
        """Why nothing is kept; "" where it is."""
        try:
            self._spill = self._make(offloading_spec, primary_kv_view, options)
        except CannotShareError as error:
            self.reason_off = error.reason
            log.warning("the prefixcache tier is off: %s", error)

    def _make(self, spec: Any, view: memoryview, options: Options) -> Spill:
        engine = Engine(*callers_configs(), _build())
        rows = np.asarray(view).view(np.uint8)
        limits = options.limits(options.ask_timeout_s, f"vllm tier {spec.config.model.name}")
        client = Client(options.address or None, limits)
        cache = chunk_cache(client, engine, spec, rows.shape[1], options)
        self._chained = chained_groups(engine.kv_cache_config)
        return Spill(client, cache, rows, options)

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """See the base class."""
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """See the base class."""
        if self._spill is None:
            return LookupResult.MISS
        return _RESULTS[self._spill.lookups.lookup(key, req_context.req_id)]

    def submit_load(self, job_metadata: Any) -> None:
        """See the base class."""
        if self._spill is None:
            self._refused.append(job_metadata.job_id)
            return
        self._spill.load(job_metadata.job_id, list(job_metadata.keys), _rows(job_metadata))

    def submit_store(self, job_metadata: Any) -> None:
        """See the base class."""
        if self._spill is None:
            self._refused.append(job_metadata.job_id)
            return
        position = getattr(job_metadata.req_context, "get_offload_key_position", lambda _: None)
        keys, rows, parents = in_prefix_order(list(job_metadata.keys), _rows(job_metadata), position, self._chained)
        self._spill.store(job_metadata.job_id, keys, rows, parents)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """See the base class."""
        refused, self._refused = self._refused, []
        results = [JobResult(job_id=number, success=False) for number in refused]
        if self._spill is not None:
            results += [_result(outcome) for outcome in self._spill.finished()]
        return results

    def on_schedule_end(self, context: Any) -> None:
        """See the base class."""
        if self._spill is not None:
            self._spill.lookups.flush()

    def on_request_finished(self, req_context: Any) -> None:
        """See the base class."""
        if self._spill is not None:
            self._spill.lookups.finished(req_context.req_id)

    def drain_jobs(self) -> None:
        """See the base class. vLLM calls it when its caches are reset, which is when weights were changed in place:
        nothing that was stored before is found again by this engine."""
        if self._spill is not None:
            self._spill.reset()

    def shutdown(self) -> None:
        """See the base class."""
        spill, self._spill = self._spill, None
        if spill is not None:
            spill.close()

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """See the base class."""
        text = "Chunks by what the prefixcache tier did with them, and why not."
        return {CHUNKS: OffloadingCounterMetadata(documentation=text, labelnames=("result", "reason"))}

    def get_stats(self) -> OffloadingConnectorStats | None:
        """See the base class."""
        if self._spill is None:
            return None
        stats = OffloadingConnectorStats()
        for labels, chunks in self._spill.take_counts().items():
            if chunks:
                stats.increase_counter(CHUNKS, chunks, labels)
        return stats


def _rows(job: Any) -> npt.NDArray[np.int64]:
    """Where the job's chunks are in vLLM's buffer, one row for each key."""
    rows = job.chunk_ids if hasattr(job, "chunk_ids") else job.block_ids
    return np.asarray(rows, dtype=np.int64)


def _result(outcome: Outcome) -> JobResult:
    told = {
        "successful_keys": None if outcome.ok else tuple(outcome.done) or None,
        "transfer_time": outcome.seconds,
        "transfer_bytes": outcome.size_bytes,
    }
    known = {field.name for field in dataclasses.fields(JobResult)}
    more = {name: value for name, value in told.items() if name in known}
    return JobResult(job_id=outcome.job.number, success=outcome.ok, **more)


def _build() -> tuple[str, ...]:
    """What tells this build of vLLM on this machine from others that may pack pages in other ways."""
    capability = torch.backends.cpu.get_cpu_capability() if current_platform.is_cpu() else ""
    amx = str(getattr(torch.cpu, "_is_amx_tile_supported", bool)()) if current_platform.is_cpu() else ""
    return str(vllm.__version__), str(current_platform.get_device_name()), capability, amx
