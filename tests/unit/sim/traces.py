"""Small made-up traces in the row form of the public ones."""

from __future__ import annotations

import json
import random
from pathlib import Path

from prefixcache.sim.trace import Request, Trace

BLOCK_TOKENS = 512


def made_up(requests: int, seed: int, *, users: int = 8) -> Trace:
    """Conversations that grow and come back, behind a few system prompts; the last block of each prompt is partial."""
    rng = random.Random(seed)
    numbers: dict[tuple[str, ...], int] = {}
    talks: dict[int, list[str]] = {}
    rows = []
    for step in range(requests):
        user = rng.randrange(users)
        talk = talks.setdefault(user, [f"system {user % 3}", f"user {user} at {step}"])
        if rng.random() < 0.2:
            del talks[user]
        talk += [f"said at {step} {part}" for part in range(rng.randint(1, 3))]
        ids = tuple(numbers.setdefault(tuple(talk[: end + 1]), len(numbers)) for end in range(len(talk)))
        rows.append(Request(step * 1.5, len(ids) * BLOCK_TOKENS - rng.randrange(BLOCK_TOKENS), ids))
    return Trace("made up", tuple(rows))


def write(trace: Trace, path: Path) -> Path:
    """The trace as JSON lines."""
    rows = [
        {"timestamp": each.time_s * 1000, "input_length": each.tokens, "output_length": 1, "hash_ids": list(each.ids)}
        for each in trace.requests
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
