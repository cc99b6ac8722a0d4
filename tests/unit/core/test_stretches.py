"""`Path.stretches`: slices where rows follow each other give the same rows as gathering them one by one."""

import random

import numpy as np
import pytest

from prefixcache.core.ids import KEY_BYTES
from prefixcache.core.radix import ROW_DTYPE, Node, Path, first_row_of

FOLLOWING, SCATTERED = range(100, 110), [7, 9, 8, 3, 50, 51, 52, 2, 1, 6]


def path_of(*runs: list[int]) -> Path:
    nodes: list[Node] = []
    blocks = 0
    for rows in runs:
        parent = nodes[-1] if nodes else None
        nodes.append(Node(None, parent, blocks, bytes(KEY_BYTES * len(rows)), np.array(rows, ROW_DTYPE).tobytes()))
        blocks += len(rows)
    return Path(nodes, blocks)


@pytest.mark.parametrize(
    ("rows", "first"),
    [([], -1), ([5], 5), ([5, 6, 7], 5), ([5, 7, 6], -1), ([5, 9, 7], -1), ([5, 4, 7, 8], -1), ([0, 1], 0)],
)
def test_first_row_is_known_only_where_each_row_follows_the_one_before(rows: list[int], first: int) -> None:
    assert first_row_of(np.array(rows, ROW_DTYPE).tobytes()) == first


def test_stretches_give_the_rows_of_the_blocks_asked_for() -> None:
    chance = random.Random(1)
    column = np.arange(1000, dtype=np.uint32)
    for _ in range(300):
        runs = []
        for _node in range(chance.randint(1, 12)):
            first, count = chance.randrange(900), chance.randint(1, 10)
            rows = list(range(first, first + count))
            if chance.random() < 0.05:
                chance.shuffle(rows)
            runs.append(rows)
        path = path_of(*runs)
        path.blocks -= chance.randrange(len(runs[-1]))
        whole = [row for rows in runs for row in rows][: path.blocks]
        first = chance.randrange(path.blocks)
        end = chance.randint(first + 1, path.blocks)
        got = np.concatenate([column[piece] for piece in path.stretches(first, end)])
        assert got.tolist() == whole[first:end]


def test_rows_that_follow_each_other_need_no_gather() -> None:
    assert path_of(list(FOLLOWING)).stretches(0, 10) == [slice(100, 110)]
    assert path_of(list(FOLLOWING)).stretches(3, 5) == [slice(103, 105)]
    assert path_of(list(FOLLOWING), [40, 41]).stretches(9, 12) == [slice(109, 110), slice(40, 42)]


def test_scattered_rows_and_long_paths_are_gathered_at_once() -> None:
    for path in (path_of(list(FOLLOWING), SCATTERED), path_of(*([row] for row in range(20)))):
        (piece,) = path.stretches(0, path.blocks)
        assert isinstance(piece, np.ndarray)
