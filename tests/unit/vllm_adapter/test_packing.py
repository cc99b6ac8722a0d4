"""Forms of KV cache tensors: those that are known are covered by test_pages, others are refused."""

from collections.abc import Callable

import pytest
import torch

from prefixcache_vllm import packing
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


@pytest.mark.parametrize("dims", [(2, 10, 16, 16, 64), (10, 2, 16, 16, 64)])
def test_off_the_cpu_tokens_come_before_heads(dims: tuple[int, ...]) -> None:
    ((_, axes, holds),) = layer_views(torch.zeros(dims, device="meta"), PageShape(16, 16, 64, 64))
    assert (axes, holds) == ("cbthd" if dims[0] == 2 else "bcthd", "kv")


# vLLM's operation per instruction set: where it keeps value d of token t of a page of `tokens` tokens of `dim` values.
Place = Callable[[int, int, int, int], int]
AMX_K: Place = lambda t, d, tokens, dim: ((t // 16) * (dim // 2) + d // 2) * 32 + (t % 16) * 2 + d % 2  # noqa: E731
AMX_V: Place = lambda t, d, tokens, dim: (d // 16) * tokens * 16 + (t // 2) * 32 + (d % 16) * 2 + t % 2  # noqa: E731
BY_TOKEN: Place = lambda t, d, tokens, dim: t * dim + d  # noqa: E731
BY_VALUE: Place = lambda t, d, tokens, dim: d * tokens + t  # noqa: E731
NEON: Place = lambda t, d, tokens, dim: (t // 8) * dim * 8 + d * 8 + t % 8  # noqa: E731


def writes(k_place: Place, v_place: Place) -> Callable[..., None]:
    """An operation that packs so, in place of vLLM's."""

    def write(page: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache_dtype: str) -> None:
        _, heads, tokens, double = page.shape
        dim = double // 2
        flat = page.view(heads, 2, tokens * dim)
        for which, (source, place) in enumerate(((key, k_place), (value, v_place))):
            stored = source.to(torch.float8_e4m3fn).view(torch.uint8) if cache_dtype == "fp8" else source
            at = torch.tensor([[place(t, d, tokens, dim) for d in range(dim)] for t in range(tokens)])
            flat[:, which][:, at.reshape(-1)] = stored.transpose(0, 1).reshape(heads, -1)

    return write


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize(
    ("k_place", "v_place", "expected"),
    [(AMX_K, AMX_V, "amx"), (BY_VALUE, BY_TOKEN, "k_transposed"), (BY_TOKEN, BY_TOKEN, "plain")],
    ids=["amx", "avx", "plain"],
)
def test_a_packing_is_found_by_trying(
    monkeypatch: pytest.MonkeyPatch, cache_dtype: str, k_place: Place, v_place: Place, expected: str
) -> None:
    monkeypatch.setattr(packing, "_write_page", writes(k_place, v_place))
    assert packing.cpu_packing(torch.bfloat16, [SHAPE], cache_dtype, 64) == expected


@pytest.mark.parametrize(("k_place", "v_place"), [(NEON, NEON), (AMX_K, BY_TOKEN), (AMX_V, AMX_K)])
def test_a_packing_that_is_not_known_is_not_guessed(
    monkeypatch: pytest.MonkeyPatch, k_place: Place, v_place: Place
) -> None:
    monkeypatch.setattr(packing, "_write_page", writes(k_place, v_place))
    with pytest.raises(UnknownFormError) as error:
        packing.cpu_packing(torch.bfloat16, [SHAPE], "auto", 64)
    assert error.value.reason == "cpu_packing"


def test_layers_that_are_packed_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM packs by head size and page size, too."""

    def write(page: torch.Tensor, *rest: object) -> None:
        wide = page.shape[3] == 2 * SHAPE.k_dim
        (writes(AMX_K, AMX_V) if wide else writes(BY_VALUE, BY_TOKEN))(page, *rest)

    monkeypatch.setattr(packing, "_write_page", write)
    other = PageShape(1, 32, 80, 80)
    assert packing.cpu_packing(torch.bfloat16, [SHAPE, PageShape(1, 16, 576, 0)], "auto", 64) == "amx"
    assert packing.cpu_packing(torch.bfloat16, [other], "auto", 64) == "k_transposed"
    with pytest.raises(UnknownFormError, match="several ways: amx, k_transposed"):
        packing.cpu_packing(torch.bfloat16, [SHAPE, other], "auto", 64)


def test_blocks_that_cut_through_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_write_page", writes(AMX_K, AMX_V))
    with pytest.raises(UnknownFormError, match="multiple"):
        packing.cpu_packing(torch.bfloat16, [SHAPE], "auto", 40)
    monkeypatch.setattr(packing, "_write_page", writes(BY_VALUE, BY_TOKEN))
    assert packing.cpu_packing(torch.bfloat16, [SHAPE], "auto", 40) == "k_transposed"


def test_mla_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_write_page", None)
    assert packing.cpu_packing(torch.bfloat16, [PageShape(1, 16, 576, 0)], "auto", 64) == "plain"


@pytest.mark.parametrize(("tokens", "dim"), [(24, 64), (32, 40)])
def test_pages_that_are_not_made_of_tiles(tokens: int, dim: int) -> None:
    with pytest.raises(UnknownFormError):
        layer_views(torch.zeros(4, 2, tokens, 2 * dim), PageShape(2, tokens, dim, dim), "amx")


def test_what_vllm_itself_cannot_keep_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise NotImplementedError("FP8 wants a larger processor")

    monkeypatch.setattr(packing, "_write_page", refuse)
    with pytest.raises(packing.UnknownFormError, match="larger processor") as error:
        packing.cpu_packing(torch.bfloat16, [SHAPE], "fp8_e4m3", 64)
    assert error.value.reason == "cpu_packing"
