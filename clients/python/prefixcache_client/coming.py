"""What is still coming of a lease from a slower tier: asked for when it is needed, waited for within a deadline.

Rules: asked for once. Waiting ends at the deadline, at the lease's end or with the server's word that no more comes,
and always says why. It must not know tensors.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from prefixcache.v1 import cache_pb2
from prefixcache_client.blocks import BlockFormat
from prefixcache_client.errors import Failure
from prefixcache_client.reasons import DEADLINE, reason_name
from prefixcache_client.runs import SlotRun, foreign_runs, leased_runs
from prefixcache_client.session import Session, parse, remaining


class Coming:
    """`blocks`: positions of the blocks that were not ready yet; shrinks from its start as they come."""

    __slots__ = ("_deadline", "_lease", "_news", "_session", "blocks", "reason")

    def __init__(self, session: Session, lease: bytes, blocks: range, deadline: float) -> None:
        self.blocks = blocks
        self.reason = ""
        """Why the rest will not come; empty while it may."""
        self._session = session
        self._lease = lease
        self._deadline = deadline
        self._news: Iterator[bytes] | None = None

    def wait(self, form: BlockFormat) -> list[SlotRun]:
        """The slots of the next blocks that came; none when no more will come (`reason` says why, if some are missing).

        Raises Failure where the server contradicts itself.
        """
        while self.blocks and not self.reason:
            try:
                news = self._next()
            except Failure as failure:
                self.reason = failure.reason
                break
            before = self.blocks.start
            if not before <= news.ready_blocks:
                self.reason = "internal"
                break
            ready = min(news.ready_blocks, self.blocks.stop)
            self.blocks = range(ready, self.blocks.stop)
            if news.stop:
                self.reason = reason_name(news.stop)
            if ready > before:
                return self._runs(form, news, range(before, ready))
        return []

    def _runs(self, form: BlockFormat, news: cache_pb2.ArrivalsResponse, fresh: range) -> list[SlotRun]:
        """The slots of `fresh`, checked."""
        return leased_runs(form, news.runs, fresh, self.blocks.stop)

    def _next(self) -> cache_pb2.ArrivalsResponse:
        if self._news is None:
            request = cache_pb2.ArrivalsRequest(session=self._session.session_id, lease=self._lease)
            payload = request.SerializeToString()
            self._news = self._session.transport.arrivals(payload, remaining(self._deadline))
        remaining(self._deadline)
        answer = next(self._news, None)
        if answer is None:
            raise Failure(DEADLINE, "the server told no more")
        return parse(cache_pb2.ArrivalsResponse, answer)


class ComingKeys(Coming):
    """The same of opaque keys, which come in any order: `blocks` only counts them. missing: bool[n], places of those
    that are promised and not told yet."""

    __slots__ = ("missing",)

    def __init__(
        self, session: Session, lease: bytes, blocks: range, deadline: float, missing: npt.NDArray[np.bool_]
    ) -> None:
        super().__init__(session, lease, blocks, deadline)
        self.missing = missing

    def _runs(self, form: BlockFormat, news: cache_pb2.ArrivalsResponse, fresh: range) -> list[SlotRun]:
        """See Coming."""
        return foreign_runs(form, news.runs, self.missing, len(fresh))
