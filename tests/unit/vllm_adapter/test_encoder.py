"""What the KV of images depends on beside their pixels: two engines that differ in it have different settings."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prefixcache_vllm.encoder import NO_ENCODER, Encoder, encoder_of

HF = {"text_config": {"hidden_size": 8}, "vision_config": {"depth": 2, "dtype": "float16"}, "scale_factor": 2}


def of(folder: Path, hf: Any = None, ec: Any = None, **multimodal: Any) -> Encoder:
    model = SimpleNamespace(hf_config=HF if hf is None else hf, multimodal_config=SimpleNamespace(**multimodal))
    return encoder_of(SimpleNamespace(model_config=model, ec_transfer_config=ec), folder)


def test_what_changes_what_an_image_becomes(tmp_path: Path) -> None:
    plain = of(tmp_path)
    assert plain.refused == ""
    settings = [
        plain,
        of(tmp_path, mm_device_do_normalize=True),
        of(tmp_path, mm_processor_kwargs={"max_pixels": 4}),
        of(tmp_path, mm_processor_kwargs={"max_pixels": 8}),
        of(tmp_path, video_pruning_rate=0.5),
        of(tmp_path, HF | {"scale_factor": 3}),
        of(tmp_path, HF | {"vision_config": {"depth": 3}}),
    ]
    for mean in ("0.5", "0.4"):
        (tmp_path / "preprocessor_config.json").write_text(f'{{"image_mean": {mean}}}')
        settings.append(of(tmp_path))
    assert len({each.settings for each in settings}) == len(settings)


def test_what_does_not(tmp_path: Path) -> None:
    other = HF | {"text_config": {"hidden_size": 9}, "transformers_version": "6", "vision_config": {"depth": 2}}
    assert of(tmp_path, SimpleNamespace(to_dict=lambda: other)) == of(tmp_path)


def test_encoders_that_cannot_be_told_apart(tmp_path: Path) -> None:
    assert of(tmp_path, ec=object()).refused == "media_from_elsewhere"
    assert of(tmp_path, mm_encoder_attn_dtype="fp8").refused == "media_scales"
    text = SimpleNamespace(hf_config={}, multimodal_config=None)
    assert encoder_of(SimpleNamespace(model_config=text, ec_transfer_config=object()), tmp_path) is NO_ENCODER
