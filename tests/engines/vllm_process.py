"""The process behind `vllm_engine.Engine`: one engine, and calls of functions of `scenarios` read from stdin."""

import importlib
import json
import os
import sys
import time
import traceback
from typing import Any


def main() -> None:
    """Until stdin ends."""
    began = time.monotonic()
    answers = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    request = json.loads(sys.argv[2])
    try:
        llm = engine(request)
    except Exception as error:
        traceback.print_exc()
        print(json.dumps(["error", repr(error)]), file=answers)
        raise
    print(json.dumps(["ok", time.monotonic() - began]), file=answers)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            print(json.dumps(["ok", _scenario(name)(llm, **arguments)]), file=answers)
        except Exception as error:  # noqa: BLE001 # the test wants to know whatever it is
            traceback.print_exc()
            print(json.dumps(["error", repr(error)]), file=answers)
    llm.llm_engine.engine_core.shutdown()


def _scenario(name: str) -> Any:
    """A function of `scenarios`, or, named "module:function", of another such module."""
    module, _, function = name.rpartition(":")
    return getattr(importlib.import_module(f"tests.engines.{module or 'scenarios'}"), function)


def engine(request: dict[str, Any]) -> Any:
    """The LLM that was asked for."""
    from vllm import LLM

    settings: dict[str, Any] = {
        "skip_tokenizer_init": True, "enforce_eager": True, "distributed_executor_backend": "uni",
        "enable_prefix_caching": False, "block_size": 32, "max_model_len": 4096,
    }  # fmt: skip
    if request["address"] is not None:
        connector = {f"prefixcache.{name}": value for name, value in request["connector"].items()}
        settings["kv_transfer_config"] = {
            "kv_connector": "PrefixCacheConnector",
            "kv_connector_module_path": "prefixcache_vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"prefixcache.address": request["address"], **connector},
        }
    if "kv_events_config" in request["settings"]:
        from vllm.config import KVEventsConfig

        request["settings"]["kv_events_config"] = KVEventsConfig(**request["settings"]["kv_events_config"])
    return LLM(model=request["model"], **(settings | request["settings"]))


if __name__ == "__main__":
    main()
