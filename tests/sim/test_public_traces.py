"""The figures of docs/policies.md on the public traces, where PREFIXCACHE_TRACES names the folder that has them.

The traces are not part of this repository: Mooncake's conversation and synthetic trace, and LMCache's agentic one as
lists of 64-token blocks.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from prefixcache.sim.optimum import optimum
from prefixcache.sim.replay import Cache, replay
from prefixcache.sim.trace import Trace, read_trace

FOLDER = os.environ.get("PREFIXCACHE_TRACES", "")
pytestmark = [
    pytest.mark.skipif(not FOLDER, reason="PREFIXCACHE_TRACES does not name a folder with the public traces"),
    pytest.mark.slow,
]
FILES = {
    "conversation": ("mooncake_conversation_trace.jsonl.gz", 512),
    "synthetic": ("mooncake_synthetic_trace.jsonl.gz", 512),
    "agentic": ("agentic_64.jsonl.gz", 64),
}


class Figures(NamedTuple):
    """Token hit ratios in percent: published ones of the optimum and LRU, and the least that TG must reach."""

    optimum: float
    lru: float
    tg: float


FIGURES = {
    ("conversation", 0.01): Figures(25.1, 5.3, 10.1),
    ("conversation", 0.05): Figures(37.4, 20.0, 23.3),
    ("conversation", 0.1): Figures(37.4, 28.4, 30.1),
    ("conversation", 0.2): Figures(37.4, 35.2, 35.2),
    ("synthetic", 0.2): Figures(61.9, 40.0, 42.5),
    ("agentic", 0.01): Figures(46.9, 36.0, 41.3),
    ("agentic", 0.05): Figures(84.1, 81.0, 82.2),
}


@cache
def load(name: str) -> Trace:
    return read_trace(Path(FOLDER) / FILES[name][0])


@pytest.mark.parametrize(("name", "share"), FIGURES)
def test_figures(name: str, share: float) -> None:
    trace, block_tokens = load(name), FILES[name][1]
    blocks = int(trace.unique_blocks * share)
    figures = FIGURES[name, share]

    def percent(hit_tokens: int) -> float:
        return 100 * hit_tokens / trace.tokens

    assert percent(optimum(trace, blocks, block_tokens).hit_tokens) == pytest.approx(figures.optimum, abs=0.3)
    assert percent(replay(trace, Cache(blocks, block_tokens, "lru")).hit_tokens) == pytest.approx(figures.lru, abs=0.3)
    assert percent(replay(trace, Cache(blocks, block_tokens, "tg")).hit_tokens) >= figures.tg - 0.2
