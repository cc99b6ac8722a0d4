"""A real daemon in this process, and backends of it over SGLang's stand-ins."""

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from prefixcache.server.app import Daemon
from tests.contract.conftest import start_daemon, stop_daemon
from tests.unit.sglang_adapter import stub_sglang

MakeBackend = Callable[..., Any]
_serial = itertools.count()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One for a file's tests; each has a checkpoint of its own, so none sees another's pages."""
    running = start_daemon(tmp_path_factory.mktemp("daemon"), host_bytes="32MiB")
    yield running
    stop_daemon(running)


def write_checkpoint(folder: Path, value: float) -> Path:
    """Weights and a config."""
    folder.mkdir(exist_ok=True)
    save_file({"model.weight": torch.full((4, 4), value)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", float(next(_serial)))


@pytest.fixture
def settings(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The server arguments of the engine in this process."""
    import sys
    from types import ModuleType

    stub_sglang.install(monkeypatch)
    told = SimpleNamespace(model_path=str(checkpoint), revision=None, load_format="auto", kv_cache_dtype="auto")
    context: Any = ModuleType("sglang.srt.runtime_context")
    context.get_server_args = lambda: told
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    return told


@pytest.fixture
def make(daemon: Daemon, settings: SimpleNamespace) -> Iterator[MakeBackend]:
    """make(pool, **config): a backend with its main pool; `extra`: more of the extra config."""
    from prefixcache_sglang.storage import PrefixCacheStorage

    made: list[Any] = []

    def build(pool: Any = None, extra: dict[str, Any] | None = None, **config: Any) -> Any:
        said = {"interface_v1": 1, "prefixcache.address": f"unix://{daemon.config.socket}", **(extra or {})}
        said.setdefault("prefixcache.ask_timeout_s", 5.0)
        said.setdefault("prefixcache.store_timeout_s", 5.0)
        backend = PrefixCacheStorage(stub_sglang.Config(extra_config=said, **config), {})
        if pool is not None:
            backend.register_mem_pool_host(pool)
        made.append(backend)
        return backend

    yield build
    for backend in made:
        backend.close()
