"""The connector in a vLLM whose binaries cannot run here: its own scheduler, KV cache manager and connector lifecycle,
and a model of a few lines in place of the kernels. Run as a program with that version first in PYTHONPATH:
oldest.py MODEL ADDRESS, prints one JSON object.

The model keeps in every page what a token's KV depends on, a number made of all tokens up to it, and reads it back
before it says the next token, so a page with wrong bytes is noticed and changes the output.
"""

import json
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

PAGE_TOKENS, LAYERS, HEADS, DIM = 32, 3, 2, 64
MODULUS = 251  # what bfloat16 holds exactly
WAIT_S = 60.0


def config_of(model: str, address: str, pages: int) -> Any:
    """vLLM's own config objects, for a device that nothing runs on."""
    from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig

    model_config = ModelConfig(model=model, skip_tokenizer_init=True, max_model_len=1024, dtype="bfloat16")
    cache = CacheConfig(block_size=PAGE_TOKENS, enable_prefix_caching=False)
    cache.num_gpu_blocks = pages
    transfer = KVTransferConfig(
        kv_connector="PrefixCacheConnector", kv_connector_module_path="prefixcache_vllm", kv_role="kv_both",
        kv_connector_extra_config={"prefixcache.address": address},
    )  # fmt: skip
    scheduler = SchedulerConfig(
        max_num_batched_tokens=256, max_num_seqs=8, max_model_len=1024, enable_chunked_prefill=True
    )
    return VllmConfig(
        model_config=model_config, cache_config=cache, scheduler_config=scheduler, kv_transfer_config=transfer,
        device_config=DeviceConfig(device="cuda"),
    )  # fmt: skip


def groups_of(pages: int, groups: int) -> Any:
    """vLLM's KV cache config: all layers in one group, or a group each."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(block_size=PAGE_TOKENS, num_kv_heads=HEADS, head_size=DIM, dtype=torch.bfloat16)
    names = [f"model.layers.{i}.self_attn.attn" for i in range(LAYERS)]
    split = [names] if groups == 1 else [[name] for name in names]
    return KVCacheConfig(
        num_blocks=pages, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(each, spec) for each in split]
    )


class OldEngine:
    """One scheduler and one worker, stepped by hand."""

    def __init__(self, model: str, address: str, pages: int) -> None:
        from vllm.distributed import kv_transfer, parallel_state
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        parallel_state._TP = SimpleNamespace(rank_in_group=0, world_size=1)
        self.config = config_of(model, address, pages)
        cache = groups_of(pages, 1)
        kv_transfer.ensure_kv_transfer_initialized(self.config, cache)
        self.worker = kv_transfer.get_kv_transfer_group()
        self.shut_down = kv_transfer.ensure_kv_transfer_shutdown
        self.scheduler = Scheduler(
            self.config, cache, StructuredOutputManager(self.config), block_size=PAGE_TOKENS, log_stats=True
        )
        shape = (2, pages, PAGE_TOKENS, HEADS, DIM)
        self.caches = {name: torch.zeros(shape, dtype=torch.bfloat16) for name in cache.kv_cache_groups[0].layer_names}
        self.worker.register_kv_caches(self.caches)
        self.tables: dict[str, list[int]] = {}
        self.outputs: dict[str, list[int]] = {}
        self.wrong = self.made = 0
        self.preempted = False

    def close(self) -> None:
        """End both sides."""
        self.scheduler.shutdown()
        self.shut_down()

    @property
    def free_pages(self) -> int:
        """Pages that belong to nobody."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def add(self, prompt: list[int], max_tokens: int) -> str:
        """A request arrives."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        self.made += 1
        name = f"r{self.made}"
        parameters = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        self.scheduler.add_request(Request(name, prompt, parameters, None, None))
        self.outputs[name] = []
        return name

    def step(self) -> None:
        """One step, in this version's own order of calls."""
        from vllm.forward_context import set_forward_context
        from vllm.v1.outputs import ModelRunnerOutput
        from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin as Lifecycle

        output = self.scheduler.schedule()
        self.preempted |= any(each.status.name == "PREEMPTED" for each in self.scheduler.requests.values())
        if not output.total_num_scheduled_tokens:
            self.scheduler.update_from_output(output, Lifecycle.kv_connector_no_forward(output, self.config))
            return
        with set_forward_context(None, self.config), Lifecycle.maybe_get_kv_connector_output(output) as connector:
            said = self._compute(output)
        names = list(output.num_scheduled_tokens)
        result = ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[np.array(said.get(name, []), dtype=np.int64) for name in names], logprobs=None,
            prompt_logprobs_dict={}, pooler_output=[], kv_connector_output=connector,
        )  # fmt: skip
        before = {name: len(request.output_token_ids) for name, request in self.scheduler.requests.items()}
        requests = dict(self.scheduler.requests)
        self.scheduler.update_from_output(output, result)
        for name, count in before.items():
            self.outputs[name] += list(requests[name].output_token_ids)[count:]

    def run(self, *prompts: list[int], max_tokens: int = 8) -> list[list[int]]:
        """Outputs of requests that arrive together; until nothing is left to do."""
        names = [self.add(prompt, max_tokens) for prompt in prompts]
        until = time.monotonic() + WAIT_S
        while self.scheduler.requests:
            self.step()
            if time.monotonic() > until:
                raise AssertionError(f"requests that do not end: {list(self.scheduler.requests)}")
        return [self.outputs[name] for name in names]

    def _compute(self, output: Any) -> dict[str, list[int]]:
        self._follow(output)
        said = {}
        for name, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            tokens = list(request.all_token_ids)
            end = min(request.num_computed_tokens, len(tokens))
            begin = end - count  # the scheduler has counted the step already
            states = torch.tensor(_states(tokens[:end]))
            for layer, tensor in enumerate(self.caches.values()):
                for half in range(2):
                    kept = ((states + layer + half) % MODULUS).to(torch.bfloat16)[:, None, None]
                    pages, rows = self._places(name, end)
                    there = tensor[half, pages[:begin], rows[:begin]]
                    self.wrong += int((there != kept[:begin]).any(-1).any(-1).sum())
                    tensor[half, pages[begin:], rows[begin:]] = kept[begin:]
            if end == len(tokens):
                said[name] = [10 + self._last(name, end)]
        return said

    def _follow(self, output: Any) -> None:
        for new in output.scheduled_new_reqs:
            self.tables[new.req_id] = list(new.block_ids[0])
        cached = output.scheduled_cached_reqs
        for name, ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                self.tables[name] = list(ids[0])
            elif ids is not None:
                self.tables[name] += ids[0]

    def _places(self, name: str, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        at = torch.arange(end)
        return torch.tensor(self.tables[name])[at // PAGE_TOKENS], at % PAGE_TOKENS

    def _last(self, name: str, end: int) -> int:
        """The next token: what V of the last layer says of all before it."""
        pages, rows = self._places(name, end)
        values = next(reversed(self.caches.values()))[1, pages, rows].float().mean((1, 2))
        return int(values.sum()) % MODULUS


def _states(tokens: list[int]) -> list[int]:
    """A number for each token, made of all up to it."""
    state, states = 1, []
    for token in tokens:
        state = (state * 31 + token) % MODULUS
        states.append(state)
    return states


def main() -> None:
    """See the module."""
    model, address = sys.argv[1:]
    torch.set_num_threads(1)  # small tensors: several threads only wait for each other
    prompt = [(7 * i) % 211 + 10 for i in range(400)]
    crowd = [[(13 * i * (n + 2)) % 197 + 10 for i in range(230)] for n in range(4)]
    engine = OldEngine(model, address, pages=40)
    seen: dict[str, Any] = {"policy": getattr(engine.config.kv_transfer_config, "kv_load_failure_policy", None)}
    free = engine.free_pages
    (cold,) = engine.run(prompt)
    (again,) = engine.run(prompt)
    book = engine.scheduler.connector._scheduler.book
    seen |= {"same": again == cold, "distinct": len(set(cold)), "loaded": book.loaded_tokens}
    engine.worker._worker._client.copy_by_ticket = _broken
    (broken,) = engine.run(prompt)
    del engine.worker._worker._client.copy_by_ticket
    seen |= {"broken_same": broken == cold, "reasons": dict(book.reasons)}
    outputs = engine.run(*crowd, max_tokens=100)
    seen |= {"whole": sum(len(each) == 100 for each in outputs), "preempted": engine.preempted}
    seen["crowd_same"] = engine.run(crowd[0], max_tokens=100)[0] == outputs[0]
    seen |= {"wrong": engine.wrong, "leaked": free - engine.free_pages, "entries": len(book)}
    seen["pinned"] = book.pinned_bytes
    engine.close()
    seen["several_groups"] = reason_of_several_groups(model, address)
    print(json.dumps(seen))


def reason_of_several_groups(model: str, address: str) -> str:
    """Why nothing is cached of a model with more than one KV cache group."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from prefixcache_vllm import PrefixCacheConnector

    made = PrefixCacheConnector(config_of(model, address, 40), KVConnectorRole.SCHEDULER, groups_of(40, LAYERS))
    return str(made.reason_off)


def _broken(*_: object) -> Any:
    from prefixcache_client import CopyResult

    return CopyResult(ok=False, tokens=0, size_bytes=0, reason="lease_lost")


if __name__ == "__main__":
    main()
