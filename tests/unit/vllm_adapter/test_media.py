"""Images are what is in them: names, numbers and handles are not believed, and nobody waits for a large one."""

import threading
from collections import UserDict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from prefixcache_vllm import media as module
from prefixcache_vllm.encoder import NO_ENCODER, Encoder
from prefixcache_vllm.media import Media, MediaReader
from tests.unit.vllm_adapter.fakes import FakeRequest, image, until_read

NOW = 100.0


@pytest.fixture
def reader() -> Iterator[MediaReader]:
    made = MediaReader(NO_ENCODER, 1.0)
    yield made
    made.close()


def seeing(name: str, *images: Any) -> FakeRequest:
    return FakeRequest(name, list(range(300)), mm_features=list(images))


def read(reader: MediaReader, name: str, *images: Any) -> Media:
    each = seeing(name, *images)
    media = until_read(lambda: reader.of(each, NOW))
    assert isinstance(media, Media)
    return media


def ids(media: Media) -> list[bytes]:
    return [extra.id for extra in media.extras()]


def made_of(**data: Any) -> Any:
    each = image("any", 10, name=f"a name of its own {id(data)}")
    each.data = UserDict({key: SimpleNamespace(data=value) for key, value in data.items()})
    return each


def test_content_and_nothing_else(reader: MediaReader) -> None:
    first = read(reader, "1", image("cat", 10))
    assert (first.reason, first.limit(), first.extras()[0].offset) == ("", None, 10)
    assert ids(read(reader, "2", image("cat", 10, name="whatever"))) == ids(first)
    assert ids(read(reader, "3", image("cat", 70))) == ids(first), "where it is, is in the extra's offset"
    assert ids(read(reader, "4", image("dog", 10))) != ids(first)
    other = MediaReader(Encoder(b"o" * 32), 1.0)
    assert ids(read(other, "1", image("cat", 10))) != ids(first)
    other.close()


def test_everything_that_the_model_is_given_takes_part(reader: MediaReader) -> None:
    pixels = torch.arange(64.0)
    mask = image("any", 10)
    mask.data = made_of(x=pixels).data
    mask.mm_position = SimpleNamespace(offset=10, length=20, is_embed=torch.tensor([True] * 19 + [False]))
    longer, sound = made_of(x=pixels), made_of(x=pixels)
    longer.mm_position.length, sound.modality = 21, "audio"
    different = [
        made_of(x=pixels), made_of(y=pixels), made_of(x=pixels.view(8, 8)), made_of(x=pixels.to(torch.bfloat16)),
        made_of(x=-pixels), made_of(x=[pixels[:32], pixels[32:]]), made_of(x=[pixels]), made_of(x=pixels, grid=(1, 2)),
        made_of(x=pixels, grid=(12,)), made_of(x=pixels, grid="(1, 2)"), made_of(x=pixels, flag=True),
        made_of(x=pixels, flag=1), made_of(x=pixels, flag=None), made_of(x=pixels.numpy()), made_of(x={"x": pixels}),
        made_of(x=pixels.to(torch.uint8)), made_of(x=pixels, empty=torch.empty(0)), mask, longer, sound,
    ]  # fmt: skip
    found = [ids(read(reader, str(number), each))[0] for number, each in enumerate(different)]
    assert len(set(found)) == len(different)
    assert ids(read(reader, "strided", made_of(x=torch.stack([pixels, pixels], 1)[:, 0])))[0] == found[0]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (None, "media_not_here"),
        (UserDict({"address": SimpleNamespace(data=4096), "monotonic_id": SimpleNamespace(data=7)}), "media_not_here"),
        (UserDict({"image_grid_thw": SimpleNamespace(data=torch.tensor([1, 4, 4]))}), "media_not_here"),
        (UserDict({"x": SimpleNamespace(data=object())}), "media_unknown"),
        (UserDict({"x": SimpleNamespace(data=np.array([object()] * 64))}), "media_unknown"),
        ("pixels", "media_unknown"),
    ],
)
def test_data_that_tells_nothing(reader: MediaReader, data: Any, reason: str) -> None:
    known, unknown = image("cat", 10), image("dog", 100, name="handle")
    unknown.data = data
    first, second = (read(reader, name, known, unknown) for name in "12")
    assert (first.reason, first.limit()) == (reason, 100)
    assert ids(first)[0] == ids(second)[0]
    assert ids(first)[1] != ids(second)[1], "nobody may find it again"
    assert ids(first) == ids(first), "one request has one chain"
    # The encoder keeps something under that name, and nobody looked at it.
    assert read(reader, "3", image("dog", 10, name="handle")).reason == "media_name_reused"


def test_a_name_that_came_to_mean_another(reader: MediaReader) -> None:
    first = read(reader, "1", image("cat", 10, name="x"))
    assert first.limit() is None
    assert read(reader, "2", image("dog", 20, name="x")).reason == "media_name_reused"
    assert first.limit() == 10, "what runs may be given the other one by the encoder's cache"
    assert read(reader, "3", image("cat", 30, name="x")).limit() == 30
    assert read(reader, "4", image("cat", 30, name="y")).limit() is None


def test_an_image_vllm_still_has_is_not_read_again(reader: MediaReader, monkeypatch: pytest.MonkeyPatch) -> None:
    each = image("cat", 10)
    first = read(reader, "1", each)
    monkeypatch.setattr(module, "_content", None)  # may not be called
    assert ids(read(reader, "2", each)) == ids(first)


def test_an_engine_whose_images_cannot_be_told_apart() -> None:
    reader = MediaReader(Encoder(bytes(32), "media_from_elsewhere"), 1.0)
    media = reader.of(seeing("1", image("cat", 10)), NOW)
    assert media is not None
    assert (media.reason, media.limit()) == ("media_from_elsewhere", 10)
    assert reader._thread is None


def test_reading_that_takes_too_long(reader: MediaReader, monkeypatch: pytest.MonkeyPatch) -> None:
    original, go_on = module._content, threading.Event()

    def slow(data: Any) -> bytes:
        assert go_on.wait(30.0)
        return original(data)

    monkeypatch.setattr(module, "_content", slow)
    each = seeing("1", image("cat", 10))
    assert reader.of(each, NOW) is None
    assert reader.of(each, NOW + 0.9) is None
    media = reader.of(each, NOW + 1.0)
    assert media is not None
    assert (media.reason, media.limit()) == ("media_late", 10)
    chain = ids(media)
    other = seeing("2", image("dog", 10, name="digest of cat"))
    assert reader.of(other, NOW) is None
    go_on.set()
    # Once it is read after all, what was decided stays; the name is known for what came under it.
    assert read(reader, "3", image("cat", 10, name="another")).limit() is None
    assert (ids(media), media.limit()) == (chain, 10)
    assert until_read(lambda: reader.of(other, NOW)).reason == "media_name_reused"


def test_a_name_is_believed_again_when_what_was_late_is_read(
    reader: MediaReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, go_on = module._content, threading.Event()
    monkeypatch.setattr(module, "_content", lambda data: (go_on.wait(30.0), original(data))[1])
    go_on.set()
    running = read(reader, "0", image("cat", 10))
    go_on.clear()
    late = seeing("1", image("cat", 10))
    assert reader.of(late, NOW) is None
    assert reader.of(late, NOW + 1.0) is not None
    assert running.limit() == 10, "the encoder may be given what nobody has read"
    go_on.set()
    assert read(reader, "2", image("cat", 10)).limit() is None
    assert running.limit() is None


def test_names_are_forgotten_in_the_end(reader: MediaReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_NAMES", 4)
    for number in range(10):
        read(reader, str(number), image(number, 10))
        reader.forget(str(number))
    assert (len(reader._names), len(reader._requests)) == (4, 0)


def test_the_reading_thread_outlives_data_of_any_form(reader: MediaReader) -> None:
    elsewhere = made_of(x=torch.empty(100, device="meta"))
    plain = image("cat", 10, name="plain")
    plain.data = {"x": SimpleNamespace(data=torch.ones(100))}  # which nothing can refer to weakly
    for each in (elsewhere, plain, SimpleNamespace(identifier="bare", mm_position=None, data=image("cat", 0).data)):
        each.mm_position = each.mm_position or SimpleNamespace(offset=10)
        media = read(reader, str(each.identifier), each)
        assert (media.reason, media.limit()) == ("media_unknown", 10)
    assert read(reader, "last", image("cat", 10)).reason == ""
