"""Stand-ins for the classes of vLLM's tiered offload that the tier derives from or answers. Enough to make tiers."""

import enum
import sys
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.vllm_adapter.stub_vllm import _module, _parents

_OFFLOAD = "vllm.v1.kv_offload"
_METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics"


class LookupResult(enum.Enum):
    """As vLLM's."""

    MISS = 1
    HIT = 2
    HIT_PENDING = 3
    RETRY = 4


@dataclass
class OldJobResult:
    """As that of 0.29."""

    job_id: int
    success: bool
    successful_keys: Any = None
    transfer_time: float | None = None


@dataclass
class JobResult:
    """As vLLM's."""

    job_id: int
    success: bool
    successful_keys: Any = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


class _Tier:
    def __init__(self, spec: Any, view: memoryview, tier_type: str, detector: Any = None) -> None:
        self.tier_type = tier_type


class _OldTier:
    def __init__(self, spec: Any, view: memoryview, tier_type: str) -> None:
        self.tier_type = tier_type


class _Stats:
    def __init__(self) -> None:
        self.counters: Counter[tuple[str, tuple[str, ...]]] = Counter()

    def increase_counter(self, name: str, value: int, labelvalues: tuple[str, ...] = ()) -> None:
        self.counters[name, labelvalues] += value


def install(monkeypatch: pytest.MonkeyPatch, *, new: bool = True) -> None:
    """Put the modules in place of vLLM's, and have ours imported anew."""
    from types import ModuleType

    base = _module(
        f"{_OFFLOAD}.base",
        LookupResult=LookupResult,
        OffloadingCounterMetadata=SimpleNamespace,
        RequestOffloadingContext=SimpleNamespace,
    )
    tiering = _module(
        f"{_OFFLOAD}.tiering.base",
        JobResult=JobResult if new else OldJobResult,
        SecondaryTierManager=_Tier if new else _OldTier,
    )
    platform = SimpleNamespace(is_cpu=lambda: True, get_device_name=lambda: "cpu")
    modules = {
        name: ModuleType(name) for path in (_OFFLOAD, f"{_OFFLOAD}.tiering", _METRICS) for name in _parents(path)
    }
    modules |= {
        f"{_OFFLOAD}.base": base,
        f"{_OFFLOAD}.tiering.base": tiering,
        _METRICS: _module(_METRICS, OffloadingConnectorStats=_Stats),
        "vllm.platforms": _module("vllm.platforms", current_platform=platform),
    }
    modules["vllm"].__dict__["__version__"] = "0.0"
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(modules[parent], own, module)
    monkeypatch.delitem(sys.modules, "prefixcache_vllm.tier", raising=False)
