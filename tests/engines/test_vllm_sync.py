"""Loads inside the step (`prefixcache.load` "sync"): the same tokens, also where a load fails and the step has computed
on whatever its pages held."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.processes import DaemonProcess
from tests.engines.conftest import Checkpoints
from tests.engines.test_vllm import PATIENT, prompt
from tests.engines.vllm_engine import Engine, Output

LONG = prompt(1, 700)
FORKED = prompt(2, 700, like=LONG[:512])
LONGER = prompt(3, 900, like=LONG[:640])


@pytest.fixture(scope="module")
def engine(
    shared_daemon: DaemonProcess, checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    log = tmp_path_factory.mktemp("sync") / "log"
    settings = {"max_num_batched_tokens": 512, "connector": PATIENT | {"load": "sync"}}
    with Engine(checkpoints("llama"), f"unix://{shared_daemon.socket}", log=log, **settings) as engine:
        yield engine


@pytest.fixture(scope="module")
def cold(engine: Engine) -> dict[str, Output]:
    """Computed; blocks of this salt are nobody's prefix."""
    named = {"long": LONG, "forked": FORKED, "longer": LONGER}
    found = {name: engine.one(each, cache_salt=f"cold {name}") for name, each in named.items()}
    assert all(each.cached == 0 and len(set(each.tokens)) > 8 for each in found.values())
    engine.one(LONG)
    engine.call("settle")
    return found


def test_a_prefix_is_loaded_in_its_step(engine: Engine, cold: dict[str, Output]) -> None:
    loaded = engine.one(LONG)
    assert (loaded.tokens, loaded.cached) == (cold["long"].tokens, 640)
    forked = engine.one(FORKED)
    assert (forked.tokens, forked.cached) == (cold["forked"].tokens, 512)
    engine.call("settle")


def test_several_load_in_one_step(engine: Engine, cold: dict[str, Output]) -> None:
    first, other, second = engine.generate(LONG, prompt(50, 40), LONG, max_tokens=4)
    assert (first.cached, other.cached, second.cached) == (640, 0, 640)
    assert first.tokens[0] == second.tokens[0] == cold["long"].tokens[0]
    engine.call("settle")


def test_a_step_whose_load_failed_is_computed_and_nothing_of_it_is_stored(
    engine: Engine, cold: dict[str, Output]
) -> None:
    """The prompt goes on behind what fails to load, so the step computes and would store blocks of its own."""
    before = engine.call("counts")["reasons"].get("load_failed", 0)
    broken = Output(**engine.call("break_loads", prompt=LONGER, max_tokens=16))
    assert (broken.tokens, broken.finish_reason) == (cold["longer"].tokens, "length")
    assert engine.call("counts")["reasons"]["load_failed"] > before
    engine.call("settle")
    again = engine.one(LONGER)
    assert again.tokens == cold["longer"].tokens, "blocks of the step that failed were stored"
    assert again.cached >= 640
    engine.call("settle")
    counts = engine.call("counts")
    assert (counts["entries"], counts["pinned_bytes"], counts["engine_requests"]) == (0, 0, 0)


def test_what_is_computed_afterwards_is_shared_again(engine: Engine, cold: dict[str, Output]) -> None:
    engine.one(LONGER)
    engine.call("settle")
    whole = engine.one(LONGER)
    assert (whole.tokens, whole.cached) == (cold["longer"].tokens, 896)
    assert "prefixcache is off" not in Path(engine.log).read_text()
