"""An inference worker for the end-to-end tests, run by the Python of either environment.

One JSON object a line on standard input asks, one on standard output answers. `op` is one of
    info      -> transformers version, fingerprint of the namespace
    generate  rows [[ids]], new_tokens, cached -> rows [[ids]], reused: prompt tokens taken from the cache
    logits    ids, cached -> sha256 of the logits of what was computed, reused
    oracle    first, second, cut -> sha256 of the logits of `second` behind the first `cut` tokens of `first`'s own
              cache, kept in memory, without the daemon
    stored    ids -> sha256 of the bytes that the daemon holds for the prompt's blocks
Rows of one length only; they go to the model as one batch.
"""

import argparse
import hashlib
import json
import os
import sys
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache

from prefixcache_client import Client, PromptKeys
from prefixcache_transformers import Daemon, PrefixCache, compat


class Worker:
    """A model, a client, a cache."""

    def __init__(self, checkpoint: str, address: str, dtype: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).eval()
        self.model.generation_config.eos_token_id = None
        self.client = Client(address)
        self.cache = PrefixCache(self.model, Daemon(self.client))
        self.keyword = compat.forward_cache_keyword(self.model)

    def info(self) -> dict[str, Any]:
        namespace = self.cache._store._namespace  # the worker's own; tests compare it between versions
        return {"version": transformers.__version__, "fingerprint": namespace.epoch.fingerprint.hex()}

    def generate(self, rows: list[list[int]], new_tokens: int, *, cached: bool) -> dict[str, Any]:
        ids = torch.tensor(rows)
        before = self.cache.stats.reused
        generate = self.cache.generate if cached else self.model.generate
        output = generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
        self.cache.flush()
        return {"rows": output[:, ids.shape[1] :].tolist(), "reused": self.cache.stats.reused - before}

    def logits(self, ids: list[int], *, cached: bool) -> dict[str, Any]:
        before = self.cache.stats.reused
        prompt = torch.tensor([ids])
        output = self.cache.prefill(prompt)[0] if cached else self.model(input_ids=prompt)
        return {"sha256": digest(output.logits), "reused": self.cache.stats.reused - before}

    def oracle(self, first: list[int], second: list[int], cut: int) -> dict[str, Any]:
        kept = DynamicCache()
        self.model(input_ids=torch.tensor([first]), **{self.keyword: kept, "use_cache": True})
        kept.crop(cut - len(first))
        suffix = torch.tensor([second[cut:]])
        output = self.model(input_ids=suffix, **{self.keyword: kept, "use_cache": True})
        return {"sha256": digest(output.logits)}

    def stored(self, ids: list[int]) -> dict[str, Any]:
        found = self.cache.lookup(torch.tensor([ids]))
        assert found is not None
        namespace = self.cache._store._namespace
        content = hashlib.sha256()
        with self.client.acquire(namespace, PromptKeys(found.chains[0].keys, len(ids))) as lease:
            for block in range(lease.blocks):
                with lease.view(block) as array:
                    content.update(array.tobytes())
            assert lease.valid()
            return {"sha256": content.hexdigest(), "blocks": lease.blocks}


def digest(logits: torch.Tensor) -> str:
    return hashlib.sha256(logits.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("checkpoint", "address", "dtype"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    torch.set_num_threads(arguments.threads)
    with torch.inference_mode():
        worker = Worker(arguments.checkpoint, arguments.address, arguments.dtype)
        print(json.dumps(worker.info()), file=answers, flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            answer = getattr(worker, asked.pop("op"))(**asked)
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
