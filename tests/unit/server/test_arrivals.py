"""What comes of a lease is told from where the Acquire left off, in order, once, with an end."""

import threading

import numpy as np

from prefixcache.core.commands import Acquired, Arrived, Run
from prefixcache.core.ids import GroupKind
from prefixcache.core.reasons import Miss
from prefixcache.core.spec import GroupSpec, NamespaceSpec, PartSpec
from prefixcache.server.arrivals import Arrivals, Subscription
from prefixcache.server.holdings import Lease
from prefixcache.server.layouts import Namespace
from prefixcache.v1 import cache_pb2 as pb
from prefixcache.v1 import common_pb2 as common

SPEC = NamespaceSpec(16, (GroupSpec(GroupKind.FULL),), (PartSpec(0, 2, 4096),))
NAMESPACE = Namespace(1, bytes(32), "", SPEC, (4096,), (2048,))
LEASE, SESSION = b"l" * 16, b"s" * 16


def run(first: int, count: int) -> Run:
    slots = np.arange(first, first + count, dtype=np.uint32).tobytes()
    return Run(0, first, 0, slots, np.full(count, 7, np.uint64).tobytes())


def lease_of(planned: int, ready: int) -> Lease:
    acquired = Acquired(LEASE, 2, planned, ready, (run(2, ready),) if ready else (), None, (0, 0, 0, 0), 9.0)
    return Lease(SESSION, NAMESPACE, acquired, b"")


def news(ready: int, *runs: Run, stop: Miss | None = None, done: bool = False) -> Arrived:
    return Arrived(LEASE, SESSION, ready, runs, stop, done)


class Told:
    """What a subscription sent."""

    def __init__(self, lease: Lease) -> None:
        self.messages: list[pb.ArrivalsResponse] = []
        self.last = 0
        self.cancelled = 0
        self.subscription = Subscription(threading.RLock(), lease, self.cancel)
        self.subscription.start(self.send)

    def send(self, message: pb.ArrivalsResponse, *, last: bool) -> None:
        assert not self.last
        self.messages.append(message)
        self.last += last

    def cancel(self) -> None:
        self.cancelled += 1


def test_the_first_message_tells_what_came_since_the_acquire() -> None:
    lease = lease_of(6, 1)
    lease.arrived(news(3, run(3, 2)))
    told = Told(lease)
    (message,) = told.messages
    assert message.ready_blocks == 5
    assert [(each.first_block, len(each.slots) // 4) for each in message.runs] == [(3, 2)]
    assert not told.last


def test_each_arrival_is_told_once_and_the_last_one_ends_it() -> None:
    lease = lease_of(4, 0)
    told = Told(lease)
    lease.arrived(news(1, run(2, 1)))
    lease.arrived(news(4, run(3, 3), done=True))
    assert [message.ready_blocks for message in told.messages] == [2, 3, 6]
    assert [len(message.runs) for message in told.messages] == [0, 1, 1]
    assert told.last == 1
    assert not lease.listeners


def test_a_plan_that_was_cut_short_says_why() -> None:
    lease = lease_of(4, 1)
    told = Told(lease)
    lease.arrived(news(1, stop=Miss.CHECKSUM, done=True))
    assert told.messages[-1].stop == common.REASON_CHECKSUM_MISMATCH
    assert told.last == 1


def test_the_end_of_the_lease_ends_it() -> None:
    lease = lease_of(4, 1)
    told = Told(lease)
    lease.ended(Miss.LEASE_EXPIRED)
    assert told.last == 1
    assert told.messages[-1].stop == common.REASON_LEASE_LOST


def test_a_lease_that_is_all_ready_has_one_message() -> None:
    told = Told(lease_of(4, 4))
    assert [message.ready_blocks for message in told.messages] == [6]
    assert told.last == 1


def test_nothing_is_told_after_a_cancel() -> None:
    lease = lease_of(4, 1)
    told = Told(lease)
    told.subscription.cancel()
    lease.arrived(news(4, run(3, 3), done=True))
    assert len(told.messages) == 1
    assert told.cancelled == 1


def test_as_an_iterator_it_waits_for_each_and_ends() -> None:
    lease = lease_of(4, 0)
    arrivals = Arrivals(Subscription(threading.RLock(), lease, lambda: None), 60.0)
    messages = iter(arrivals)
    assert next(messages).ready_blocks == 2
    thread = threading.Thread(target=lambda: lease.arrived(news(4, run(2, 4), done=True)))
    thread.start()
    assert [message.ready_blocks for message in messages] == [6]
    thread.join()


def test_a_cancelled_iterator_ends() -> None:
    arrivals = Arrivals(Subscription(threading.RLock(), lease_of(4, 0), lambda: None), 60.0)
    messages = iter(arrivals)
    next(messages)
    arrivals.cancel()
    assert list(messages) == []
