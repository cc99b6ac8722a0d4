"""Byte ranges that came, against a plain set of bytes; slots by part and block."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.core.commands import Grant, Reserved
from prefixcache.core.ids import NO_SLOT, GroupKind
from prefixcache.core.spec import GroupSpec, NamespaceSpec, PartSpec
from prefixcache.server.holdings import Holdings, Ranges
from prefixcache.server.layouts import Namespace
from prefixcache.server.sessions import Session

spans = st.tuples(st.integers(0, 60), st.integers(1, 20)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(st.lists(spans, max_size=20), spans)
def test_ranges_cover_what_a_set_of_bytes_covers(added: list[tuple[int, int]], asked: tuple[int, int]) -> None:
    ranges, plain = Ranges(), set[int]()
    for start, end in added:
        ranges.add(start, end)
        plain |= set(range(start, end))
    assert ranges.covers(*asked) == (set(range(*asked)) <= plain)


def test_slots_of_parts_that_were_there_already_are_not_granted() -> None:
    spec = NamespaceSpec(16, (GroupSpec(GroupKind.FULL),), (PartSpec(0, 2, 8192), PartSpec(0, 2, 4096)))
    namespace = Namespace(1, bytes(32), "", spec, (8192, 4096), (4096, 2048))
    grants = (
        Grant(0, 0, np.array([10, NO_SLOT], np.uint32)),
        Grant(1, 0, np.array([NO_SLOT, 20], np.uint32)),
    )
    reserved = Reserved(b"r" * 16, np.array([4, 6], np.uint32), grants, 99, {}, 1.0)
    holdings = Holdings()
    session = Session(b"s" * 16, "", "local", 1, 1, True, 1.0, 0.0, 0.0)
    holdings.reserved(session, namespace, reserved)
    reservation = holdings.reservations[b"r" * 16]
    assert reservation.slots == {(0, 4): (0, 10), (1, 6): (0, 20)}
    reservation.wrote(0, 4, 0, 4096)
    assert reservation.is_written(0, 4, 0, 4096)
    assert not reservation.is_written(0, 4, 0, 8192)
    assert not reservation.is_written(1, 6, 0, 1)
    assert holdings.count_by_session() == ({}, {b"s" * 16: 1})


def test_only_the_process_that_writes_may_abort_for_an_earlier_session() -> None:
    spec = NamespaceSpec(16, (GroupSpec(GroupKind.FULL),), (PartSpec(0, 2, 8192),))
    namespace = Namespace(1, bytes(32), "", spec, (8192,), (4096,))
    reserved = Reserved(b"r" * 16, np.array([0], np.uint32), (Grant(0, 0, np.array([10], np.uint32)),), 99, {}, 1.0)
    first, second, other, unknown = (
        Session(name * 16, "", "local", process, process, True, 1.0, 0.0, 0.0)
        for name, process in ((b"1", 7), (b"2", 7), (b"3", 8), (b"4", 0))
    )
    holdings = Holdings()
    holdings.reserved(first, namespace, reserved)
    assert holdings.aborting_session(b"r" * 16, second) == second.id, "it is still being filled"
    holdings.ran_out(b"r" * 16, 1)
    assert holdings.aborting_session(b"r" * 16, second) == first.id
    assert [holdings.aborting_session(b"r" * 16, each) for each in (other, unknown)] == [other.id, unknown.id]
    holdings.process_exited(first.id)
    assert holdings.aborting_session(b"r" * 16, second) == second.id
