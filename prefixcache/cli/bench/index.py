"""`bench index`: the core's index by its size, and against `bytes.startswith` by the length of the prompt.

Figures: match, insert and evict at three sizes, each call on the next size in turn; prompts are looked up in random
order with their keys just made, as a request brings them. Bytes a block is the growth of resident memory while an index
is built in a process of its own, table and eviction order included, keys of the caller not.
"""

from __future__ import annotations

import gc
import multiprocessing
import random
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import cycle
from pathlib import Path
from typing import Any, Final

from prefixcache.cli.bench.index_under_test import Index
from prefixcache.cli.bench.measure import Call, Case, interleave, medians_us, no_collection
from prefixcache.cli.bench.plan import Plan, Progress
from prefixcache.cli.bench.workload import ROOT, Prompts
from prefixcache.identity import KEY_BYTES, block_keys

PROMPT_TOKENS: Final = 2048
BLOCK_TOKENS: Final = 64
MATCH_BLOCK_TOKENS: Final = 16
LONG_PROMPTS: Final = 8
CHAT_NODES: Final = 63
CHAT_TOKENS: Final = 32_256  # 63 turns of 512: 32k tokens in whole turns
COMPARED_BYTES: Final = 128 << 10
PAGE: Final = 4096
# Numbers of prompts that are looked for or inserted later, beyond all that an index is built from.
NEW: Final = 10_000_000


def run(plan: Plan, progress: Progress) -> dict[str, Any]:
    """`index`, `match` and `chat_path_us` of the result."""
    progress("index: bytes a block")
    memory = [_bytes_per_block(blocks) for blocks in plan.index_blocks]
    rows = _by_size(plan, progress)
    for row, size_bytes in zip(rows, memory, strict=True):
        row["bytes_per_block"] = size_bytes
    return {"index": rows} | _by_length(plan, progress)


def build(blocks: int, prompts: Prompts, spare: int = 0) -> Index:
    """An index of about `blocks` blocks, with room for `spare` more."""
    count = blocks // prompts.blocks
    index = Index(count * prompts.blocks + spare, prompts.block_tokens)
    with no_collection():
        for number in range(count):
            _insert(index, prompts.keys(number))
    return index


def _insert(index: Index, keys: bytes) -> None:
    index.insert(keys, index.slots(keys))


def _bytes_per_block(blocks: int) -> float:
    """Measured in a new process, whose memory nobody used before."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(growth_per_block, blocks).result()


def growth_per_block(blocks: int) -> float:
    """Growth of this process's resident memory by an index of `blocks` blocks, divided by them."""
    prompts = Prompts(PROMPT_TOKENS, BLOCK_TOKENS)
    warm = build(prompts.blocks, prompts)  # code, caches and the allocator's first arenas are not the index's
    gc.collect()
    before = _resident_bytes()
    index = build(blocks, prompts)
    gc.collect()
    grown = _resident_bytes() - before
    assert warm.blocks == prompts.blocks
    return grown / index.blocks


def _resident_bytes() -> int:
    """Resident memory of this process, anonymous and shared, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def _by_size(plan: Plan, progress: Progress) -> list[dict[str, Any]]:
    prompts = Prompts(PROMPT_TOKENS, BLOCK_TOKENS)
    indexes = {}
    for blocks in plan.index_blocks:
        progress(f"index: building {blocks:,} blocks")
        indexes[blocks] = build(blocks, prompts, spare=prompts.blocks * 4)
    chance = random.Random(1)
    progress("index: match")
    match = _medians(indexes, lambda index, n: _match_case(index, prompts, chance, n), plan.index_rounds)
    hashed = _medians(indexes, lambda index, n: _hash_case(index, prompts, chance, n), plan.index_rounds)
    progress("index: insert and evict")
    insert = _medians(indexes, lambda index, n: _insert_case(index, prompts), plan.index_rounds // 4)
    evict = _medians(indexes, lambda index, n: Case.of(index.evict), plan.index_rounds // 4)
    return [
        {
            "blocks": blocks,
            "match_us": match[blocks],
            "hash_match_us": hashed[blocks],
            "insert_us": insert[blocks],
            "evict_us": evict[blocks],
        }
        for blocks in plan.index_blocks
    ]


def _medians(indexes: dict[int, Index], case: Callable[[Index, int], Case], rounds: int) -> dict[int, float]:
    """Median microseconds of one operation by the size of the index, interleaved over the sizes."""
    cases = {str(blocks): case(index, blocks // (PROMPT_TOKENS // BLOCK_TOKENS)) for blocks, index in indexes.items()}
    return {int(blocks): us for blocks, us in medians_us(interleave(cases, rounds)).items()}


def _match_case(index: Index, prompts: Prompts, chance: random.Random, count: int) -> Case:
    def prepare() -> Call:
        keys = prompts.keys(chance.randrange(count))
        return lambda: index.match(keys)

    return Case(prepare, lambda blocks: _expect(blocks, prompts.blocks))


def _hash_case(index: Index, prompts: Prompts, chance: random.Random, count: int) -> Case:
    def prepare() -> Call:
        packed = prompts.packed(chance.randrange(count))
        return lambda: index.hash_match(packed)

    return Case(prepare, lambda blocks: _expect(blocks, prompts.blocks))


def _insert_case(index: Index, prompts: Prompts, first: int = NEW) -> Case:
    """Inserts prompts that were never seen; as many blocks leave afterwards, so that the size stays."""
    numbers = iter(range(first, first + NEW))
    size = index.blocks

    def prepare() -> Call:
        keys = prompts.keys(next(numbers))
        slots = index.slots(keys)
        return lambda: index.insert(keys, slots)

    def finish(_: object) -> None:
        while index.blocks > size:
            index.evict()

    return Case(prepare, finish)


def _by_length(plan: Plan, progress: Progress) -> dict[str, Any]:
    """`match` and `chat_path_us`: one index of many prompts, lookups of growing length."""
    short = Prompts(PROMPT_TOKENS, MATCH_BLOCK_TOKENS)
    spare = (LONG_PROMPTS * len(plan.match_tokens) + 4) * max(plan.match_tokens) + 3 * CHAT_TOKENS
    progress(f"match: building {plan.match_prompts:,} prompts")
    index = build(plan.match_prompts * short.blocks, short, spare // MATCH_BLOCK_TOKENS)
    cases = {"startswith": _startswith_case()}
    for tokens in plan.match_tokens:
        cases[f"match {tokens}"] = _length_case(index, Prompts(tokens, MATCH_BLOCK_TOKENS), plan.match_prompts)
    cases["chat"] = _known_case(index, [_insert_chat(index)])
    progress("match: lookups")
    us = medians_us(interleave(cases, plan.match_rounds))
    progress("match: inserts")
    inserts = {
        f"insert {tokens}": _insert_case(index, Prompts(tokens, MATCH_BLOCK_TOKENS), NEW + place * NEW)
        for place, tokens in enumerate(plan.match_tokens, start=1)
    }
    us |= medians_us(interleave(inserts, plan.match_rounds // 10))
    return {
        "match": [
            {
                "tokens": tokens,
                "us": us[f"match {tokens}"],
                "insert_us": us[f"insert {tokens}"],
                "startswith_us": us["startswith"],
            }
            for tokens in plan.match_tokens
        ],
        "chat_path_us": us["chat"],
    }


def _length_case(index: Index, prompts: Prompts, count: int) -> Case:
    """Prompts of one length: those the index was built from, or a few longer ones put in beside them."""
    if prompts.tokens == PROMPT_TOKENS:
        return _match_case(index, prompts, random.Random(3), count)
    longer = [prompts.keys(NEW - 1 - number) for number in range(LONG_PROMPTS)]
    for keys in longer:
        _insert(index, keys)
    return _known_case(index, longer)


def _known_case(index: Index, known: list[bytes]) -> Case:
    """Lookups of these prompts in turn, with keys that have just been received: each round brings a copy of its own."""
    order = cycle(known)

    def prepare() -> Call:
        received = bytes(bytearray(next(order)))
        return lambda: index.match(received)

    return Case(prepare, lambda blocks: _expect(blocks, len(known[0]) // KEY_BYTES))


def _startswith_case() -> Case:
    """What the machine needs to compare COMPARED_BYTES: the unit in which a match is judged."""
    edge = random.Random(2).randbytes(COMPARED_BYTES)
    other = b"." + edge
    return Case.of(lambda: other.startswith(edge, 1), _expect_equal)


def _insert_chat(index: Index) -> bytes:
    """Keys of a conversation of CHAT_NODES turns, of which every turn but the last was also answered differently."""
    turn = CHAT_TOKENS // CHAT_NODES
    keys = b""
    for number in range(CHAT_NODES):
        said, other = (Prompts(turn, MATCH_BLOCK_TOKENS).packed(5 * NEW + 2 * number + n) for n in (0, 1))
        parent = keys[-KEY_BYTES:] or ROOT
        if number:
            _insert(index, keys + block_keys(parent, other, MATCH_BLOCK_TOKENS))
        keys += block_keys(parent, said, MATCH_BLOCK_TOKENS)
        _insert(index, keys)
    assert len(index.space.tree.walk(keys).nodes) >= CHAT_NODES
    return keys


def _expect(blocks: int, wanted: int) -> None:
    """A fast lookup that finds nothing is no measurement."""
    assert blocks == wanted, f"found {blocks} of {wanted} blocks"


def _expect_equal(value: object) -> None:
    assert value
