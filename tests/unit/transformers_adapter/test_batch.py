"""Rows and columns: which batches are left-padded, and how far all rows can be cut alike."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prefixcache_transformers.batch import Prompt, common_column, infer_mask, read_prompts

lengths = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 60)), min_size=1, max_size=5)


def rows_of(sizes: list[tuple[int, int]]) -> tuple[list[Prompt], list[int]]:
    """Rows of these (restorable, real) lengths, padded to the longest."""
    longest = max(real for _, real in sizes)
    prompts = [Prompt(longest - real, torch.arange(real).numpy().astype("uint32")) for _, real in sizes]
    return prompts, [min(restorable, real) for restorable, real in sizes]


@given(lengths)
def test_common_column_is_the_largest_that_fits(sizes: list[tuple[int, int]]) -> None:
    prompts, restorable = rows_of(sizes)
    columns = prompts[0].pad + len(prompts[0].tokens)

    def fits(column: int) -> bool:
        return column < columns and all(
            column - prompt.pad <= tokens for prompt, tokens in zip(prompts, restorable, strict=True)
        )

    column = common_column(prompts, restorable)
    useful = [c for c in range(1, columns) if fits(c) and any(c > prompt.pad for prompt in prompts)]
    assert column == max(useful, default=0)


@given(lengths)
def test_left_padded_rows_are_read(sizes: list[tuple[int, int]]) -> None:
    prompts, _ = rows_of(sizes)
    columns = prompts[0].pad + len(prompts[0].tokens)
    ids, mask = torch.full((len(prompts), columns), 77), torch.zeros(len(prompts), columns, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, prompt.pad :] = torch.from_numpy(prompt.tokens.astype("int64"))
        mask[row, prompt.pad :] = 1
    read = read_prompts(ids, mask)
    assert read is not None
    for got, wanted in zip(read, prompts, strict=True):
        assert got.pad == wanted.pad
        assert got.tokens.tolist() == wanted.tokens.tolist()
    assert read_prompts(ids, mask.bool()) is not None


@pytest.mark.parametrize("mask", [[1, 1, 0], [1, 0, 1], [0, 0, 0]], ids=["right padding", "a hole", "an empty row"])
def test_other_rows_are_refused(mask: list[int]) -> None:
    assert read_prompts(torch.tensor([[5, 6, 7], [5, 6, 7]]), torch.tensor([[1, 1, 1], mask])) is None


def test_a_mask_of_another_shape_is_refused() -> None:
    assert read_prompts(torch.tensor([[5, 6, 7]]), torch.ones(1, 4)) is None


def test_without_a_mask_everything_is_real() -> None:
    read = read_prompts(torch.tensor([[0, 6, 7]]), None)
    assert read is not None
    assert read[0].pad == 0
    assert read[0].tokens.tolist() == [0, 6, 7]


def test_inferred_masks() -> None:
    ids = torch.tensor([[0, 0, 7], [5, 6, 7]])
    assert infer_mask(ids, None, ()) is None
    assert infer_mask(ids, 0, (0, 3)) is None
    assert infer_mask(ids, 9, ()) is None
    mask = infer_mask(ids, 0, (3,))
    assert mask is not None
    assert mask.tolist() == [[False, False, True], [True, True, True]]
