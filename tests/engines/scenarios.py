"""What tests do inside the engine's process: each function gets the LLM and plain values, and answers plain values."""

import time
from typing import Any

WAIT_S = 60.0


def generate(
    llm: Any, prompts: list[list[int]], max_tokens: int, sampling: dict[str, Any] | None = None, **fields: Any
) -> list[dict[str, Any]]:
    """Greedy outputs of all prompts at once; `fields`: of each prompt."""
    from vllm import SamplingParams

    parameters = SamplingParams(
        temperature=0, max_tokens=max_tokens, logprobs=1, ignore_eos=True, detokenize=False, **(sampling or {})
    )
    asked = [{"prompt_token_ids": prompt, **fields} for prompt in prompts]
    return [_output(each) for each in llm.generate(asked, parameters, use_tqdm=False)]


def settle(llm: Any) -> None:
    """Step until everything is saved and nothing is kept for it."""
    core, until = llm.llm_engine.engine_core.engine_core, time.monotonic() + WAIT_S
    transfers = _worker(llm).transfers
    while core.scheduler.has_requests() or transfers._waiting_count:
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
    }


def fingerprint(llm: Any) -> str:
    """The namespace of requests without adapter."""
    namespace = _scheduler(llm)._namespaces[""]
    return str(namespace.epoch.fingerprint.hex())


def _core(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core


def _scheduler(llm: Any) -> Any:
    return _core(llm).scheduler.connector._scheduler


def _worker(llm: Any) -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._worker


def _output(request: Any) -> dict[str, Any]:
    completion = request.outputs[0]
    return {
        "tokens": list(completion.token_ids),
        "cached": request.num_cached_tokens or 0,
        "logprobs": [next(iter(each.values())).logprob for each in completion.logprobs or ()],
        "finish_reason": str(completion.finish_reason),
    }
