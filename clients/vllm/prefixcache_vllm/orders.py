"""What the scheduler's side tells the workers' side, once a step: plain data that pickles.

Rules: an order holds all that a worker needs, so that a worker keeps no state of requests beyond transfers under way.
Page ids are the engine's block ids, by KV cache group. Orders are made on the scheduler thread, where a tuple costs a
fifth of a frozen dataclass. It must not know vLLM.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from prefixcache.identity.fingerprint import NamespaceIdentity
from prefixcache_client import LeaseTicket


class PageRun(NamedTuple):
    """Consecutive pages of a request in one KV cache group: page `first` + i of the prompt is block `ids[i]`."""

    first: int
    ids: tuple[int, ...]


class LoadOrder(NamedTuple):
    """Copy the leased blocks' tokens [from_token, to_token) into these pages. `ends_at` as in the ticket."""

    request_id: str
    fingerprint: bytes
    ticket: LeaseTicket
    from_token: int
    to_token: int
    pages: tuple[PageRun, ...]


class SaveOrder(NamedTuple):
    """Store blocks [first_block, end_block) out of these pages. `keys`: packed keys of blocks 0 to end_block - 1.

    `number`: what it is confirmed by. `ticket`: what the ranks store it under together, each its heads.
    """

    request_id: str
    fingerprint: bytes
    keys: bytes
    first_block: int
    end_block: int
    pages: tuple[PageRun, ...]
    number: int = 0
    ticket: bytes = b""


@dataclass(slots=True)
class StepOrders:
    """All orders of one step.

    `namespaces`: the identities behind the fingerprints in it. `leaving`: requests whose pages may get other owners in
    this very step. `closing`: finished requests whose pages are kept until the worker says that their saves are over.
    `draft`: what is to be done for a draft model; there `late_saves` are of tokens that it computes after the model, at
    the very end of the step.
    """

    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
    leaving: frozenset[str] = frozenset()
    closing: frozenset[str] = frozenset()
    namespaces: dict[bytes, NamespaceIdentity] = field(default_factory=dict)
    late_saves: list[SaveOrder] = field(default_factory=list)
    draft: "StepOrders | None" = None

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.loads or self.saves or self.leaving or self.closing or self.late_saves or self.draft)


def page_run(ids: list[int] | tuple[int, ...], page_tokens: int, from_token: int, to_token: int) -> PageRun:
    """The pages of a request's table that hold tokens [from_token, to_token), those that are there."""
    first, last = from_token // page_tokens, -(-to_token // page_tokens)
    return PageRun(first, tuple(ids[first:last]))
