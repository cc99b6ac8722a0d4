"""How much a run of the benchmark does, and how it tells where it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Progress = Callable[[str], None]
"""Called with what is being measured now."""


@dataclass(frozen=True)
class Plan:
    """Rounds and sizes of every section."""

    acquire_rounds: int = 400
    acquire_tokens: tuple[int, ...] = (2048, 32768, 131072)
    copy_rounds: int = 40
    copy_blocks: int = 64
    block_bytes: int = 2 << 20
    index_rounds: int = 2000
    index_blocks: tuple[int, ...] = (10_000, 100_000, 1_000_000)
    match_rounds: int = 1000
    match_prompts: int = 10_000
    match_tokens: tuple[int, ...] = (2048, 32768, 131072)
    codec_rounds: int = 15
    codec_texts: int = 4
    codec_prefix: int = 1024
    codec_asked: int = 256
    disk_rounds: int = 9
    disk_blocks: int = 256
    restart_blocks: int = 100_000
    overhead_pairs: int = 40
    overhead_tokens: int = 512
    overhead_new_tokens: int = 16


# Everything runs and nothing is exact: for tests, and to see that an installation works.
QUICK = Plan(
    acquire_rounds=20,
    acquire_tokens=(2048, 4096),
    copy_rounds=3,
    copy_blocks=4,
    index_rounds=50,
    index_blocks=(1_000, 3_200),
    match_rounds=20,
    match_prompts=50,
    match_tokens=(2048, 4096),
    codec_rounds=2,
    codec_texts=1,
    codec_prefix=128,
    codec_asked=32,
    disk_rounds=1,
    disk_blocks=8,
    restart_blocks=1_000,
    overhead_pairs=3,
    overhead_tokens=160,
    overhead_new_tokens=2,
)
