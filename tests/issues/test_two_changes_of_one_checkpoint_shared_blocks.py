"""Weights epochs were counted: two processes that each changed the same checkpoint in place, in different ways, both
came to epoch 1, so one read the other's blocks."""

from __future__ import annotations

import numpy as np

from prefixcache.identity.layout import GroupKind, LayerGroup, Layout
from prefixcache_client import Client

LAYOUT = Layout.of(LayerGroup(GroupKind.FULL, (0,), 1, 4, 4, "float32"))


def test_two_changes_of_one_checkpoint_never_meet() -> None:
    client = Client("unix:///nowhere")  # never called
    prompt = np.arange(128, dtype=np.uint32)
    seen = set()
    for _ in range(8):  # as many processes, each with its own idea of the next step
        ns = client.namespace(LAYOUT, b"w" * 32)
        for _ in range(2):
            ns.invalidate()
            seen.add((ns.epoch.fingerprint, ns.hash(prompt).keys))
    assert len(seen) == len({keys for _, keys in seen}) == 16
