"""Images in vLLM: their placeholder tokens are all the same, so what is shared must be told by what is in the images.

The first engine computes, with both of vLLM's own caches off: it then numbers images instead of naming them by content.
The second one is a process that saw none of it and has vLLM's caches; the third numbers images as the first one does.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.processes import DaemonProcess
from tests.engines.conftest import Checkpoints
from tests.engines.models import IMAGE_TOKEN, IMAGE_TOKENS
from tests.engines.test_vllm import prompt
from tests.engines.vllm_engine import Engine, Output

SETTINGS = {"skip_tokenizer_init": False, "max_model_len": 1024, "block_size": 64}
NUMBERED = SETTINGS | {"mm_processor_cache_gb": 0, "max_num_batched_tokens": 256}
MIDDLE = [*prompt(1, 100), IMAGE_TOKEN, *prompt(2, 150)]
BEGINNING = [IMAGE_TOKEN, *prompt(3, 200)]
TWO = [*prompt(4, 10), IMAGE_TOKEN, *prompt(5, 30), IMAGE_TOKEN, *prompt(6, 120)]
"""The second image begins in the third block."""
SHORT = [*MIDDLE[:101], *prompt(7, 5)]
"""The last whole block ends inside of the image."""
LONGER = [*MIDDLE[:101], *prompt(8, 150)]
WHOLE = {tuple(MIDDLE): 320, tuple(BEGINNING): 256, tuple(TWO): 320, tuple(SHORT): 192, tuple(LONGER): 320}


class Engines:
    """The engines of this file; what the first one said is said[prompt, images]."""

    def __init__(self, first: Engine, said: dict[tuple[tuple[int, ...], tuple[int, ...]], Output]) -> None:
        self.first, self.said = first, said


def see(engine: Engine, asked: list[int], *images: int, **fields: object) -> Output:
    return Output(**engine.call("image_scenarios:see", prompt=asked, images=list(images), **fields))


def cold(engine: Engine, asked: list[int], *images: int) -> list[int]:
    """What is said when nothing is loaded: with a salt that nobody had."""
    computed = see(engine, asked, *images, cache_salt=f"cold {images} {asked[-1]}")
    assert computed.cached == 0
    return computed.tokens


@pytest.fixture(scope="module")
def engines(
    shared_daemon: DaemonProcess, checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    log = tmp_path_factory.mktemp("first") / "log"
    with Engine(checkpoints("idefics3"), f"unix://{shared_daemon.socket}", log=log, **NUMBERED) as first:
        yield Engines(first, {})


@pytest.mark.parametrize(
    ("asked", "images", "shared"),
    [
        (MIDDLE, (1,), 0),
        (MIDDLE, (2,), 64),  # the text in front of the image
        (BEGINNING, (1,), 0),
        (BEGINNING, (2,), 0),
        (TWO, (1, 2), 0),
        (TWO, (1, 3), 128),  # the first image, and the text behind it
        (TWO, (2, 1), 0),
        (SHORT, (4,), 64),
        (LONGER, (4,), 192),  # the rest of the image is computed
    ],
)
def test_an_image_is_none_that_was_seen(
    engines: Engines, asked: list[int], images: tuple[int, ...], shared: int
) -> None:
    found = see(engines.first, asked, *images)
    assert found.cached == shared
    others = [said for (prompt, _), said in engines.said.items() if prompt == tuple(asked)]
    assert found.tokens not in [said.tokens for said in others], "images that change nothing prove nothing"
    assert found.tokens == cold(engines.first, asked, *images)
    engines.first.call("settle")
    engines.said[tuple(asked), images] = found


def test_the_same_image_is_found_again(engines: Engines) -> None:
    for (asked, images), said in engines.said.items():
        found = see(engines.first, list(asked), *images)
        assert (found.cached, found.tokens) == (WHOLE[asked], said.tokens)
        assert see(engines.first, list(asked), *images, cache_salt=f"{images} {asked[-1]}").cached == 0
    engines.first.call("settle")


def test_placeholders_without_an_image_are_text(engines: Engines) -> None:
    ids = engines.first.call("image_scenarios:placeholders", prompt=MIDDLE)
    assert len(ids) == len(MIDDLE) - 1 + IMAGE_TOKENS
    assert engines.first.one(ids).cached == 64


def test_what_clients_call_an_image_is_not_believed(engines: Engines) -> None:
    one = see(engines.first, MIDDLE, 5, multi_modal_uuids={"image": ["cat"]})
    engines.first.call("settle")
    again = see(engines.first, MIDDLE, 5, multi_modal_uuids={"image": ["another"]})
    assert (again.cached, again.tokens) == (WHOLE[tuple(MIDDLE)], one.tokens), "one image under two names is one"
    other = see(engines.first, MIDDLE, 6, multi_modal_uuids={"image": ["another"]})
    assert other.cached == 64, "another image under a name that was taken"


def test_a_name_that_was_taken_is_nobodys(engines: Engines) -> None:
    dog = {"multi_modal_uuids": {"image": ["dog"]}}
    asked = [*prompt(10, 10), IMAGE_TOKEN]
    if engines.first.call("image_scenarios:names", prompt=asked, images=[8], **dog) != ["dog"]:
        pytest.skip("this vLLM, with its caches off, numbers images whatever clients call them")
    before = engines.first.call("counts")
    assert see(engines.first, MIDDLE, 9, **dog).cached == 64
    engines.first.call("settle")
    counts = engines.first.call("counts")
    assert counts["skipped"]["media_name_reused"] == before["skipped"].get("media_name_reused", 0) + 1
    # What the model saw of it depends on what vLLM's encoder cache had: from the image on nothing is stored.
    assert see(engines.first, MIDDLE, 9).cached == 64
    assert counts["loaded_tokens"] == before["loaded_tokens"] + 64


def test_another_process_reads_them(
    engines: Engines, shared_daemon: DaemonProcess, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    settings = SETTINGS | {"enable_prefix_caching": True}
    with Engine(checkpoints("idefics3"), f"unix://{shared_daemon.socket}", log=tmp_path / "log", **settings) as second:
        for (asked, images), said in engines.said.items():
            loaded = see(second, list(asked), *images)
            assert (loaded.cached, loaded.tokens) == (WHOLE[asked], said.tokens)
            # With a salt of its own the same is computed, and then found in vLLM's cache: the oracle.
            salt = f"own {images} {asked[-1]}"
            assert see(second, list(asked), *images, cache_salt=salt).cached == 0
            own = see(second, list(asked), *images, cache_salt=salt)
            assert own.cached == loaded.cached
            assert own.logprobs == loaded.logprobs
        assert second.call("counts")["skipped"] == {}
        new = see(second, MIDDLE, 7)
        assert (new.cached, new.tokens) == (64, cold(engines.first, MIDDLE, 7))


def test_numbers_of_another_process_are_no_names(
    engines: Engines, shared_daemon: DaemonProcess, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    with Engine(checkpoints("idefics3"), f"unix://{shared_daemon.socket}", log=tmp_path / "log", **NUMBERED) as third:
        names = third.call("image_scenarios:names", prompt=[*prompt(9, 10), IMAGE_TOKEN], images=[9])
        assert "mm" in names[0], "this vLLM numbers nothing: the test shows nothing"
        for number in range(10, 13):  # other images, in the order in which the first engine had some
            new = see(third, MIDDLE, number)
            assert new.cached == 64
            assert new.tokens == cold(engines.first, MIDDLE, number)
