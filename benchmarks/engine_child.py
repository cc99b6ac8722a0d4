"""One vLLM in a process of its own for `engines.py`: started, told what to do line by line, timed inside.

Times are taken in the child, so that pipes do not count. The child is this file run as a program.
"""

import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final, Self

VOCABULARY: Final = 4096
_OFFLINE: Final = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "0-1",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip
# Layers, hidden size, attention heads, KV heads, head size: 1.5, 8 and 64 KiB of KV a token in bfloat16.
_SHAPES: Final = {"tiny": (3, 256, 4, 2, 64), "mid": (8, 1024, 16, 4, 64), "heavy": (8, 512, 16, 16, 128)}
_WARM_UP: Final = 300
_CALIBRATION: Final = 501
_REST_S: Final = 0.001


def make_model(kind: str, folder: Path) -> Path:
    """A checkpoint with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, hidden, heads, kv_heads, size = _SHAPES[kind]
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=size, max_position_embeddings=16384,
        tie_word_embeddings=False, initializer_range=0.08,
    )  # fmt: skip
    torch.manual_seed(1)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


class Child:
    """An engine; use it in a `with`. `settings`: of vllm.LLM."""

    def __init__(
        self, model: Path, address: str | None, *, connector: dict[str, Any] | None = None, profile: bool = False,
        python: str = sys.executable, **settings: Any,
    ) -> None:  # fmt: skip
        """`address`: of the daemon; None for an engine without our connector. `python`: of its environment."""
        told = {"model": str(model), "address": address, "connector": connector or {}, "settings": settings}
        ours, theirs = os.pipe()
        command = [python, __file__, str(theirs), json.dumps(told | {"profile": profile})]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=[theirs],
            env=os.environ | _OFFLINE,
        )  # fmt: skip
        os.close(theirs)
        self._answers = os.fdopen(ours)
        self.connector_start_s = float(self._answer())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._answers.close()

    def warm_up(self) -> None:
        """The first requests make kernels; the daemon is found."""
        for length in (_WARM_UP, 2 * _WARM_UP, _WARM_UP):
            self.request_s([length] * length, max_tokens=4)

    def request_s(self, *prompts: list[int], max_tokens: int) -> float:
        """Seconds of requests one behind the other, from the first one's arrival to the last one's last token. What the
        last one stores is not waited for, what those in front of it store happens meanwhile."""
        return float(self._call("request", prompts, max_tokens))

    def first_token_s(self, prompt: list[int]) -> float:
        """Seconds to the first token."""
        return self.request_s(prompt, max_tokens=1)

    def first_token_beside_s(self, prompt: list[int]) -> float:
        """Seconds to the first token while another request decodes."""
        return float(self._call("beside", prompt))

    def settle(self) -> None:
        """Wait until everything is stored."""
        self._call("settle")

    def forget_own_cache(self) -> None:
        """Empty vLLM's own prefix cache."""
        self._call("forget")

    def profile(self) -> dict[str, float]:
        """CPU time of the engine's thread in the connector since the warm-up: see _Profile."""
        return dict(self._call("profile"))

    def _call(self, name: str, *arguments: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, arguments]).encode() + b"\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        line = self._answers.readline()
        if not line:
            raise RuntimeError(f"the engine ended with {self._process.wait()}")
        return json.loads(line)


class _Profile:
    """CPU seconds of the engine's thread inside the connector's methods, by side."""

    SCHEDULER = (
        "on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta",
        "update_connector_output", "request_finished_all_groups", "take_events",
    )  # fmt: skip
    WORKER = ("handle_preemptions", "start_load_kv", "wait_for_save", "get_transfer_results")
    BOTH = "get_kv_connector_stats"

    def __init__(self, kind: type) -> None:
        self.seconds = {"scheduler": 0.0, "worker": 0.0}
        self.by_request: list[float] = []
        # Reading the clock is a system call, on some machines as dear as what is timed.
        reads = [time.thread_time() for _ in range(_CALIBRATION)]
        self.cost = statistics.median(after - before for before, after in itertools.pairwise(reads))
        self.began = time.thread_time()
        for side, names in (("scheduler", self.SCHEDULER), ("worker", self.WORKER)):
            for name in names:
                self._wrap(kind, name, side)
        self._wrap(kind, self.BOTH, None)

    def _wrap(self, kind: type, name: str, side: str | None) -> None:
        original = getattr(kind, name)

        def timed(connector: Any, *arguments: Any, **more: Any) -> Any:
            charged = side or ("worker" if connector._scheduler is None else "scheduler")
            before = time.thread_time()
            try:
                return original(connector, *arguments, **more)
            finally:
                self.seconds[charged] += max(0.0, time.thread_time() - before - self.cost)

        setattr(kind, name, timed)

    def figures(self) -> dict[str, float]:
        """`share` of the thread's CPU time, and microseconds a request on the scheduler's side."""
        ordered = sorted(self.by_request)
        share = sum(self.seconds.values()) / (time.thread_time() - self.began)
        return {
            "share": share,
            "scheduler_us_p99": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] * 1e6,
            "scheduler_us_p50": statistics.median(ordered) * 1e6,
        }


class _Engine:
    """What the child does."""

    def __init__(self, told: dict[str, Any]) -> None:
        from vllm import LLM

        settings: dict[str, Any] = {
            "skip_tokenizer_init": True, "enforce_eager": True, "distributed_executor_backend": "uni",
            "enable_prefix_caching": False, "max_model_len": 8704, "max_num_batched_tokens": 8704,
        }  # fmt: skip
        self.profile: _Profile | None = None
        self.connector_start_s = 0.0
        if told["address"] is not None:
            self._watch(profile=told["profile"])
            extra = {f"prefixcache.{name}": value for name, value in told["connector"].items()}
            settings["kv_transfer_config"] = {
                "kv_connector": "PrefixCacheConnector",
                "kv_connector_module_path": "prefixcache_vllm",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"prefixcache.address": told["address"], **extra},
            }
        self.llm = LLM(model=told["model"], **(settings | told["settings"]))
        self.engine = self.llm.llm_engine
        self.number = 0
        self._rest_between_empty_steps()

    def _watch(self, *, profile: bool) -> None:
        """Time the import and the making of the connectors, which is all that an engine's start gets longer by."""
        began = time.monotonic()
        from prefixcache_vllm import PrefixCacheConnector

        self.connector_start_s += time.monotonic() - began
        original = PrefixCacheConnector.__init__

        @functools.wraps(original)  # vLLM looks at the signature
        def timed(connector: Any, *arguments: Any) -> None:
            before = time.monotonic()
            original(connector, *arguments)
            self.connector_start_s += time.monotonic() - before

        PrefixCacheConnector.__init__ = timed
        if profile:
            self.profile = _Profile(PrefixCacheConnector)

    def _rest_between_empty_steps(self) -> None:
        """A server's engine process sleeps for a millisecond after a step that had nothing to run; this one, in the
        caller's process, would step on, and every step asks the connector."""
        core = self.engine.engine_core.engine_core
        original = core.post_step

        def rest(*executed: bool, **named: bool) -> None:
            original(*executed, **named)
            if not any((*executed, *named.values())) and core.scheduler.has_requests():
                time.sleep(_REST_S)

        core.post_step = rest

    def add(self, prompt: list[int], max_tokens: int) -> str:
        from vllm import SamplingParams

        self.number += 1
        parameters = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        self.engine.add_request(str(self.number), {"prompt_token_ids": prompt}, parameters)
        return str(self.number)

    def until_first_token(self, name: str) -> None:
        while not any(out.request_id.split("-")[0] == name and out.outputs[0].token_ids for out in self.engine.step()):
            pass

    def request(self, prompts: list[list[int]], max_tokens: int) -> float:
        before = self.profile.seconds["scheduler"] if self.profile else 0.0
        began = time.perf_counter()
        for prompt in prompts:
            self.add(prompt, max_tokens)
            while self.engine.has_unfinished_requests():
                self.engine.step()
        took = time.perf_counter() - began
        self.settle()
        if self.profile and max_tokens == 1:
            self.profile.by_request.append(self.profile.seconds["scheduler"] - before)
        return took

    def beside(self, prompt: list[int]) -> float:
        self.until_first_token(self.add([7] * 64, 4000))
        began = time.perf_counter()
        self.until_first_token(self.add(prompt, 1))
        took = time.perf_counter() - began
        self.engine.abort_request([str(self.number - 1)])
        self.settle()
        return took

    def settle(self) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        core = self.engine.engine_core.engine_core
        while core.scheduler.has_requests():
            _, executed = core.step_fn()
            core.post_step(executed)
        worker = getattr(get_kv_transfer_group(), "_worker", None) if has_kv_transfer_group() else None
        while worker is not None and worker.transfers.busy:
            time.sleep(0.001)

    def forget(self) -> None:
        self.llm.reset_prefix_cache()

    def figures(self) -> dict[str, float]:
        assert self.profile is not None
        return self.profile.figures()


def main() -> None:
    """The child: until stdin ends."""
    answers = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    engine = _Engine(json.loads(sys.argv[2]))
    print(json.dumps(engine.connector_start_s), file=answers)
    calls = {name: getattr(engine, name) for name in ("request", "beside", "settle", "forget")}
    calls["profile"] = engine.figures
    for line in sys.stdin:
        name, arguments = json.loads(line)
        print(json.dumps(calls[name](*arguments)), file=answers)
    engine.engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
