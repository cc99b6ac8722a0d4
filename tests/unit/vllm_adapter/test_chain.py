"""A request's keys: the same however its tokens came, with extras in the block in which they begin."""

from prefixcache.identity.keys import Extra, block_keys, split_extras
from prefixcache_vllm.chain import RequestChain

ROOT = b"r" * 32


def test_grows() -> None:
    tokens = list(range(1, 300))
    extras = [Extra("mm", b"cat", 70), Extra("mm", b"dog", 200)]
    chain = RequestChain(ROOT, b"f" * 32, 64, extras)
    for first in range(0, 299, 37):
        chain.add(tokens[first : first + 37])
    assert chain.tokens == 299
    assert chain.keys() == block_keys(ROOT, tokens, 64, split_extras(extras, 64))
    assert chain.keys(2) == chain.keys()[:64]
