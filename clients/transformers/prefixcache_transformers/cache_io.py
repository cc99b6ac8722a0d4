"""Between a transformers cache and blocks in canonical order: restore what was stored, snapshot what was computed.

Rules:
1. Rows are left-padded, so all rows end at the same column. A cut at column C keeps `C - pad` tokens of a row; zeros
   stand where the mask hides everything anyway (the padding, and what lies before a sliding window).
2. Restored tensors are new memory into which blocks are copied; snapshots are only read. No memory is a store's own.
3. One part per layer group. Tokens are counted from a row's first real token, columns from the batch's first column.

What belongs here: tensors and their strides. It must not know keys, models or what a miss is.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache

from prefixcache.identity.layout import LayerGroup
from prefixcache_transformers import compat
from prefixcache_transformers.block_store import BlockLease, PartBlocks
from prefixcache_transformers.probe import CacheShape

__all__ = ["RestoredRow", "Snapshot", "needed_from", "restore", "take_snapshot"]

MAX_STAGING_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class RestoredRow:
    """What to restore of one row. `leases`: later blocks first; together they hold all blocks the row needs."""

    pad: int
    tokens: int
    leases: tuple[BlockLease, ...] = ()


def needed_from(group: LayerGroup, tokens: int) -> int:
    """The first token that the next query of a group can see when `tokens` are restored."""
    return max(0, tokens - (group.window_tokens - 1)) if group.window_tokens else 0


def restore(
    cache: DynamicCache, shape: CacheShape, block_tokens: int, rows: Sequence[RestoredRow], column: int
) -> bool:
    """Fill an empty cache with the first `column` columns of a batch. False: nothing was put into the cache."""
    parts = [_GroupBuffer(group, shape.dtype, block_tokens, rows, column) for group in shape.layout.groups]
    for index, row in enumerate(rows):
        targets: dict[int, list[PartBlocks]] = {}
        for part, buffer in enumerate(parts):
            for number, piece in _readings(row, part, buffer.blocks(row)):
                targets.setdefault(number, []).append(PartBlocks(part, piece.start, buffer.targets(index, piece)))
        if not all(row.leases[number].copy_to(wanted) for number, wanted in targets.items()):
            return False
    # All of it first: a device without room for the last layer must not leave a cache that is half filled.
    states = [list(buffer.states(device)) for buffer, device in zip(parts, shape.devices, strict=True)]
    for group, layers in zip(shape.layout.groups, states, strict=True):
        for layer, (keys, values) in zip(group.layers, layers, strict=True):
            compat.fill_layer(cache.layers[layer], keys, values, column)
    return True


def _readings(row: RestoredRow, part: int, blocks: range) -> Iterator[tuple[int, range]]:
    """Which lease to read which blocks from: the first that holds them."""
    stop = blocks.stop
    for number, lease in enumerate(row.leases):
        start = max(blocks.start, lease.first_block(part))
        if start < stop:
            yield number, range(start, stop)
            stop = start


class _GroupBuffer:
    """The states of one group for a whole batch: [layer, k|v, row, kv_head, column, dim], from column `first` on.

    Where K and V differ in size there is one such tensor for each, and blocks pass through a staging copy.
    """

    def __init__(
        self, group: LayerGroup, dtype: torch.dtype, block_tokens: int, rows: Sequence[RestoredRow], column: int
    ) -> None:
        self.group = group
        self.column = column
        self._block_tokens = block_tokens
        self._rows = rows
        self._kept = min(column, group.window_tokens - 1) if group.window_tokens else column
        spans = [self._span(row) for row in rows]
        self._first = min([column - self._kept, *(start for start, _ in spans)])
        width = max([column, *(stop for _, stop in spans)]) - self._first
        dims = [group.k_dim] if group.k_dim == group.v_dim else [group.k_dim, group.v_dim]
        pair = 2 // len(dims)
        head = (len(group.layers), pair, len(rows), group.kv_heads, width)
        self._states = [torch.empty(*head, dim, dtype=dtype) for dim in dims]
        self._staged: list[tuple[list[torch.Tensor], torch.Tensor]] = []
        for index, (start, _) in enumerate(spans):
            for tensor in self._states:
                tensor[:, :, index, :, : start - self._first].zero_()

    def blocks(self, row: RestoredRow) -> range:
        """Blocks of a row that its restored tokens need."""
        first = needed_from(self.group, row.tokens) // self._block_tokens
        return range(first, -(-row.tokens // self._block_tokens))

    def targets(self, index: int, blocks: range) -> torch.Tensor:
        """Where the blocks of row `index` go: [block, kv_head, layer, k and v of a block]."""
        size, group = self._block_tokens, self.group
        begin = self._rows[index].pad - self._first
        columns = slice(begin + blocks.start * size, begin + blocks.stop * size)
        # [layer, k|v, kv_head, block, token, dim], one or two of them
        views = [torch.unflatten(state[:, :, index, :, columns], 3, (len(blocks), size)) for state in self._states]
        if len(views) == 1:
            return views[0].permute(3, 2, 0, 1, 4, 5)
        halves = [view[:, 0].permute(2, 1, 0, 3, 4) for view in views]
        shape = (len(blocks), group.kv_heads, len(group.layers), size * (group.k_dim + group.v_dim))
        staging = torch.empty(shape, dtype=halves[0].dtype)
        self._staged.append((halves, staging))
        return staging

    def states(self, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(keys, values) of each layer, [row, kv_head, kept column, dim], on `device`. Call once, after the copies."""
        for halves, staging in self._staged:
            sizes = [half.shape[-2] * half.shape[-1] for half in halves]
            for half, flat in zip(halves, torch.split(staging, sizes, dim=-1), strict=True):
                half.copy_(torch.unflatten(flat, -1, half.shape[-2:]))
        stop = self.column - self._first
        kept = [state[..., stop - self._kept : stop, :].to(device) for state in self._states]
        for layer in range(len(self.group.layers)):
            yield kept[0][layer, 0], kept[-1][layer, -1]

    def _span(self, row: RestoredRow) -> tuple[int, int]:
        """Columns that the blocks of a row fill; for a row with nothing to restore, none at the very end."""
        blocks = self.blocks(row)
        if not blocks:
            return self.column, self.column
        return row.pad + blocks.start * self._block_tokens, row.pad + blocks.stop * self._block_tokens


_Pieces = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]


class Snapshot:
    """States of a finished request, kept alive until they are stored."""

    def __init__(
        self, shape: CacheShape, block_tokens: int, pieces: Sequence[Sequence[_Pieces]], first_columns: Sequence[int]
    ) -> None:
        """`pieces`: by group, by layer, (keys, values), each in pieces [row, kv_head, columns, dim] that follow each
        other from the group's `first_columns` on."""
        self.shape = shape
        self.block_tokens = block_tokens
        self._pieces = pieces
        self._first_columns = first_columns

    @functools.cached_property
    def _states(self) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
        """By group, by layer: (keys, values). Joined when they are stored, not while somebody waits for the answer."""
        return [[(_joined(keys), _joined(values)) for keys, values in group] for group in self._pieces]

    def parts(self, row: int, pad: int, blocks: range) -> Iterator[list[PartBlocks]]:
        """All parts of these blocks of a row, in canonical order and in pieces of bounded size."""
        block_bytes = self.shape.layout.block_bytes(self.block_tokens)
        step = max(1, MAX_STAGING_BYTES // block_bytes)
        for start in range(blocks.start, blocks.stop, step):
            piece = range(start, min(start + step, blocks.stop))
            yield [
                PartBlocks(part, piece.start, self._stage(part, row, pad, piece)) for part in range(len(self._pieces))
            ]

    def first_block(self, pad: int) -> int:
        """The first block of a row whose states are all here."""
        return max(0, -(-(max(self._first_columns) - pad) // self.block_tokens))

    def _stage(self, part: int, row: int, pad: int, blocks: range) -> torch.Tensor:
        """[block, kv_head, layer, k and v of a block] in canonical order, in host memory."""
        group, size = self.shape.layout.groups[part], self.block_tokens
        begin = pad - self._first_columns[part]
        columns = slice(begin + blocks.start * size, begin + blocks.stop * size)
        head = (len(blocks), group.kv_heads, len(group.layers))
        stage = torch.empty(*head, size * (group.k_dim + group.v_dim), dtype=self.shape.dtype)
        into = torch.split(stage, [size * group.k_dim, size * group.v_dim], dim=-1)
        targets, sources = [], []
        for layer, states in enumerate(self._states[part]):
            for half, state in zip(into, states, strict=True):
                source = torch.unflatten(state[row, :, columns], 1, (len(blocks), size)).transpose(0, 1)
                targets.append(torch.unflatten(half[:, :, layer], -1, source.shape[2:]))
                sources.append(source)
        torch._foreach_copy_(targets, sources)
        return stage


def take_snapshot(cache: DynamicCache, shape: CacheShape, block_tokens: int, restored_column: int) -> Snapshot:
    """Hold on to a cache's states. Sliding layers hold what came after `restored_column`, the others everything."""
    pieces, first_columns = [], []
    for group in shape.layout.groups:
        pieces.append([_pieces_of(cache.layers[layer]) for layer in group.layers])
        first_columns.append(restored_column if group.window_tokens else 0)
    return Snapshot(shape, block_tokens, pieces, first_columns)


def _pieces_of(layer: compat.DynamicLayer) -> _Pieces:
    if isinstance(layer, compat.RecordingSlidingLayer):
        return [keys for keys, _ in layer.recorded], [values for _, values in layer.recorded]
    return [layer.keys], [layer.values]


def _joined(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    return (pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), dim=-2)).detach()
