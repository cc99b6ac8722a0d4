"""Prefix lengths that pools allow, against their definition."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from prefixcache_sglang.hits import ALL_PAGES, TRAILING_PAGES, allowed, leading


@given(st.lists(st.booleans(), max_size=12), st.integers(0, 5))
def test_lengths_are_those_whose_pages_are_there(there: list[bool], window: int) -> None:
    present = np.array(there, np.bool_)
    every = [length for length in range(1, len(there) + 1) if all(there[:length])]
    assert allowed(ALL_PAGES, present, window) == every
    assert leading(present) == len(every)
    wanted = [n for n in range(1, len(there) + 1) if all(there[max(0, n - max(1, window)) : n])]
    assert allowed(TRAILING_PAGES, present, window) == wanted
    assert allowed("block_groups", present, window) is None
