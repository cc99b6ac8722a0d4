"""A model that sees images: their placeholder tokens are all the same, so only its text is cached, counted."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, Idefics3ForConditionalGeneration

from .tiny_models import BLOCK, COMMON, cached, plain, prompt

IMAGE_TOKEN = 3
TOWER = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4, "initializer_range": 0.2,
}  # fmt: skip
TEXT = prompt(50, 1).clamp(min=4)
SEEING = torch.cat([TEXT[:, :10], torch.full((1, 4), IMAGE_TOKEN), TEXT[:, 10:]], dim=1)


@pytest.fixture(scope="module")
def seeing() -> Any:
    torch.manual_seed(5)
    config = AutoConfig.for_model(
        "idefics3", text_config=COMMON | {"model_type": "llama"}, vision_config=TOWER, scale_factor=2,
        image_token_id=IMAGE_TOKEN, pad_token_id=0, initializer_range=0.08,
    )  # fmt: skip
    model = Idefics3ForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def pixels(seed: int) -> torch.Tensor:
    return torch.rand((1, 1, 3, 16, 16), generator=torch.Generator().manual_seed(seed)) * 4 - 2


def say(cache: Any, **arguments: Any) -> list[int]:
    said = cache.generate(SEEING, torch.ones_like(SEEING), max_new_tokens=12, do_sample=False, **arguments)
    cache.flush()
    return said[0, SEEING.shape[1] :].tolist()


def test_images_are_left_alone(seeing: Any) -> None:
    cache, opener = cached(seeing)
    said = [say(cache, pixel_values=pixels(seed)) for seed in (1, 2)]
    assert said[0] != said[1], "images that change nothing prove nothing"
    assert cache.stats.reasons == {"other_model_inputs": 2}
    assert len(opener.store) == 0
    for seed in (1, 2):
        with torch.no_grad():
            output, found = cache.prefill(SEEING, torch.ones_like(SEEING), pixel_values=pixels(seed))
        assert found is None
        assert int(output.logits[0, -1].argmax()) == said[seed - 1][0]
    assert cache.stats.reasons == {"other_model_inputs": 4}
    assert len(opener.store) == 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"pixel_values": [pixels(1)]}, "other_model_inputs"),
        ({"pixel_values": {"image": pixels(1).numpy()}}, "other_model_inputs"),
        ({"inputs_embeds": torch.zeros(1, 54, 64)}, "inputs_embeds"),
        ({"position_ids": torch.zeros(1, 54, dtype=torch.long)}, "position_ids"),
    ],
)
def test_whatever_a_model_is_given_beside_tokens(
    seeing: Any, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], reason: str
) -> None:
    cache, opener = cached(seeing)
    monkeypatch.setattr(seeing, "forward", lambda **_: "the model's own answer")
    assert cache.prefill(SEEING, **arguments) == ("the model's own answer", None)
    monkeypatch.setattr(seeing, "generate", lambda *_, **__: "the model's own answer")
    assert cache.generate(SEEING, **arguments) == "the model's own answer"
    assert cache.stats.reasons == {reason: 2}
    assert len(opener.store) == 0


def test_its_text_is_cached(seeing: Any) -> None:
    cache, _ = cached(seeing)
    expected = plain(seeing, TEXT, torch.ones_like(TEXT))
    for _ in range(2):
        said = cache.generate(TEXT, torch.ones_like(TEXT), max_new_tokens=12, do_sample=False)
        cache.flush()
        assert torch.equal(said, expected)
    assert cache.stats.reused == 50 // BLOCK * BLOCK
