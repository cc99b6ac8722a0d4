"""Stand-ins for the classes of vLLM that the connector derives from: of a new version, and of one from before
KVConnectorTransferResults, handle_preemptions, KVConnectorKVEvents and saving after a draft model has run. Enough to
make connectors, no more."""

import enum
import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
from prometheus_client import Counter, Histogram

_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
_RUNNER = "vllm.v1.worker.kv_connector_model_runner_mixin"
_OURS = ("connector", "events", "stats")


def install(monkeypatch: pytest.MonkeyPatch, *, new: bool) -> None:
    """Put the modules in place of vLLM's, and have ours imported anew."""
    modules = {name: ModuleType(name) for path in (_V1, _RUNNER) for name in _parents(path)}
    runner = type("KVConnectorModelRunnerMixin", (), {"finalize_kv_connector": None} if new else {})
    modules[_RUNNER] = _module(_RUNNER, KVConnectorModelRunnerMixin=runner)
    modules[f"{_V1}.base"] = _base(new=new)
    modules[f"{_V1}.metrics"] = _module(f"{_V1}.metrics", KVConnectorStats=_Stats)
    if new:
        modules[f"{_V1}.metrics"].KVConnectorPromMetrics = _Page  # type: ignore[attr-defined] # a module
    events = _module(
        "vllm.distributed.kv_events", BlockStored=_BlockStored, BlockRemoved=_BlockRemoved, AllBlocksCleared=_AllCleared
    )
    if new:
        events.KVConnectorKVEvents = type("KVConnectorKVEvents", (), {})  # type: ignore[attr-defined] # a module
    modules["vllm.distributed.kv_events"] = events
    modules["vllm.distributed"].get_tensor_model_parallel_rank = lambda: 0  # type: ignore[attr-defined] # a module
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(modules[parent], own, module)
    for name in _OURS:
        monkeypatch.delitem(sys.modules, f"prefixcache_vllm.{name}", raising=False)


@dataclass
class _Stats:
    data: dict[str, Any] = field(default_factory=dict)


class _Page:
    def __init__(self, vllm_config: Any, metric_types: Any, labels: list[str], engines: Any) -> None:
        self._counter_cls = metric_types[Counter]
        self._histogram_cls = metric_types[Histogram]


class _BlockStored:
    __struct_fields__ = ("block_hashes", "parent_block_hash", "token_ids", "block_size")

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


class _BlockRemoved:
    def __init__(self, block_hashes: list[bytes], medium: str) -> None:
        self.block_hashes, self.medium = block_hashes, medium


class _AllCleared:
    pass


@dataclass
class _Results:
    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


class _Role(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class _Connector:
    def __init__(self, vllm_config: Any, role: _Role, kv_cache_config: Any = None) -> None:
        self._metadata: Any = None

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self._metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        self._metadata = None

    def _get_connector_metadata(self) -> Any:
        return self._metadata


def _base(*, new: bool) -> ModuleType:
    made = _module(
        f"{_V1}.base",
        KVConnectorBase_V1=_Connector,
        KVConnectorRole=_Role,
        KVConnectorMetadata=type("KVConnectorMetadata", (), {}),
        SupportsHMA=type("SupportsHMA", (), {}),
    )
    if new:
        made.KVConnectorTransferResults = _Results  # type: ignore[attr-defined] # a module
    return made


def _module(name: str, **content: Any) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(content)
    return made


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]
