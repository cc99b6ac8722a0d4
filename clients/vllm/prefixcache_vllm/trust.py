"""Which pages hold what a draft model would have computed, and which requests' do: what else may not be stored.

An engine never waits for its draft model: where the model's prefix is loaded without the draft's, or a step is too long
for the draft model, its pages hold something else, and what it computes behind them is wrong as well. Nothing of that
is noticed, because the model checks every proposal; but stored under a key it would be wrong for everybody.

Rules:
1. Pages are right until something is known against them, and stay wrong until a request that is right has computed
   them anew. Pages that a load will write are wrong until it has ended well.
2. A request is wrong from its first wrong page on, for ever: also from one that vLLM's own prefix cache gave it.
3. Requests are looked at in the order in which vLLM scheduled them, because one may get what another has just computed.

Page ids are those of the draft model's KV cache group. It must not know vLLM.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

Pages = Sequence[int]


@dataclass(slots=True)
class _Request:
    """`local_tokens`: what vLLM's own cache gave it. `wrong_from`: the first token whose KV is not the draft model's;
    None for none. `marked`: pages of its table that were marked as wrong, counted from the first."""

    local_tokens: int
    wrong_from: int | None = None
    checked: bool = False
    marked: int = 0


class Trust:
    """See the rules above. `page_tokens`: of a page."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._wrong: set[int] = set()
        self._requests: dict[str, _Request] = {}

    def __len__(self) -> int:
        """Requests that are known."""
        return len(self._requests)

    def begin(self, request_id: str, local_tokens: int) -> None:
        """The request is about to get its first pages; vLLM's own cache gives it the first tokens."""
        self._requests[request_id] = _Request(local_tokens)

    def local_tokens(self, request_id: str) -> int:
        """What `begin` was told; 0 for a request that is not known."""
        known = self._requests.get(request_id)
        return 0 if known is None else known.local_tokens

    def spoil(self, request_id: str, from_token: int) -> None:
        """The draft model's KV is missing from this token on."""
        known = self._requests.get(request_id)
        if known is not None:
            known.wrong_from = from_token if known.wrong_from is None else min(known.wrong_from, from_token)
            known.marked = min(known.marked, known.wrong_from // self._page_tokens)

    def look(self, request_id: str, tokens: int, table: Callable[[], Pages | None]) -> None:
        """The request is scheduled, and has `tokens` tokens after that."""
        known = self._requests.get(request_id)
        if known is None:
            return
        if not known.checked:
            known.checked = True
            if self._wrong and known.local_tokens:
                self._check(request_id, known, table() or ())
        if known.wrong_from is not None and tokens > known.marked * self._page_tokens:
            self.mark(request_id, table() or ())

    def mark(self, request_id: str, table: Pages) -> None:
        """Pages of a request from its first wrong token on are wrong."""
        known = self._requests.get(request_id)
        if known is not None and known.wrong_from is not None:
            self._wrong.update(table[known.wrong_from // self._page_tokens :])
            known.marked = len(table)

    def suspect(self, pages: Iterable[int]) -> None:
        """A load will write these."""
        self._wrong.update(pages)

    def clear(self, pages: Iterable[int]) -> None:
        """These hold what they should."""
        if self._wrong:
            self._wrong.difference_update(pages)

    def right(self, request_id: str) -> bool:
        """Whether all KV of the request is the draft model's; False for a request that is not known."""
        known = self._requests.get(request_id)
        return known is not None and known.wrong_from is None

    def own_pages(self, request_id: str, table: Pages, tokens: int) -> Pages:
        """Of the pages of the first `tokens` tokens those that are full and that vLLM's own cache did not give."""
        return table[self.local_tokens(request_id) // self._page_tokens : tokens // self._page_tokens]

    def forget(self, request_id: str) -> None:
        """The request is gone; its pages may be given to others as they are."""
        self._requests.pop(request_id, None)

    def _check(self, request_id: str, known: _Request, table: Pages) -> None:
        given = table[: -(-known.local_tokens // self._page_tokens)]
        first = next((place for place, page in enumerate(given) if page in self._wrong), None)
        if first is not None:
            self.spoil(request_id, first * self._page_tokens)
