"""What tests with images do inside the engine's process; see scenarios.py. An image is named by a number, its seed."""

from functools import cache
from typing import Any

from tests.engines import models, scenarios


def see(llm: Any, prompt: list[int], images: list[int], max_tokens: int = 16, **fields: Any) -> dict[str, Any]:
    """The greedy output of a prompt in which each IMAGE_TOKEN stands for an image. `fields`: of the prompt
    (multi_modal_uuids, cache_salt)."""
    _count_whole_images()
    pictures = {"multi_modal_data": {"image": [_picture(seed) for seed in images]}} if images else {}
    return scenarios.generate(llm, [prompt], max_tokens, **pictures, **fields)[0]


def names(llm: Any, prompt: list[int], images: list[int], **fields: Any) -> list[str]:
    """What vLLM calls these images."""
    return [str(each.identifier) for each in _request(llm, prompt, images, **fields).mm_features]


def placeholders(llm: Any, prompt: list[int]) -> list[int]:
    """A prompt as the model gets it, with what stands for its images."""
    return list(_request(llm, prompt, [1] * prompt.count(models.IMAGE_TOKEN)).prompt_token_ids)


def _request(llm: Any, prompt: list[int], images: list[int], **fields: Any) -> Any:
    """What becomes of a prompt on its way to the scheduler. Salted: it finds nothing and nobody finds it."""
    seen: list[Any] = []
    scheduler = scenarios._core(llm).scheduler
    add = scheduler.add_request

    def noted(request: Any) -> None:
        seen.append(request)
        add(request)

    scheduler.add_request = noted
    see(llm, prompt, images, max_tokens=1, cache_salt="looked at", **fields)
    scheduler.add_request = add
    return seen[0]


@cache
def _count_whole_images() -> None:
    """Transformers says that an image which is not cut is cut into 0 pieces, and vLLM before 0.32 then encodes none."""
    from vllm.model_executor.models.idefics3 import Idefics3ProcessingInfo

    original = Idefics3ProcessingInfo.get_num_patches

    def at_least_one(self: Any, **image: Any) -> int:
        return max(1, int(original(self, **image)))

    Idefics3ProcessingInfo.get_num_patches = at_least_one


def _picture(seed: int) -> Any:
    import numpy as np
    from PIL import Image

    side = models.IMAGE_SIZE
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8))
