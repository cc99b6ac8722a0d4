"""A request's keys: the same however and by whomever they are asked for; extras go into the block they begin in."""

import threading

from prefixcache.identity.keys import Extra, block_keys, split_extras
from prefixcache_vllm.chain import RequestChain

ROOT = b"r" * 32
TOKENS = list(range(1, 300))
EXTRAS = [Extra("mm", b"cat", 70), Extra("mm", b"dog", 200)]
KEYS = block_keys(ROOT, TOKENS, 64, split_extras(EXTRAS, 64))


def test_grows() -> None:
    for stops in ([4], [1, 2, 3, 4], [2, 4], [3, 4], [4, 2]):
        tokens: list[int] = []
        chain = RequestChain(ROOT, b"f" * 32, 64, tokens, EXTRAS)
        for stop in stops:
            tokens.extend(TOKENS[len(tokens) : stop * 64 + 9])
            assert chain.keys(stop) == KEYS[: stop * 32], stops
        assert chain.made == 4
    assert chain.keys(0) == b""


def test_reads_tokens_only_when_keys_are_wanted() -> None:
    tokens: list[int] = []
    chain = RequestChain(ROOT, b"f" * 32, 64, tokens)
    tokens.extend(TOKENS)
    assert chain.made == 0
    assert chain.keys(4) == block_keys(ROOT, TOKENS, 64)


def test_threads_that_ask_at_once_get_the_same() -> None:
    for _ in range(50):
        chain = RequestChain(ROOT, b"f" * 32, 64, TOKENS, EXTRAS)
        start, got = threading.Barrier(4), dict[int, bytes]()

        def ask(
            blocks: int, chain: RequestChain = chain, start: threading.Barrier = start, got: dict[int, bytes] = got
        ) -> None:
            start.wait()
            got[blocks] = chain.keys(blocks)

        threads = [threading.Thread(target=ask, args=(blocks,)) for blocks in (1, 2, 3, 4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert got == {blocks: KEYS[: blocks * 32] for blocks in (1, 2, 3, 4)}
        assert chain.keys(4) == KEYS
