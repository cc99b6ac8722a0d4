"""What every lease does about its end, whatever it holds: given back once, by `release`, by leaving its `with`, or,
with a word in the log, by the garbage collector.

It must not know what is leased or how bytes travel.
"""

import logging
import time
from abc import ABC, abstractmethod
from typing import Generic, Protocol, Self, TypeVar

from prefixcache.v1 import cache_pb2
from prefixcache_client.errors import Failure
from prefixcache_client.link import Link
from prefixcache_client.reasons import LEASE_LOST, reason_value
from prefixcache_client.session import Session
from prefixcache_client.transport import RELEASE

log = logging.getLogger("prefixcache_client")


class Granted(Protocol):
    """What a lease holds on to while it lives: the session, the id, when it runs out (of the monotonic clock)."""

    session: Session
    lease: bytes
    ends_at: float


GrantT = TypeVar("GrantT", bound=Granted)


class Held(ABC, Generic[GrantT]):
    """See the module's docstring. `_grant`: None once it is given back, or where there is nothing to give back."""

    __slots__ = ("__weakref__", "_grant", "_link", "_lost")

    def __init__(self, link: Link, grant: GrantT | None) -> None:
        self._link = link
        self._grant = grant
        self._lost = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        grant = self._grant
        if grant is not None:
            self._grant = None
            self._link.counters.left_open()
            self._link.abandon(grant.session, grant.lease)
            log.warning("a lease of %s was not released; use it in a `with`", self._size())

    @abstractmethod
    def release(self) -> None:
        """Give the blocks back; a second call does nothing."""

    @abstractmethod
    def _size(self) -> str:
        """How much it holds, in words."""

    def _give_back(self, grant: GrantT, used_blocks: int, reason: str) -> None:
        """Tell the server. `reason`: why the rest was not used."""
        request = cache_pb2.ReleaseRequest(
            session=grant.session.session_id, lease=grant.lease, used_blocks=used_blocks, reason=reason_value(reason)
        )
        self._link.post(grant.session, RELEASE, request.SerializeToString())


def check_time(grant: Granted) -> None:
    """Raises Failure where the lease has run out."""
    if time.monotonic() >= grant.ends_at:
        raise Failure(LEASE_LOST, "it ran out")
