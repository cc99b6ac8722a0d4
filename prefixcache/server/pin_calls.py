"""Pin, Unpin, ListPins and Prefetch: what an operator, or an engine that knows what it will need, asks for.

Pinning answers when it would survive a crash, so its answer is a future: the local channel's thread waits for no disk.
"""

import contextlib
import math
import secrets
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

import numpy as np

from prefixcache.core import pin_messages as m
from prefixcache.core.ids import ID_BYTES, KEY_BYTES
from prefixcache.core.pins import PrefixPin
from prefixcache.core.planner import Planner
from prefixcache.core.radix import ROW_DTYPE
from prefixcache.server import reasons
from prefixcache.server.errors import CallError
from prefixcache.server.pinbook import PinBook
from prefixcache.server.service import Shell, expect
from prefixcache.v1 import admin_pb2 as pb
from prefixcache.v1 import common_pb2 as common

_SHORT_KEY: Final = 8


class PinCalls:
    """See the module's rules."""

    def __init__(self, shell: Shell, planner: Planner, book: PinBook) -> None:
        self._shell = shell
        self._planner = planner
        self._book = book

    def pin(self, _: object, request: pb.PinRequest) -> "Future[pb.PinResponse]":
        """Keep a prefix."""
        if request.forever and request.ttl_ms:
            raise CallError(common.REASON_BAD_ARGUMENT, "a pin holds for ttl_ms, or forever, not both")
        shell = self._shell
        number = self._namespace(request.fingerprint)
        ttl_s = None if request.forever else request.ttl_ms / 1000 or shell.config.pin_ttl
        event = m.PinRequested(secrets.token_bytes(ID_BYTES), number, request.keys, request.label, ttl_s)
        with shell.owner.lock:
            pinned: m.Pinned = expect(shell.owner.call(event), m.Pinned)
        tokens = shell.namespace(number).spec.block_tokens
        response = pb.PinResponse(
            pin=pinned.pin,
            tokens=pinned.held_blocks * tokens,
            wanted_tokens=pinned.blocks * tokens,
            size_bytes=pinned.size_bytes,
            ttl_ms=0 if ttl_s is None else int(ttl_s * 1000),
        )
        return _after(self._book.keep(), lambda: response)

    def unpin(self, _: object, request: pb.UnpinRequest) -> "Future[pb.UnpinResponse]":
        """End a pin."""
        expect(self._shell.owner.call(m.UnpinRequested(request.pin)), m.Unpinned)
        return _after(self._book.keep(), pb.UnpinResponse)

    def list_pins(self, _: object, __: pb.ListPinsRequest) -> pb.ListPinsResponse:
        """What is pinned."""
        with self._shell.owner.lock:
            state = self._planner.state
            return pb.ListPinsResponse(
                pins=[self._describe(pin) for pin in state.prefix_pins.values()],
                pinned_bytes=state.pinned_bytes,
                budget_bytes=state.config.pin_bytes,
            )

    def prefetch(self, _: object, request: pb.PrefetchRequest) -> pb.PrefetchResponse:
        """Begin to bring a prefix to memory."""
        shell = self._shell
        number = request.namespace_id
        if bool(number) == bool(request.fingerprint):
            raise CallError(common.REASON_BAD_ARGUMENT, "name the namespace by its fingerprint or by its id")
        number = number or self._namespace(request.fingerprint)
        tokens = shell.namespace(number).spec.block_tokens
        if not request.keys or len(request.keys) % KEY_BYTES:
            raise CallError(common.REASON_BAD_KEYS, f"keys must be a multiple of {KEY_BYTES} bytes and not empty")
        event = m.PrefetchRequested(number, request.keys)
        told: m.Prefetched = expect(shell.owner.call(event), m.Prefetched)
        return pb.PrefetchResponse(
            tokens=told.coming_blocks * tokens,
            ready_tokens=told.ready_blocks * tokens,
            stop=reasons.PREFETCH_STOP[told.stop],
        )

    def kept_after(self, change: Callable[[], Any], timeout_s: float) -> Any:
        """`change()`, and if pins ended with it, that is written before this returns (if the disk is that fast)."""
        with self._shell.owner.lock:
            before = len(self._planner.state.prefix_pins)
            answer = change()
            ended = before - len(self._planner.state.prefix_pins)
        if ended:
            with contextlib.suppress(TimeoutError):
                self._book.keep().exception(timeout_s)
        return answer

    def _describe(self, pin: PrefixPin) -> pb.PinDescription:
        space, owner = pin.space, self._shell.owner
        rows = np.frombuffer(space.tree.walk(pin.keys).packed_rows(), ROW_DTYPE)
        table, host, disk = space.table, len(rows), 0
        if space.on_disk:
            host -= int(np.count_nonzero(table.cold[rows]))
            disk = int(np.count_nonzero(table.is_clean(rows) & table.is_recorded(rows)))
        left_s = pin.term.deadline - owner.now
        return pb.PinDescription(
            pin=pin.pin,
            fingerprint=space.fingerprint,
            label=pin.label,
            tokens=pin.depth * space.block_tokens,
            wanted_tokens=pin.blocks * space.block_tokens,
            size_bytes=pin.blocks * sum(space.strides),
            ttl_ms=0 if left_s == math.inf else max(int(left_s * 1000), 1),
            host_tokens=host * space.block_tokens,
            disk_tokens=disk * space.block_tokens,
            short_key=pin.keys[-KEY_BYTES:][:_SHORT_KEY].hex(),
        )

    def _namespace(self, fingerprint: bytes) -> int:
        namespace = self._shell.by_fingerprint.get(fingerprint)
        if namespace is None:
            raise CallError(common.REASON_NAMESPACE_UNKNOWN, "no worker has opened a namespace of this fingerprint")
        return namespace.number


def _after(done: "Future[None]", answer: Callable[[], Any]) -> "Future[Any]":
    """A future of `answer()` when `done` is."""
    target: Future[Any] = Future()
    done.add_done_callback(lambda _: target.set_result(answer()))
    return target
