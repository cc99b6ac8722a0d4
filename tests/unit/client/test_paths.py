"""Copies that a device does by itself are waited for before anything is believed of them."""

from typing import Any

import numpy as np
import pytest
import torch

from prefixcache_client.errors import Failure
from prefixcache_client.paths import copied
from prefixcache_offload.engine import Job
from prefixcache_offload.memory import Memory


class Stream:
    """Counts how often it was waited for."""

    def __init__(self) -> None:
        self.waits = 0

    def current_stream(self, device: torch.device) -> "Stream":
        return self

    def synchronize(self) -> None:
        self.waits += 1


def test_device_memory_is_waited_for_after_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, seen = Stream(), []

    def copy(memory: Memory, jobs: Any) -> int:
        seen.append(stream.waits)
        return 7

    monkeypatch.setattr(torch, "get_device_module", lambda device: stream)
    host = Memory.of_bytes(np.zeros(8, np.uint8))
    device = Memory(None, torch.empty(8, dtype=torch.uint8, device="meta"))
    assert copied(copy, [(host, [Job(host, [], 1)]), (host, [Job(device, [], 1)])]) == 14
    assert (seen, stream.waits) == ([0, 0], 1)


def test_the_kernels_refusal_is_a_miss() -> None:
    def copy(memory: Memory, jobs: Any) -> int:
        raise OSError(14, "bad address")

    with pytest.raises(Failure) as caught:
        copied(copy, [(Memory.of_bytes(np.zeros(8, np.uint8)), [])])
    assert caught.value.reason == "internal"


def test_memory_of_a_device_is_waited_for_when_the_target_is_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream()
    monkeypatch.setattr(torch, "get_device_module", lambda device: stream)
    host = Memory.of_bytes(np.zeros(8, np.uint8))
    device = Memory(None, torch.empty(8, dtype=torch.uint8, device="meta"))
    assert copied(lambda memory, jobs: 3, [(device, [Job(host, [], 1)])]) == 3
    assert stream.waits == 1
