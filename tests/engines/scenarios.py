"""What tests do inside the engine's process: each function gets the LLM and plain values, and answers plain values."""

import time
import zlib
from collections.abc import Callable
from typing import Any

from tests.e2e.processes import wait_until
from tests.engines.models import HIDDEN

WAIT_S = 60.0


def generate(
    llm: Any,
    prompts: list[list[int]],
    max_tokens: int,
    sampling: dict[str, Any] | None = None,
    lora: dict[str, Any] | None = None,
    **fields: Any,
) -> list[dict[str, Any]]:
    """Greedy outputs of all prompts at once; `fields`: of each prompt. `lora`: of the LoRARequest, `lora_path` at
    least."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    parameters = SamplingParams(
        temperature=0, max_tokens=max_tokens, logprobs=1, ignore_eos=True, detokenize=False, **(sampling or {})
    )
    asked = [{"prompt_token_ids": prompt, **fields} for prompt in prompts]
    adapter = None
    if lora is not None:
        # Numbered by the path: vLLM keeps an adapter under its number.
        number = zlib.crc32(lora["lora_path"].encode()) % 1000 + 1
        adapter = LoRARequest(**({"lora_name": lora["lora_path"], "lora_int_id": number} | lora))
    return [_output(each) for each in llm.generate(asked, parameters, use_tqdm=False, lora_request=adapter)]


def moved(llm: Any, prompts: list[list[int]], start: int) -> dict[str, list[float]]:
    """How far the distributions of what follows each token from `start` on are from those of the engine's own prefill,
    for prompts of which `start` tokens are loaded: of each prompt the mean KL divergence in nats, and what was
    loaded."""
    from tests.engines.transformers_side import divergence

    kls, cached = [], []
    # One at a time: a batch's kernels round in another way.
    for each in prompts:
        loaded, found = _logits(llm, each, start)
        own, none = _logits(llm, each, start, skip_reading_prefix_cache=True)
        assert none == 0
        kls.append(divergence(own, loaded))
        cached.append(float(found))
    return {"kl": kls, "cached": cached}


def _logits(llm: Any, prompt: list[int], start: int, **sampling: Any) -> tuple[Any, int]:
    """Logits after each token from `start` on [tokens, vocabulary], and how many tokens were not computed."""
    from vllm import SamplingParams

    model = _core(llm).model_executor.driver_worker.worker.model_runner.get_model()
    steps: list[Any] = []
    hook = model.register_forward_hook(lambda *call: steps.append(call[-1].clone()))
    try:
        parameters = SamplingParams(temperature=0, max_tokens=1, detokenize=False, **sampling)
        answer = llm.generate([{"prompt_token_ids": prompt}], parameters, use_tqdm=False)[0]
    finally:
        hook.remove()
    # vLLM itself asks for logits of the last token only: all positions of a prompt would be a cache's business too.
    (hidden,) = steps
    return model.compute_logits(hidden[start - len(prompt) :]), answer.num_cached_tokens or 0


def embedded(llm: Any, seed: int, tokens: int) -> dict[str, Any]:
    """The output of a prompt that comes as embeddings, drawn by `seed`."""
    import torch
    from vllm import SamplingParams

    drawn = torch.randn((tokens, HIDDEN), generator=torch.Generator().manual_seed(seed)) * 0.08
    parameters = SamplingParams(temperature=0, max_tokens=16, logprobs=1, ignore_eos=True, detokenize=False)
    return _output(llm.generate([{"prompt_embeds": drawn.to(torch.bfloat16)}], parameters, use_tqdm=False)[0])


def speculated(llm: Any, prompt: list[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    """One request's output as `generate` answers it, with how many tokens were proposed, and how many of them the model
    would have said itself. `more`: as of `generate`."""
    core = _core(llm)
    original, seen = core.scheduler.update_from_output, {"proposed": 0, "accepted": 0}

    def counted(scheduled: Any, output: Any) -> Any:
        for request_id, proposals in scheduled.scheduled_spec_decode_tokens.items():
            seen["proposed"] += len(proposals)
            seen["accepted"] += len(output.sampled_token_ids[output.req_id_to_index[request_id]]) - 1
        return original(scheduled, output)

    core.scheduler.update_from_output = counted
    try:
        return generate(llm, [prompt], max_tokens, **more)[0] | seen
    finally:
        core.scheduler.update_from_output = original


def settle(llm: Any) -> None:
    """Step until everything is saved and nothing is kept for it."""
    core, until = llm.llm_engine.engine_core.engine_core, time.monotonic() + WAIT_S
    while core.scheduler.has_requests() or _is_saving(None):
        core.step_fn()
        assert time.monotonic() < until, "saves do not end"


def counts(llm: Any) -> dict[str, Any]:
    """What the connector's sides know."""
    scheduler, book = _scheduler(llm), _scheduler(llm).book
    return {
        "reasons": dict(book.reasons),
        "skipped": dict(scheduler.skipped),
        "loaded_tokens": book.loaded_tokens,
        "looked_up_tokens": book.looked_up_tokens,
        "entries": len(book),
        "pinned_bytes": book.pinned_bytes,
        "requests": len(scheduler._requests),
        "free_blocks": _core(llm).scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        "engine_requests": len(_core(llm).scheduler.requests),
        "without_draft": dict(scheduler.without_draft),
        "draft": _draft_counts(_draft_scheduler(llm)),
        "s_per_token": getattr(_core(llm).scheduler.connector._cost, "s_per_token", None),
    }


def _draft_counts(side: Any) -> dict[str, Any]:
    """What a draft model's side knows; empty without one."""
    if side is None:
        return {}
    return {
        "reasons": dict(side.book.reasons),
        "loaded_tokens": side.book.loaded_tokens,
        "entries": len(side.book),
        "pinned_bytes": side.book.pinned_bytes,
        "known": len(side._trust),
    }


def reason_off(llm: Any) -> str:
    """Why nothing is cached; "" where it is."""
    return str(_core(llm).scheduler.connector.reason_off)


def reports_failures(llm: Any) -> bool:
    """Whether this vLLM can be told which requests' loads failed, and not only which pages are bad."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    return hasattr(base, "KVConnectorTransferResults")


def fingerprint(llm: Any, *, draft: bool = False) -> str:
    """The namespace of requests without adapter, or that of the draft model."""
    namespace = (_draft_scheduler(llm) if draft else _scheduler(llm))._namespaces[""]
    return str(namespace.epoch.fingerprint.hex())


def _core(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core


def _scheduler(llm: Any) -> Any:
    return _core(llm).scheduler.connector._scheduler


def _worker(llm: Any) -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._worker


def _draft_worker(llm: Any) -> Any:
    """The worker's side of a draft model; None without one."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return getattr(get_kv_transfer_group()._workers, "_draft", None)


def _draft_scheduler(llm: Any) -> Any:
    return getattr(_core(llm).scheduler.connector._sides, "_draft", None)


def _output(request: Any) -> dict[str, Any]:
    completion = request.outputs[0]
    return {
        "tokens": list(completion.token_ids),
        "cached": request.num_cached_tokens or 0,
        "logprobs": [next(iter(each.values())).logprob for each in completion.logprobs or ()],
        "finish_reason": str(completion.finish_reason),
    }


def announced(llm: Any, prompt: list[int]) -> list[dict[str, Any]]:
    """What the engine publishes of ours for a prompt, encoded and decoded with vLLM's own classes."""
    from vllm.distributed.kv_events import BlockStored

    def run(wire: list[Any]) -> None:
        generate(llm, [prompt], 1)
        settle(llm)
        _step_until(llm, lambda: any(is_ours(event) for batch in wire for event in batch.events))

    def is_ours(event: Any) -> bool:
        return isinstance(event, BlockStored) and event.medium == "CPU"

    ours = [each for each in _published(llm, run) if is_ours(each)]
    return [
        {
            "hashes": [each.hex() for each in event.block_hashes],
            "parent": event.parent_block_hash.hex() if event.parent_block_hash else "",
            "tokens": event.token_ids,
            "block_size": event.block_size,
        }
        for event in ours
    ]


def withdrawn(llm: Any) -> list[str]:
    """Hashes that the engine takes back, decoded with vLLM's own classes, when its daemon is cleared."""
    import grpc
    from vllm.distributed.kv_events import BlockRemoved

    from prefixcache.v1 import admin_pb2, admin_pb2_grpc

    connector = _core(llm).scheduler.connector

    def run(wire: list[Any]) -> None:
        _step_until(llm, lambda: connector._removals._watch.connected)
        with grpc.insecure_channel(connector._client._link.address.target) as channel:
            admin_pb2_grpc.AdminServiceStub(channel).Evict(admin_pb2.EvictRequest(), timeout=WAIT_S)
        _step_until(llm, lambda: any(isinstance(event, BlockRemoved) for batch in wire for event in batch.events))

    found = [each for each in _published(llm, run) if isinstance(each, BlockRemoved) and each.medium == "CPU"]
    return [key.hex() for event in found for key in event.block_hashes]


def _step_until(llm: Any, done: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT_S
    while not done() and time.monotonic() < until:
        generate(llm, [[7] * 8], 1)  # events leave with a step


def _published(llm: Any, run: Callable[[list[Any]], None]) -> list[Any]:
    """The events that are published while `run` runs, which is given the batches as they come."""
    import msgspec
    from vllm.distributed.kv_events import KVEventBatch

    publisher = _core(llm).scheduler.kv_event_publisher
    wire: list[Any] = []
    original = publisher.publish

    def publish(batch: Any) -> None:
        wire.append(msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=KVEventBatch))

    publisher.publish = publish
    try:
        run(wire)
    finally:
        publisher.publish = original
    return [event for batch in wire for event in batch.events]


def root(llm: Any) -> str:
    """The parent of every first block of requests without salt and adapter."""
    return str(_scheduler(llm)._namespaces[""].epoch.root.hex())


def abort_after(llm: Any, prompt: list[int], steps: int, name: str) -> None:
    """A request that is aborted after so many steps of the engine."""
    _add(llm, name, prompt, 8)
    for _ in range(steps):
        llm.llm_engine.step()
    llm.llm_engine.abort_request([name])
    llm.llm_engine.step()


def crowd(llm: Any, prompts: list[list[int]], max_tokens: int) -> dict[str, int]:
    """Requests that do not fit at once: how many finished with all their tokens, and how often one was preempted."""
    core = _core(llm)
    preempted: list[str] = []
    original = core.scheduler._preempt_request

    def counted(request: Any, *arguments: Any, **more: Any) -> None:
        preempted.append(request.request_id)
        original(request, *arguments, **more)

    core.scheduler._preempt_request = counted
    outputs = generate(llm, prompts, max_tokens)
    core.scheduler._preempt_request = original
    return {"whole": sum(len(each["tokens"]) == max_tokens for each in outputs), "preempted": len(preempted)}


def crowd_that_loads(llm: Any, prompts: list[list[int]], max_tokens: int) -> dict[str, int]:
    """As `crowd`, with loads so slow that another request is preempted before one ends; and how often that happened."""
    worker, side = _worker(llm), _scheduler(llm)
    original, core = worker._client.copy_by_ticket, _core(llm)
    preempt = core.scheduler._preempt_request
    during: list[str] = []

    def slow(*arguments: Any) -> Any:
        wait_until(lambda: bool(during) or not core.scheduler.running, 10.0)
        return original(*arguments)

    def seen(request: Any, *arguments: Any, **more: Any) -> None:
        if side._loading:
            during.append(request.request_id)
        preempt(request, *arguments, **more)

    worker._client.copy_by_ticket, core.scheduler._preempt_request = slow, seen
    try:
        done = crowd(llm, prompts, max_tokens)
    finally:
        worker._client.copy_by_ticket, core.scheduler._preempt_request = original, preempt
    return done | {"while_loading": len(during), "loads": side.book.hits}


def asks(llm: Any, prompts: list[list[int]]) -> dict[str, float]:
    """How often the engine asked for all these requests, how often the daemon was, and the largest share of its memory
    that was pinned for requests that did not run."""
    side, asker = _scheduler(llm), _scheduler(llm)._asker
    matched, submit = side.matched, asker.submit
    seen = {"engine": 0, "daemon": 0, "pinned_share": 0.0}

    def counted(request: Any, local_tokens: int) -> Any:
        seen["engine"] += 1
        found = matched(request, local_tokens)
        if asker.pool_bytes:
            seen["pinned_share"] = max(seen["pinned_share"], side.book.pinned_bytes / asker.pool_bytes)
        return found

    def counted_too(ask: Any) -> None:
        seen["daemon"] += 1
        submit(ask)

    side.matched, asker.submit = counted, counted_too
    try:
        generate(llm, prompts, 4)
    finally:
        side.matched, asker.submit = matched, submit
    return seen


def ask_of_a_silent_daemon(llm: Any, prompt: list[int], steps: int) -> dict[str, int]:
    """The daemon answers nothing until the engine has stepped so often: the tokens another request got meanwhile, and
    how often the engine was told to ask later. An engine that waited for the answer would not come back."""
    import threading

    side, core, client = _scheduler(llm), _core(llm), _scheduler(llm)._asker._client
    acquire, matched, answer = client.acquire, side.matched, threading.Event()
    later: list[str] = []

    def silent(*arguments: Any, **more: Any) -> Any:
        assert answer.wait(WAIT_S)
        return acquire(*arguments, **more)

    def seen(request: Any, local_tokens: int) -> Any:
        found = matched(request, local_tokens)
        later.extend([request.request_id] * (found[0] is None))
        return found

    _add(llm, "running", [7] * 8, 3000)
    settled = core.scheduler.requests
    assert wait_until(lambda: llm.llm_engine.step() or any(each.num_output_tokens for each in settled.values()))
    (running,) = settled.values()
    before = running.num_output_tokens
    client.acquire, side.matched = silent, seen
    try:
        _add(llm, "asking", prompt, 1)
        for _ in range(steps):
            llm.llm_engine.step()
        tokens = running.num_output_tokens - before
    finally:
        answer.set()
        client.acquire, side.matched = acquire, matched
    llm.llm_engine.abort_request(["running", "asking"])
    settle(llm)
    return {"tokens": tokens, "told_later": len(later)}


def change_weights(llm: Any, factor: float) -> bool:
    """Scale a weight of the running model (matrices are repacked when loaded), and tell vLLM."""
    model = _core(llm).model_executor.driver_worker.worker.model_runner.get_model()
    next(p for name, p in model.named_parameters() if "input_layernorm" in name).data.mul_(factor)
    return bool(llm.reset_prefix_cache(reset_connector=True))


def forget_own_cache(llm: Any) -> bool:
    """Empty vLLM's own prefix cache, not ours."""
    return bool(llm.reset_prefix_cache())


def longest_held_s(llm: Any) -> float:
    """How long the daemon kept a request from being scheduled since the last call, at worst. Watches from the first
    call on."""
    side = _scheduler(llm)
    watch = getattr(side, "held_since", None)
    if watch is None:
        side.held_since, side.longest_s = {}, 0.0
        original = side.matched

        def matched(request: Any, local_tokens: int) -> tuple[int | None, bool]:
            found = original(request, local_tokens)
            began = side.held_since.setdefault(request.request_id, time.monotonic())
            if found[0] is not None:
                side.longest_s = max(side.longest_s, time.monotonic() - began)
                del side.held_since[request.request_id]
            return found

        side.matched = matched
    longest, side.longest_s = side.longest_s, 0.0
    return float(longest)


def kill_while_loading(llm: Any, prompt: list[int], max_tokens: int, pid: int) -> dict[str, Any]:
    """Kill a daemon when slots are leased and their copy is about to begin."""
    import os
    import signal

    worker = _worker(llm)
    original = worker._client.copy_by_ticket

    def killing(*arguments: Any) -> Any:
        os.kill(pid, signal.SIGKILL)
        assert wait_until(lambda: not worker._client._link.session.alive)
        return original(*arguments)

    worker._client.copy_by_ticket = killing
    try:
        return generate(llm, [prompt], max_tokens)[0]
    finally:
        worker._client.copy_by_ticket = original


def break_loads(llm: Any, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    """Every load of this request fails after it has written garbage."""
    from prefixcache_client import CopyResult

    worker = _worker(llm)
    original = worker._client.copy_by_ticket

    def broken(*arguments: Any) -> Any:
        original(*arguments)
        for layer in worker._layers.values():
            for tensor, _, _ in layer.views:
                tensor[1:].fill_(2.0)  # finite: kernels read past the end of a prompt and mask it
        return CopyResult(ok=False, tokens=0, size_bytes=0, reason="lease_lost")

    worker._client.copy_by_ticket = broken
    try:
        return generate(llm, [prompt], max_tokens)[0]
    finally:
        worker._client.copy_by_ticket = original


def _add(llm: Any, name: str, prompt: list[int], max_tokens: int) -> None:
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, parameters)


def settle_ranks(llm: Any) -> None:
    """As `settle`, for workers in processes of their own."""
    core, until = _core(llm), time.monotonic() + WAIT_S
    while core.scheduler.has_requests() or any(core.model_executor.collective_rpc(_is_saving)):
        core.step_fn()
        assert time.monotonic() < until, "saves do not end"


def stored(llm: Any, prompt: list[int], salt: str = "", *, draft: bool = False) -> list[str]:
    """The bytes of a prompt's blocks in the daemon, as hex digits; of the model, or of its draft model."""
    from prefixcache.identity.keys import block_keys, root_key
    from prefixcache_client import PromptKeys

    side, client = _draft_scheduler(llm) if draft else _scheduler(llm), _core(llm).scheduler.connector._client
    namespace = side._namespaces[""]
    root = root_key(namespace.epoch.fingerprint, cache_salt=salt.encode())
    keys = block_keys(root, prompt, namespace.block_tokens)
    found = []
    with client.acquire(namespace, PromptKeys(keys, len(prompt))) as lease:
        for block in range(lease.tokens // namespace.block_tokens):
            with lease.view(block) as data:
                found.append(bytes(data).hex())
    return found


def kill_rank(llm: Any, rank: int, moment: str) -> None:
    """Have a worker killed in its next store, when its bytes are in the slots, or in its next load."""
    _core(llm).model_executor.collective_rpc(_arm, args=(rank, moment))


def _is_saving(worker: Any) -> bool:
    sides = [_worker(None), _draft_worker(None)]
    return any(side.transfers.busy for side in sides if side is not None)


def _arm(worker: Any, rank: int, moment: str) -> None:
    import os
    import signal

    from vllm.distributed import get_tensor_model_parallel_rank

    if get_tensor_model_parallel_rank() != rank:
        return
    client = _worker(None)._client
    assert wait_until(client.open)

    def killed(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if moment == "load":
        client.copy_by_ticket = killed
        return
    path = client._link.session.path
    save = path.save
    path.save = lambda *arguments: (save(*arguments), killed())
