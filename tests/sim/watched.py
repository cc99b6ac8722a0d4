"""A seed with watchers: each reads at its own pace, some leave and come back, and what a watcher knows when nothing is
left to read must be exactly what the tree and the copies say.

Faults that happen: a log that is too short for a slow watcher, a stream cut anywhere (also in the middle of a
snapshot), a restart of the daemon, trees that are split and joined between two slices of a snapshot.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from itertools import pairwise

from prefixcache.core.commands import Command, Published
from prefixcache.core.planner import Planner
from prefixcache.server.event_log import EventLog
from prefixcache.server.watch import Source, Watch, Wish
from prefixcache.v1 import admin_pb2
from prefixcache_client.events import EventKind, KnownBlocks, event_of
from tests.sim import audit
from tests.sim.fakes import SimError
from tests.sim.layouts import FLAVOURS
from tests.sim.simulator import Simulator

TIERS = {True: "disk", False: "host"}


class Watcher:
    """One that goes on where it was whenever its stream breaks, as the SDK's does. forgetful: one that begins anew
    instead, and often, and reads slowly, so that it is nearly always in the middle of a snapshot."""

    def __init__(self, rng: random.Random, *, everything: bool, forgetful: bool) -> None:
        self.rng = rng
        self.everything = everything
        self.forgetful = forgetful
        self.paces = (0, 1, 1, 2, 2) if forgetful else (0, 0, 1, 3, 30)
        self.slices = (1,) if forgetful else (1, 2, 100)
        self.known = KnownBlocks()
        self.incarnation = b""
        self.stream: Iterator[admin_pb2.WatchEventsResponse | None] | None = None
        self.numbers: list[int] = []
        self.done = False

    def connect(self, source: Source, fingerprints: list[bytes]) -> None:
        self.leave()
        resumes = self.known.synced and bool(self.incarnation) and not self.forgetful
        wanted = frozenset(fingerprints if self.everything else fingerprints[:1])
        incarnation = self.incarnation if resumes else b""
        wish = Wish(True, wanted, incarnation, self.known.sequence)
        self.numbers = []
        self.stream = Watch(source, wish, slice_nodes=self.rng.choice(self.slices)).messages()

    def leave(self) -> None:
        if self.stream is not None:
            self.stream.close()  # type: ignore[attr-defined]  # it is a generator
            self.stream = None

    def read(self, most: int) -> bool:
        """Takes up to `most` messages; whether it is up to date."""
        assert self.stream is not None
        for _ in range(most):
            message = next(self.stream)
            if message is None:
                return True
            self.incarnation = message.incarnation or self.incarnation
            event = event_of(message)
            if event.kind is EventKind.UNKNOWN:
                raise SimError("an event of no known kind")
            self.numbers.append(event.sequence)
            self.known.apply(event)
        return False


class WatchedSimulator(Simulator):
    """See the module's docstring."""

    def __init__(self, seed: int | random.Random, flavours: tuple[str, ...] = tuple(FLAVOURS)) -> None:
        # Lots of its own, so that a seed is the same story with and without watchers.
        self.lots = random.Random(seed if isinstance(seed, int) else 0)
        self.most_bytes = self.lots.choice((500, 3_000, 1 << 20))
        self.events = EventLog(self.most_bytes)
        self.incarnations = 0
        self.watchers = [Watcher(self.lots, everything=number < 2, forgetful=number == 0) for number in range(3)]
        super().__init__(seed, flavours)

    def run(self) -> None:
        super().run()
        self.read_all()

    def check(self) -> None:
        super().check()
        for watcher in self.watchers:
            if watcher.stream is None or self.lots.random() < (0.3 if watcher.forgetful and watcher.done else 0.04):
                watcher.connect(self.source, self.fingerprints)
            watcher.done = watcher.read(self.lots.choice(watcher.paces))
            if watcher.done:
                self.compare(watcher)

    def read_all(self) -> None:
        """Everybody reads to the end."""
        for watcher in self.watchers:
            if watcher.stream is None:
                watcher.connect(self.source, self.fingerprints)
            while not watcher.read(100):
                pass
            self.compare(watcher)
            watcher.leave()
        for space in self.planner.state.namespaces.values():
            if space.tree.reshaped or any(copies.tree.reshaped for _, copies in space.copies):
                raise SimError("a tour was left behind")

    def compare(self, watcher: Watcher) -> None:
        if not watcher.known.synced:
            raise SimError("nothing is left to tell, and the snapshot is not whole")
        if any(later < earlier for earlier, later in pairwise(watcher.numbers)):
            raise SimError("numbers went back")
        known = watcher.known
        for space in self.planner.state.namespaces.values():
            if not watcher.everything and space.fingerprint != self.fingerprints[0]:
                if known.tiers.get(space.fingerprint) or known.copies.get(space.fingerprint):
                    raise SimError("a watcher was told of a namespace that it did not name")
                continue
            cold = audit.cold_keys(space)
            expected = {key: TIERS[key in cold] for key in audit.stored_keys(space)}
            if known.tiers.get(space.fingerprint, {}) != expected:
                raise SimError("what a watcher knows differs from what is held")
            copies = {
                (tier.pool, key)
                for tier in self.planner.state.gpus.values()
                for number, key in audit.check_copies(tier, self.memories[tier.pool])
                if number == space.number
            }
            if known.copies.get(space.fingerprint, set()) != copies:
                raise SimError("what a watcher knows differs from the copies that are there")

    @property
    def fingerprints(self) -> list[bytes]:
        return [number.to_bytes(32, "big") for number in self.specs]

    def _do(self, command: Command) -> None:
        if isinstance(command, Published):
            self.events.append(command)
        super()._do(command)

    def _new_planner(self) -> Planner:
        """A daemon of its own: another log, another incarnation, and every stream is cut."""
        for watcher in self.watchers:
            watcher.leave()
        planner = super()._new_planner()
        self.incarnations += 1
        self.events = EventLog(self.most_bytes)
        self.source = Source(self.events, planner.state, threading.RLock(), self.incarnations.to_bytes(16, "big"))
        return planner
