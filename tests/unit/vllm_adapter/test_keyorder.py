"""Keys of a store job come in any order and leave in their prompt's, each behind its own group's."""

import random

import numpy as np

from prefixcache_vllm.keyorder import group_of, in_prefix_order


def key(group: int, number: int) -> bytes:
    return b"%032d" % number + group.to_bytes(4, "big")


def test_by_group_and_position() -> None:
    places = {key(group, number): 32 * (number + 1) for group in (0, 1, 2) for number in range(5)}
    keys = list(places)
    rows = np.arange(len(keys))
    wanted = dict(zip(keys, rows.tolist(), strict=True))
    for seed in range(20):
        shuffled = list(range(len(keys)))
        random.Random(seed).shuffle(shuffled)
        ordered, at, parents = in_prefix_order(
            [keys[i] for i in shuffled], rows[shuffled].astype(np.int32), places.get, {0, 2}
        )
        assert ordered == keys
        assert [wanted[each] for each in ordered] == at.tolist()
        assert parents[:5] == [b"", *keys[:4]]
        assert parents[5:10] == [b""] * 5, "of a window nothing in front is needed"
        assert parents[10:] == [b"", *keys[10:14]]
    assert group_of(key(2, 7)) == 2


def test_without_positions_the_order_stays() -> None:
    keys = [key(0, 3), key(0, 1)]
    ordered, rows, parents = in_prefix_order(keys, [5, 9], {keys[0]: 32}.get, {0})
    assert (ordered, rows.tolist(), parents) == (keys, [5, 9], [])
