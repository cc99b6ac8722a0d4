"""Two worker processes with SmolLM2-135M and one daemon: the same output as without it, and the prefix is reused."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from prefixcache_transformers.smollm2 import ensure_smollm2

from .transformers_setup import DaemonProcess, Worker, python_with_transformers_4, shared_prompts, workers

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(1200)]

BLOCK = 64
SHARED = 2000
WHOLE = SHARED // BLOCK * BLOCK
PROMPTS = 20
NEW_TOKENS = 8


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return ensure_smollm2()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    daemon = DaemonProcess(tmp_path_factory.mktemp("daemon"), 1 << 30)
    daemon.start()
    yield daemon
    daemon.end()


@pytest.fixture(scope="module")
def pair(daemon: DaemonProcess, checkpoint: Path) -> Iterator[list[Worker]]:
    python = Path(sys.executable)
    with workers([python, python], checkpoint, daemon.address, "float32", daemon.folder) as started:
        yield started


def both(pair: list[Worker], prompts: list[list[int]], *, cached: bool) -> list[tuple[list[int], int]]:
    """Every second prompt by each worker, both at the same time; answers in the order of the prompts."""
    with ThreadPoolExecutor(len(pair)) as pool:
        halves = pool.map(
            lambda number: [pair[number].generate(ids, NEW_TOKENS, cached=cached) for ids in prompts[number::2]],
            range(2),
        )
    first, second = halves
    return [(first, second)[i % 2][i // 2] for i in range(len(prompts))]


def test_twenty_prompts_share_a_system_prompt(pair: list[Worker], checkpoint: Path) -> None:
    prompts = shared_prompts(checkpoint, PROMPTS)
    assert len({len(ids) for ids in prompts}) > 8
    assert len({tuple(ids) for ids in prompts}) == PROMPTS
    expected = both(pair, prompts, cached=False)
    assert len({tuple(said) for said, _ in expected}) > 5, "a model that always says the same proves nothing"
    first, reused = pair[0].generate(prompts[0], NEW_TOKENS)
    assert (first, reused) == (expected[0][0], 0)
    answers = both(pair, prompts, cached=True)
    for ids, (said, _), (again, reused) in zip(prompts, expected, answers, strict=True):
        assert again == said
        assert reused >= WHOLE
        assert len(ids) - reused >= 1


@pytest.mark.parametrize(
    ("length", "expected_reuse"),
    [(20, 0), (BLOCK - 1, 0), (BLOCK, BLOCK - 1), (3 * BLOCK, 3 * BLOCK - 1), (3 * BLOCK + 1, 3 * BLOCK)],
    ids=["shorter than a block", "one token short", "one block", "exactly n blocks", "to the last token"],
)
def test_boundaries(pair: list[Worker], checkpoint: Path, length: int, expected_reuse: int) -> None:
    ids = shared_prompts(checkpoint, 1)[0][length : 2 * length]  # text of its own for each length
    expected, _ = pair[0].generate(ids, NEW_TOKENS, cached=False)
    said, reused = pair[0].generate(ids, NEW_TOKENS)
    assert (said, reused) == (expected, 0)
    said, reused = pair[1].generate(ids, NEW_TOKENS)
    assert said == expected
    assert reused == expected_reuse


def test_stored_bytes_stay_as_they_are(pair: list[Worker], checkpoint: Path) -> None:
    ids = shared_prompts(checkpoint, 1)[0][100:500]
    pair[0].generate(ids)
    before = pair[0].ask("stored", ids=ids)
    assert before["blocks"] == len(ids) // BLOCK
    for worker in pair:
        assert worker.generate(ids)[1] == len(ids) // BLOCK * BLOCK
    assert [worker.ask("stored", ids=ids) for worker in pair] == [before, before]


def test_bfloat16_logits_are_those_of_a_cache_in_memory(daemon: DaemonProcess, checkpoint: Path) -> None:
    first, *others = shared_prompts(checkpoint, 4)
    python = Path(sys.executable)
    with workers([python, python], checkpoint, daemon.address, "bfloat16", daemon.folder) as (writer, reader):
        assert writer.ask("logits", ids=first, cached=True)["reused"] == 0
        for second in [*others, first[:WHOLE]]:
            cut = min(WHOLE, len(second) - 1)
            answer = reader.ask("logits", ids=second, cached=True)
            assert answer["reused"] == cut
            assert answer["sha256"] == reader.ask("oracle", first=first, second=second, cut=cut)["sha256"]


def test_workers_outlive_the_daemon(checkpoint: Path, tmp_path: Path) -> None:
    """Killed with -9 while both workers hold its memory: they compute, and hit again when it is back."""
    from signal import SIGKILL

    ids = shared_prompts(checkpoint, 1)[0][:300]
    daemon = DaemonProcess(tmp_path, 64 << 20)
    daemon.start()
    with workers([Path(sys.executable)] * 2, checkpoint, daemon.address, "float32", tmp_path) as pair:
        expected, _ = pair[0].generate(ids, NEW_TOKENS, cached=False)
        assert pair[0].generate(ids, NEW_TOKENS) == (expected, 0)
        assert pair[1].generate(ids, NEW_TOKENS) == (expected, 300 // BLOCK * BLOCK)
        daemon.end(SIGKILL)
        for worker in pair:
            assert worker.generate(ids, NEW_TOKENS) == (expected, 0)
        daemon.start()
        try:
            hits = 0
            for _ in range(8):  # the SDK tries again when its breaker lets it; each round is one request of each
                hits = sum(worker.generate(ids, NEW_TOKENS) == (expected, 300 // BLOCK * BLOCK) for worker in pair)
                if hits == 2:
                    break
            assert hits == 2
        finally:
            daemon.end()


@pytest.mark.skipif(python_with_transformers_4() is None, reason="`make test` builds the environment with 4.57")
def test_transformers_4_and_5_share_blocks(daemon: DaemonProcess, checkpoint: Path) -> None:
    old = python_with_transformers_4()
    assert old is not None
    prompts = [ids[200:] for ids in shared_prompts(checkpoint, 4)]  # not what other tests stored
    pythons = [Path(sys.executable), old]
    with workers(pythons, checkpoint, daemon.address, "float32", daemon.folder) as pair:
        assert [worker.info["version"].split(".")[0] for worker in pair] == ["5", "4"]
        assert pair[0].info["fingerprint"] == pair[1].info["fingerprint"]
        expected = both(pair, prompts, cached=False)
        pair[0].generate(prompts[0], NEW_TOKENS)
        for (said, _), (again, reused) in zip(expected, both(pair, prompts, cached=True), strict=True):
            assert again == said
            assert reused >= (SHARED - 200) // BLOCK * BLOCK
        # And the other way round: stored by 4.57, read by 5.x.
        ids = prompts[1][50:700]
        expected_5, _ = pair[0].generate(ids, NEW_TOKENS, cached=False)
        assert pair[1].generate(ids, NEW_TOKENS)[1] == 0
        assert pair[0].generate(ids, NEW_TOKENS) == (expected_5, len(ids) // BLOCK * BLOCK)
