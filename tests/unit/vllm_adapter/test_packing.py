"""Forms of KV cache tensors: those that are known are covered by test_pages, others are refused."""

import pytest
import torch

from prefixcache_vllm.packing import PageShape, UnknownFormError, layer_views

SHAPE = PageShape(2, 32, 64, 64)


@pytest.mark.parametrize(
    "dims",
    [
        (10, 2, 32, 64),  # half of the values
        (10, 3, 32, 128),  # another number of heads
        (3, 10, 32, 2, 64),
        (10, 32, 128),
    ],
)
def test_refused(dims: tuple[int, ...]) -> None:
    with pytest.raises(UnknownFormError) as error:
        layer_views(torch.zeros(dims), SHAPE)
    assert error.value.reason == "kv_cache_form"


def test_heads_and_tokens_that_look_alike_are_not_guessed() -> None:
    with pytest.raises(UnknownFormError):
        layer_views(torch.zeros(2, 10, 16, 16, 64), PageShape(16, 16, 64, 64))


def test_strided_pages_are_not_taken_for_packed_ones() -> None:
    pages = torch.zeros(10, 32, 2, 128).transpose(1, 2)
    with pytest.raises(UnknownFormError):
        layer_views(pages, SHAPE, "k_transposed")
    ((tensor, axes, holds),) = layer_views(pages, SHAPE)
    assert (tensor.shape, axes, holds) == (pages.shape, "bhtd", "kv")


@pytest.mark.parametrize("dims", [(10, 16, 576), (10, 1, 16, 576)])
def test_mla_is_one_head_without_v(dims: tuple[int, ...]) -> None:
    ((_, axes, holds),) = layer_views(torch.zeros(dims), PageShape(1, 16, 576, 0))
    assert (axes.replace("1", ""), holds) == ("btd", "k")
