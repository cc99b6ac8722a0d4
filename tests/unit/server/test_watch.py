"""One watcher's messages, without a server: order, gaps, snapshots, going on."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from prefixcache.core.commands import Command, Published
from prefixcache.core.events import ClearRequested
from prefixcache.server.event_log import EventLog
from prefixcache.server.watch import SHORT_KEY_BYTES, Source, Watch, Wish
from prefixcache.v1 import admin_pb2 as pb
from tests.unit.core.harness import ONE_PART, Harness, chain

K = pb.EventKind
ONE, TWO = (1).to_bytes(32, "big"), (2).to_bytes(32, "big")


class Watched(Harness):
    """A planner whose events are logged."""

    def __init__(self, log_bytes: int = 1 << 20) -> None:
        self.events = EventLog(log_bytes)
        super().__init__(publish=True)
        self.source = Source(self.events, self.planner.state, threading.RLock(), b"i" * 16, lambda _: "a model")

    def send(self, event: object) -> list[Command]:
        commands = super().send(event)  # type: ignore[arg-type]  # any event
        for command in commands:
            if isinstance(command, Published):
                self.events.append(command)
        return commands

    def watch(self, wish: Wish, slice_nodes: int = 100) -> Iterator[pb.WatchEventsResponse | None]:
        return Watch(self.source, wish, slice_nodes=slice_nodes).messages()


def up_to_date(stream: Iterator[pb.WatchEventsResponse | None]) -> list[pb.WatchEventsResponse]:
    """What comes until there is nothing to say."""
    told = []
    for message in stream:
        if message is None:
            return told
        told.append(message)
    raise AssertionError("a stream never ends by itself")


def kinds(told: list[pb.WatchEventsResponse]) -> list[str]:
    return [K.Name(each.kind).removeprefix("EVENT_KIND_").lower() for each in told]


def test_news_only() -> None:
    h = Watched()
    h.store("ab")
    stream = h.watch(Wish())
    told = up_to_date(stream)
    assert kinds(told) == ["keepalive"]
    assert (told[0].sequence, told[0].incarnation) == (1, b"i" * 16)
    h.store("xy")
    h.send(ClearRequested(1))
    told = up_to_date(stream)
    assert kinds(told) == ["namespace", "stored", "cleared"]
    assert (told[0].label, told[0].block_tokens, told[0].fingerprint) == ("a model", 16, ONE)
    assert [each.sequence for each in told] == [1, 2, 3]
    assert (told[1].keys, told[1].key_bytes, told[1].first_block) == (chain("xy"), 32, 0)
    assert up_to_date(stream) == []


def test_a_snapshot_and_what_happens_in_its_middle() -> None:
    h = Watched()
    h.store("ab")
    h.store("xy")
    stream = h.watch(Wish(snapshot=True), slice_nodes=1)
    begin, name, stored = next(stream), next(stream), next(stream)
    assert begin is not None
    assert name is not None
    assert stored is not None
    assert kinds([begin, name, stored]) == ["snapshot_begin", "namespace", "stored"]
    assert stored.snapshot
    h.store("q")
    told = up_to_date(stream)
    assert kinds(told) == ["stored", "stored", "snapshot_end"]
    assert [(each.snapshot, each.sequence) for each in told[:2]] == [(False, 3), (True, 3)]
    assert told[0].keys == chain("q")


def test_a_watcher_sees_only_the_namespaces_it_named() -> None:
    h = Watched()
    h.open(2, ONE_PART)
    h.store("ab")
    stream = h.watch(Wish(snapshot=True, fingerprints=frozenset([TWO])))
    assert kinds(up_to_date(stream)) == ["snapshot_begin", "snapshot_end"]
    h.store("xy")
    assert up_to_date(stream) == []
    h.store("xy", namespace=2)
    told = up_to_date(stream)
    assert kinds(told) == ["namespace", "stored"]
    assert {each.fingerprint for each in told} == {TWO}


def test_keys_are_cut_short_where_no_namespace_is_named() -> None:
    h = Watched()
    stream = h.watch(Wish(key_bytes=SHORT_KEY_BYTES))
    up_to_date(stream)
    h.store("a")
    h.store("abc")
    told = up_to_date(stream)[-1]
    whole = chain("abc")
    assert told.keys == whole[32:40] + whole[64:72]
    assert (told.parent, told.key_bytes) == (whole[:8], 8)


def test_a_slow_watcher_is_told_what_it_lost() -> None:
    h = Watched(log_bytes=1_000)
    stream = h.watch(Wish())
    assert kinds(up_to_date(stream)) == ["keepalive"]
    for letter in "abcdefghij":
        h.store(letter)
    told = up_to_date(stream)
    assert kinds(told) == ["gap"]
    assert (told[0].lost, told[0].sequence) == (10, 10)
    h.store("q")
    assert kinds(up_to_date(stream)) == ["namespace", "stored"]
    assert (h.source.gaps, h.source.lost) == (1, 10)


def test_a_slow_watcher_gets_a_new_snapshot_where_it_wanted_one() -> None:
    h = Watched(log_bytes=1_000)
    h.store("abc")
    stream = h.watch(Wish(snapshot=True), slice_nodes=1)
    assert kinds([each for each in [next(stream)] if each is not None]) == ["snapshot_begin"]
    for letter in "defghijkl":
        h.store(letter)
    told = up_to_date(stream)
    told_kinds = kinds(told)
    begin = told_kinds.index("snapshot_begin")
    assert told_kinds[begin - 1] == "gap"
    stored = {each.keys[:32] for each in told[begin:] if each.snapshot}
    assert stored == {chain("abc")[:32], *(chain(letter) for letter in "defghijkl")}
    assert told_kinds[-1] == "snapshot_end"


def test_a_tour_that_must_begin_anew_is_let_go_of() -> None:
    h = Watched(log_bytes=1_000)
    for letter in "abc":
        h.store(letter)
    watch = Watch(h.source, Wish(snapshot=True), slice_nodes=1)
    stream = watch.messages()
    for _ in range(3):
        next(stream)
    tree = h.planner.state.namespaces[1].tree
    assert tree.reshaped
    for letter in "defghij":
        h.store(letter)
    watch.look()
    assert not tree.reshaped
    assert kinds(up_to_date(stream))[-1] == "snapshot_end"


def test_a_closed_stream_leaves_no_tour_behind() -> None:
    h = Watched()
    h.store("abc")
    h.store("xyz")
    stream = h.watch(Wish(snapshot=True), slice_nodes=1)
    for _ in range(3):
        next(stream)
    assert h.planner.state.namespaces[1].tree.reshaped
    stream.close()  # type: ignore[attr-defined]  # it is a generator
    assert not h.planner.state.namespaces[1].tree.reshaped


def test_going_on_from_a_number() -> None:
    h = Watched()
    for letter in "abc":
        h.store(letter)
    told = up_to_date(h.watch(Wish(snapshot=True, incarnation=b"i" * 16, after=1)))
    assert kinds(told) == ["keepalive", "namespace", "stored", "stored"]
    assert [each.sequence for each in told] == [1, 1, 2, 3]
    assert h.source.resumed == 1
    assert kinds(up_to_date(h.watch(Wish(incarnation=b"i" * 16, after=3)))) == ["keepalive"]


def test_who_cannot_go_on_is_told() -> None:
    h = Watched(log_bytes=1_000)
    for letter in "abcdefghij":
        h.store(letter)
    gap = up_to_date(h.watch(Wish(incarnation=b"i" * 16, after=2)))
    assert kinds(gap) == ["gap"]
    assert gap[0].lost == 8
    restarted = up_to_date(h.watch(Wish(snapshot=True, incarnation=b"j" * 16, after=2)))
    assert kinds(restarted)[:2] == ["gap", "snapshot_begin"]
    assert restarted[0].lost == 0
    ahead = up_to_date(h.watch(Wish(incarnation=b"i" * 16, after=99)))
    assert kinds(ahead) == ["gap"]
