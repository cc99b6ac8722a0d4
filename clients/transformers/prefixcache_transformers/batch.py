"""Prompts as rows of a left-padded batch, and the common column at which reuse ends.

What belongs here: integers about one batch. It must not know tensors of states, stores or models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Prompt", "common_column", "infer_mask", "read_prompts"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row: `pad` columns of padding, then these token ids (u32[tokens])."""

    pad: int
    tokens: npt.NDArray[np.uint32]


def infer_mask(input_ids: torch.Tensor, pad_id: int | None, eos_ids: Sequence[int]) -> torch.Tensor | None:
    """The mask that `generate` infers when none is given: padding is masked unless it is also an end token."""
    if pad_id is None or pad_id in eos_ids:
        return None
    mask = input_ids.ne(pad_id)
    return mask if not bool(mask.all()) else None


def read_prompts(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> list[Prompt] | None:
    """The rows of a batch [rows, columns]; None where rows are not left-padded (holes, right padding, empty rows)."""
    ids = input_ids.detach().cpu().numpy().astype(np.uint32)
    rows, columns = ids.shape
    if attention_mask is None:
        return [Prompt(0, row) for row in ids]
    if attention_mask.shape != input_ids.shape:
        return None
    mask = attention_mask.detach().cpu().numpy() != 0
    pads = columns - mask.sum(axis=1)
    prompts = []
    for row in range(rows):
        pad = int(pads[row])
        if pad == columns or not mask[row, pad:].all():
            return None
        prompts.append(Prompt(pad, ids[row, pad:]))
    return prompts


def common_column(prompts: Sequence[Prompt], restorable: Sequence[int]) -> int:
    """The largest column up to which every row is padding or restorable tokens, leaving one column to compute."""
    columns = prompts[0].pad + len(prompts[0].tokens)
    ends = [prompt.pad + tokens for prompt, tokens in zip(prompts, restorable, strict=True)]
    column = min([columns - 1, *ends])
    # Padding alone is not worth a cache.
    return column if any(column > prompt.pad for prompt in prompts) else 0
