"""The operator's calls. What belongs to later releases answers UNIMPLEMENTED, with a reason that clients can tell."""

import threading
from collections.abc import Callable
from typing import Any

from prefixcache.core import commands as c
from prefixcache.core import events as e
from prefixcache.core.ids import KEY_BYTES
from prefixcache.server import reasons
from prefixcache.server.disk import flush
from prefixcache.server.errors import CallError
from prefixcache.server.pin_calls import PinCalls
from prefixcache.server.service import Shell, expect
from prefixcache.server.stats import Statistics
from prefixcache.server.watchers import Watchers
from prefixcache.v1 import admin_pb2 as pb
from prefixcache.v1 import common_pb2 as common

_POLL_S = 0.02
_FLUSH_S = 30.0  # longest a flush waits for the disk
_KEPT_S = 2.0  # longest an eviction waits until the pins that it ended are gone from disk
_FEW_PREFIXES = 20
_MOST_PREFIXES = 1000


class AdminCalls:
    """AdminService. `stop` ends the server (Drain with `shutdown`)."""

    def __init__(
        self, shell: Shell, statistics: Statistics, pins: PinCalls, watchers: Watchers, stop: Callable[[], None]
    ) -> None:
        self._shell = shell
        self.watchers = watchers
        self._statistics = statistics
        self.pins = pins
        self._stop = stop
        self._disk = statistics.demoter
        self._ended = threading.Event()

    def evict(self, _: None, request: pb.EvictRequest) -> pb.EvictResponse:
        """Drop what nobody has leased."""
        number = self._number(request.fingerprint) if request.fingerprint else None
        if request.keys and number is None:
            raise CallError(common.REASON_BAD_ARGUMENT, "keys need the fingerprint of their namespace")
        if len(request.keys) % KEY_BYTES:
            raise CallError(common.REASON_BAD_KEYS, f"keys must be a multiple of {KEY_BYTES} bytes")
        event = e.ClearRequested(number, request.keys or None, request.own_tail, request.gently)
        cleared: c.Cleared = self.pins.kept_after(lambda: expect(self._shell.owner.call(event), c.Cleared), _KEPT_S)
        self._shell.clear_lasts()
        return pb.EvictResponse(blocks=cleared.blocks - cleared.leased_blocks, kept=cleared.leased_blocks)

    def describe_prefix(self, _: None, request: pb.DescribePrefixRequest) -> pb.DescribePrefixResponse:
        """Where a prefix lies."""
        if request.tokens:
            raise CallError(common.REASON_BAD_ARGUMENT, "this call knows no root key: send keys, not tokens")
        number = self._number(request.fingerprint)
        if not request.keys or len(request.keys) % KEY_BYTES:
            raise CallError(common.REASON_BAD_KEYS, f"keys must be a multiple of {KEY_BYTES} bytes and not empty")
        with self._shell.owner.lock:
            looked: c.LookedUp = expect(self._shell.owner.call(e.LookupRequested(number, request.keys)), c.LookedUp)
            blocks = self._statistics.describe_blocks(number, request.keys)
        block_tokens = self._shell.namespace(number).spec.block_tokens
        gpu, host, disk, peer = looked.tokens
        return pb.DescribePrefixResponse(
            block_tokens=block_tokens,
            tokens=len(request.keys) // KEY_BYTES * block_tokens,
            tiers=common.TierTokens(gpu=gpu, host=host, disk=disk, peer=peer),
            blocks=blocks[: looked.matched_blocks],
            stop=reasons.STOP[looked.stop],
        )

    def flush(self, _: None, __: pb.FlushRequest) -> pb.FlushResponse:
        """Write what only memory holds; waits until the disk has taken what it takes, and tells what it has not."""
        store = self._disk
        if store is None:
            raise CallError(common.REASON_TIER_OFF, "this server has no disk tier; start it with --disk DIR")
        written, left = flush(self._shell.owner, store, _FLUSH_S, self._ended)
        return pb.FlushResponse(blocks=written, left_blocks=left)

    def list_prefixes(self, _: None, request: pb.ListPrefixesRequest) -> pb.ListPrefixesResponse:
        """Which prefixes are worth most."""
        only = self._number(request.fingerprint) if request.fingerprint else None
        largest = request.order == pb.PREFIX_ORDER_LARGEST
        limit = min(request.limit or _FEW_PREFIXES, _MOST_PREFIXES)
        with self._shell.owner.lock:
            return self._statistics.list_prefixes(only, range(request.offset, request.offset + limit), largest=largest)

    def get_stats(self, _: None, __: pb.GetStatsRequest) -> pb.GetStatsResponse:
        """Everything of this moment."""
        return self._statistics.snapshot()

    def drain(self, _: None, request: pb.DrainRequest) -> pb.DrainResponse:
        """Take no new work and wait for what runs."""
        timeout_s = request.timeout_ms / 1000 if request.timeout_ms else self._shell.config.drain_timeout
        leases, reservations = drain(self._shell, timeout_s)
        if request.shutdown:
            self._stop()
        return pb.DrainResponse(leases=leases, reservations=reservations)

    def _number(self, fingerprint: bytes) -> int:
        namespace = self._shell.by_fingerprint.get(fingerprint)
        if namespace is None:
            raise CallError(common.REASON_NAMESPACE_UNKNOWN, "no worker has opened a namespace of this fingerprint")
        return namespace.number


def drain(shell: Shell, timeout_s: float, hurry: threading.Event | None = None) -> tuple[int, int]:
    """Refuse new leases and reservations; wait for those running. Answers how many (leases, reservations) remain."""
    shell.draining = True
    if shell.owner.failure:
        return 0, 0  # nothing can end any more
    shell.owner.call(e.DrainStarted())
    waiting = hurry or threading.Event()
    until = shell.owner.clock() + timeout_s
    while shell.holdings.leases or shell.holdings.reservations:
        if shell.owner.clock() >= until or waiting.wait(_POLL_S):
            break
    return len(shell.holdings.leases), len(shell.holdings.reservations)


def unimplemented(name: str) -> Callable[[Any, Any], Any]:
    """An answer for an rpc of a later release."""

    def refuse(_: Any, __: Any) -> Any:
        raise CallError(common.REASON_UNIMPLEMENTED, f"this release of the server does not have {name} yet")

    return refuse
