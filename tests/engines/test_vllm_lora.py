"""One vLLM with several LoRA adapters: requests share blocks with those of the same adapter's bytes and no other."""

import shutil
from pathlib import Path

from tests.e2e.processes import DaemonProcess
from tests.engines import models
from tests.engines.conftest import Checkpoints
from tests.engines.test_vllm import prompt
from tests.engines.vllm_engine import Engine, Output

LONG = prompt(31, 700)


def test_adapters_separate(shared_daemon: DaemonProcess, checkpoints: Checkpoints, tmp_path: Path) -> None:
    one, other, copy = (str(tmp_path / name) for name in ("one", "other", "copy"))
    models.make_lora(Path(one), 1)
    models.make_lora(Path(other), 2)
    shutil.copytree(one, copy)
    settings = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8, "connector": {"ask_timeout_s": 5.0}}
    with Engine(checkpoints("llama"), f"unix://{shared_daemon.socket}", log=tmp_path / "log", **settings) as engine:
        said = {}
        for adapter in (None, one, other):
            computed = _ask(engine, adapter)
            assert computed.cached == 0, adapter
            engine.call("settle")
            said[adapter] = computed.tokens
        assert len({tuple(tokens) for tokens in said.values()}) == 3
        for adapter in (None, one, other):
            loaded = _ask(engine, adapter)
            assert (loaded.cached, loaded.tokens) == (640, said[adapter])
        loaded = _ask(engine, copy)
        assert (loaded.cached, loaded.tokens) == (640, said[one]), "an adapter is its bytes, not its name"


def _ask(engine: Engine, adapter: str | None) -> Output:
    return engine.one(LONG, lora=None if adapter is None else {"lora_path": adapter})
