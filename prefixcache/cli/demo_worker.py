"""A worker of the demo: a process with a model of its own that answers prompts, with and without the cache.

One JSON object a line on standard input asks, one on standard output answers:
    {"ids": [...], "cached": bool, "new_tokens": n} -> {"ids": [...], "ttft_s": s, "total_s": s, "reused": tokens}
The first line it writes is {"ready": true}. It ends with its input. It must not know the other worker or the daemon's
inner life.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any, TextIO

import torch
from transformers import AutoModelForCausalLM
from transformers.generation import BaseStreamer

from prefixcache_client import Client
from prefixcache_transformers import Daemon, PrefixCache


class FirstToken(BaseStreamer):  # type: ignore[misc]  # a base without types
    """Notes when the first generated token arrives; `generate` puts the prompt before it."""

    def __init__(self) -> None:
        self.puts = 0
        self.at_s = 0.0

    def put(self, value: Any) -> None:
        """One call for the prompt, then one for each token."""
        self.puts += 1
        if self.puts == 2:
            self.at_s = time.perf_counter()

    def end(self) -> None:
        """Nothing is held back."""


class Worker:
    """A model and its cache."""

    def __init__(self, checkpoint: str, address: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self.model.generation_config.eos_token_id = None  # answers of equal length are easier to compare
        self.cache = PrefixCache(self.model, Daemon(Client(address), label="prefixcache demo"))

    def answer(self, ids: list[int], new_tokens: int, *, cached: bool) -> dict[str, Any]:
        """Generate greedily from one prompt."""
        prompt = torch.tensor([ids])
        mask, first = torch.ones_like(prompt), FirstToken()
        generate = self.cache.generate if cached else self.model.generate
        before = self.cache.stats.reused
        began = time.perf_counter()
        output = generate(
            prompt, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, streamer=first
        )  # fmt: skip
        total_s = time.perf_counter() - began
        if cached:
            self.cache.flush()  # the next prompt, of whichever worker, shall find it
        return {
            "ids": output[0, len(ids) :].tolist(),
            "ttft_s": first.at_s - began,
            "total_s": total_s,
            "reused": self.cache.stats.reused - before,
            "reasons": dict(self.cache.stats.reasons),
        }


def main() -> None:
    """Serve standard input until it ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    answers = _take_standard_output()
    torch.set_num_threads(arguments.threads)
    with torch.inference_mode():
        worker = Worker(arguments.checkpoint, arguments.address)
        _say(answers, {"ready": True})
        for line in sys.stdin:
            asked = json.loads(line)
            _say(answers, worker.answer(asked["ids"], asked["new_tokens"], cached=asked["cached"]))
    worker.cache.close()


def _take_standard_output() -> TextIO:
    """The stream for answers; whatever libraries print goes to standard error from here on."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def _say(stream: TextIO, answer: dict[str, Any]) -> None:
    stream.write(json.dumps(answer) + "\n")
    stream.flush()


if __name__ == "__main__":
    main()
