"""The restorable length beside its definition, tried out block by block."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixcache.core.ids import GroupKind
from prefixcache.core.namespaces import Namespace
from prefixcache.core.policy.lru import LeafLru
from prefixcache.core.spec import GroupSpec, NamespaceSpec, PartSpec

BLOCK = 4
groups = st.one_of(
    st.just(GroupSpec(GroupKind.FULL)),
    st.just(GroupSpec(GroupKind.STATE)),
    st.integers(1, 5 * BLOCK).map(lambda window: GroupSpec(GroupKind.SLIDING, window)),
)


def needs(group: GroupSpec, end: int) -> set[int]:
    """Blocks a group needs for a prefix of `end` blocks: design section 3, word for word."""
    if group.kind is GroupKind.FULL:
        return set(range(end))
    count = 1 if group.kind is GroupKind.STATE else -((1 - group.window_tokens) // BLOCK)
    return set(range(max(0, end - count), end))


@given(st.lists(groups, min_size=1, max_size=3), st.integers(0, 8), st.integers(0, 8), st.data())
@settings(max_examples=400, deadline=None)
def test_longest_restorable_prefix(chosen: list[GroupSpec], blocks: int, from_block: int, data: st.DataObject) -> None:
    parts = tuple(PartSpec(group, 1, 4096) for group in range(len(chosen)))
    space = Namespace(1, bytes(32), NamespaceSpec(BLOCK, tuple(chosen), parts), LeafLru())
    rows = space.table.allocate(blocks)
    present: list[set[int]] = []
    for index, group in enumerate(chosen):
        # A block is in the tree only with all its full parts.
        every = st.just(set(range(blocks)))
        here = data.draw(every if group.kind is GroupKind.FULL else st.sets(st.integers(0, 7)).map(set))
        here &= set(range(blocks))
        present.append(here)
        places = np.array(sorted(here), np.int64)
        space.table.place(index, rows[places], np.arange(len(places), dtype=np.uint32), 1)
    own = set(range(from_block))
    possible = [
        end
        for end in range(from_block + 1, blocks + 1)
        if all(needs(group, end) <= here | own for group, here in zip(chosen, present, strict=True))
    ]
    expected = max(possible, default=min(from_block, blocks))
    assert space.restorable(rows, from_block, blocks) == expected
    for index, group in enumerate(chosen):
        if expected > from_block:
            wanted = needs(group, expected) - own
            assert space.needed_from(index, from_block, expected) == min(wanted, default=expected)
