"""The scheduler side: vLLM's requests and steps, told to the book, and its answers as orders for the workers.

Rules:
1. Runs on the engine's scheduler thread: no call that waits, no work that grows with anything but the request, and
   little with that: prompts are handed on by reference and hashed elsewhere (see chain, asking).
2. Attributes of requests are read by name, so that every version will do; nothing of vLLM is imported.
3. A request whose KV cannot be told from others (prompt embeddings, pooling, streamed input) is left alone, with a
   counted reason; one with an image that cannot be told from others from there on.
"""

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

from prefixcache.identity.fingerprint import NamespaceIdentity
from prefixcache.identity.keys import KEY_BYTES, root_key
from prefixcache_client import Namespace
from prefixcache_client.ids import new_id
from prefixcache_vllm.adapters import CHANGED, Adapters
from prefixcache_vllm.announcing import Announcements, StoredBlocks
from prefixcache_vllm.asking import Asker, Hint, Question
from prefixcache_vllm.book import Entry, Limits, Phase, RequestBook
from prefixcache_vllm.chain import RequestChain
from prefixcache_vllm.counting import Numbers, difference, scheduler_numbers
from prefixcache_vllm.identity import CannotShareError, EngineIdentity, in_new_epoch
from prefixcache_vllm.media import NO_MEDIA, Media, MediaReader
from prefixcache_vllm.options import Options
from prefixcache_vllm.orders import LoadOrder, PageRun, SaveOrder, StepOrders, page_run
from prefixcache_vllm.tables import BlockTables

log = logging.getLogger("prefixcache_vllm")

_RUNNING: Final = "RUNNING"
_OVERLAP: Final = 2
_MAX_ROOTS: Final = 1024
"""Roots of salts that are remembered: as many tenants as send requests at a time."""
NOTHING: Final = StepOrders()
"""The orders of a step that has none: always this object."""


class SchedulerSide:
    """See the rules above. `loads` and `saves`: which directions the engine's role has."""

    def __init__(
        self, engine: EngineIdentity, options: Options, asker: Asker, *, loads: bool = True, saves: bool = True
    ) -> None:
        """Raises ValueError or OSError for a tenant key that cannot be read."""
        self._engine = engine
        self._options = options
        self._asker = asker
        self._tenant_key = options.tenant_key()
        self._identity = engine.identity
        self._loads, self._saves = loads, saves
        self._sync = engine.loads_in_step(options)
        self._namespaces: dict[str, Namespace] = {}
        self._identities: dict[bytes, NamespaceIdentity] = {}
        self._roots: dict[tuple[bytes, str], bytes] = {}
        namespace = self._namespace_of("", self._identity)
        limits = Limits(
            options.block_tokens,
            namespace.block_bytes,
            options.ask_timeout_s + options.load_timeout_s,
            options.pinned_share,
            keep_last=int(self._sync or engine.hybrid),
        )
        self.book = RequestBook(limits, asker)
        self.skipped: Counter[str] = Counter()
        """Requests left alone, by reason."""
        self.without_draft: Counter[str] = Counter()
        """Requests that began with a prefix their draft model has no KV of, because it is never kept, by reason."""
        self._requests: dict[str, Any] = {}
        self._alone: set[str] = set()
        self._adapters = Adapters(engine.lora_form)
        self._media = MediaReader(engine.encoder, limits.ask_timeout_s)
        self._tables = BlockTables()
        self._orders = StepOrders()
        self._closing: set[str] = set()
        self._running: set[str] = set()
        self._loading: dict[str, tuple[frozenset[int], int]] = {}
        self._steps = 0
        self._skips = False
        self._told: Numbers = {}
        self._number = 1
        self.announcements: Announcements | None = None
        """What to tell routers; None where nobody listens."""

    def arrived(self, request: Any) -> None:
        """See KVConnectorBase_V1.on_new_request."""
        if self._media_of(request, waits=False) is None:
            return
        entry, tokens = self._entry(request), request.num_tokens
        if entry is None or tokens < self._options.block_tokens:
            return
        entry.hint = Hint(Question(entry.namespace, entry.chain, tokens, 0, tokens))
        entry.hint.only_keys = not self._loads or _reads_nothing(request)
        self._asker.hint(entry.hint)

    def matched(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """See KVConnectorBase_V1.get_num_new_matched_tokens."""
        book, now = self.book, time.monotonic()
        entry = book.get(request.request_id)
        if entry is not None and book.waits(entry, now):
            return None, False  # asked in every step: nothing else is looked at
        if self._media_of(request) is None:
            return None, False
        entry = self._entry(request)
        if entry is None or not self._loads or _reads_nothing(request):
            return 0, False
        found = book.matched(entry, request.num_tokens, local_tokens, now)
        return found, bool(found) and not self._sync

    def placed(self, request: Any, block_ids: tuple[list[int], ...], external_tokens: int) -> None:
        """See KVConnectorBase_V1.update_state_after_alloc."""
        entry = self.book.get(request.request_id)
        if entry is None or not self._loads:
            return
        ticket = self.book.placed(entry, external_tokens)
        if ticket is None:
            return
        if self._engine.draft_off:
            self.without_draft[self._engine.draft_off] += 1
            self._skips = True
        first, end = entry.from_token, entry.from_token + external_tokens
        # The last block may hold more than fits: an engine that computes the last token itself has asked for less.
        order = LoadOrder(
            request.request_id, entry.chain.fingerprint, ticket, first, end, self._pages(block_ids, first, end)
        )
        self._orders.loads.append(order)
        self._loading[request.request_id] = (frozenset(page for run in order.pages for page in run.ids), self._steps)
        self._name(self._orders, order.fingerprint)

    def step(self, scheduler_output: Any) -> StepOrders:
        """The orders of a step. See KVConnectorBase_V1.build_connector_meta."""
        self._steps += 1
        if self._sync:
            self._end_sync_loads()
        scheduled, orders = scheduler_output.num_scheduled_tokens, self._orders
        if not any((scheduled, self._running, self._closing, orders.loads, orders.saves)):
            return NOTHING  # vLLM steps without pause while something is waited for
        self._tables.step(scheduler_output)
        if self._saves:
            self._save_scheduled(orders, scheduler_output)
        leaving = self._leaving(scheduler_output)
        if leaving or self._running != scheduled.keys():
            self._running = (self._running - leaving).union(scheduled)
        if not (leaving or self._closing or orders):
            return NOTHING  # nearly every step that only decodes
        self._orders = StepOrders()
        orders.leaving, orders.closing, self._closing = leaving, frozenset(self._closing), set()
        return orders

    def finished(self, request: Any, block_ids: tuple[list[int], ...]) -> bool:
        """The request is over; whether its blocks must be kept until its saves are. See request_finished."""
        request_id = request.request_id
        self._requests.pop(request_id, None)
        self._media.forget(request_id)
        self._alone.discard(request_id)
        self._tables.forget(request_id)
        self._running.discard(request_id)
        loading = (entry := self.book.get(request_id)) is not None and entry.phase is Phase.LOADING
        entry = self.book.forget(request_id)
        if entry is None or loading or not self._saves:
            return False
        if not entry.stale and not self._options.prompt_only and len(self._engine.groups) == 1:
            computed = min(request.num_computed_tokens, request.num_tokens - 1)
            self._save(self._orders, entry, request, computed, block_ids)
        if not entry.saves or len(self._engine.groups) > 1:
            return False  # pages of several groups are copied in their step
        self._closing.add(request_id)
        return True

    def loaded(self, arrived: Iterable[str], failed: Iterable[str], bad_pages: Iterable[int]) -> None:
        """Loads have ended on every rank. `failed`: of these; `bad_pages`: where the engine tells pages only."""
        if not arrived and not bad_pages and not failed:
            return
        bad, failures = set(bad_pages), set(failed)
        if bad:
            failures.update(name for name, (pages, _) in self._loading.items() if not bad.isdisjoint(pages))
        ended = failures.union(arrived) if self._sync else arrived
        for request_id in ended:
            self._end_load(request_id, ok=request_id not in failures)

    def _end_sync_loads(self) -> None:
        """A load inside a step is over when the next but one is scheduled: steps may overlap by one."""
        for request_id, (_, step) in list(self._loading.items()):
            if self._steps > step + _OVERLAP:
                self._end_load(request_id, ok=True)

    def _end_load(self, request_id: str, *, ok: bool) -> None:
        self._loading.pop(request_id, None)
        entry = self.book.get(request_id)
        if entry is not None and entry.ticket is not None:
            self.book.loaded(request_id, entry.ticket.blocks * self._options.block_tokens if ok else 0)

    def numbers(self) -> Numbers:
        """What was counted since the last call; called in every step."""
        book = self.book
        if not (book.counted or self._skips):
            return {}
        book.counted = self._skips = False
        totals = {
            "lookups": book.lookups,
            "hits": book.hits,
            "looked_up_tokens": book.looked_up_tokens,
            "loaded_tokens": book.loaded_tokens,
        }
        now = scheduler_numbers(totals, book.reasons, self.skipped, self.without_draft)
        new, self._told = difference(now, self._told), now
        return new

    def reset(self) -> None:
        """The weights were changed, or may have been: a new epoch."""
        self.book.new_epoch()
        self._identity = in_new_epoch(self._engine.identity)
        self._namespaces.clear()
        self._identities = {name: self._identities[name] for name in self.book.fingerprints()}
        self._namespace_of("", self._identity)

    def close(self) -> None:
        """The engine ends."""
        self._media.close()

    def fingerprints(self) -> list[bytes]:
        """Of the namespaces in use."""
        return [namespace.epoch.fingerprint for namespace in self._namespaces.values()]

    def _leaving(self, scheduler_output: Any) -> frozenset[str]:
        """Requests that lost their blocks since the last step. Not every version says so; the status does."""
        told = getattr(scheduler_output, "preempted_req_ids", None)
        left_out = self._running.difference(scheduler_output.num_scheduled_tokens)
        if not left_out and not told:
            return frozenset()
        preempted = set(told or ())
        for request_id in left_out:
            request = self._requests.get(request_id)
            if request is not None and request.status.name != _RUNNING:
                preempted.add(request_id)
        return frozenset(preempted)

    def _entry(self, request: Any) -> Entry | None:
        request_id = request.request_id
        known = self.book.get(request_id)
        if known is not None and not known.stale:
            return known
        if request_id in self._alone:
            return None
        reason = self._left_alone(request)
        if not reason:
            try:
                entry = Entry(request_id, *self._begin(request), waits_from=self._media.waited_from(request_id))
                self._requests[request_id] = request
                return self.book.enter(entry)
            except CannotShareError as error:
                reason = error.reason
                log.warning("a request is left alone: %s", error)
        self._skip(reason)
        self._alone.add(request_id)
        return None

    def _skip(self, reason: str) -> None:
        self.skipped[reason] += 1
        self._skips = True

    def _left_alone(self, request: Any) -> str:
        """Why a request's KV is not cached; "" where it is."""
        if request.prompt_token_ids is None or getattr(request, "prompt_embeds", None) is not None:
            return "prompt_embeds"
        if getattr(request, "pooling_params", None) is not None:
            return "pooling"
        if getattr(request, "resumable", False):
            return "streaming_input"
        return ""

    def _begin(self, request: Any) -> tuple[Namespace, RequestChain]:
        namespace = self._namespace(request)
        salt = str(getattr(request, "cache_salt", None) or "")
        fingerprint = namespace.epoch.fingerprint
        if (root := self._roots.get((fingerprint, salt))) is None:
            # A hundred microseconds each: OpenSSL looks the algorithm up anew.
            root = root_key(fingerprint, tenant_key=self._tenant_key, cache_salt=salt.encode())
            if len(self._roots) >= _MAX_ROOTS:
                self._roots.clear()
            self._roots[fingerprint, salt] = root
        media = self._media_of(request)
        assert media is not None  # it was waited for
        size, tokens = self._options.block_tokens, request.all_token_ids
        if media is NO_MEDIA:
            return namespace, RequestChain(root, fingerprint, size, tokens)
        if media.reason:
            self._skip(media.reason)
        return namespace, RequestChain(root, fingerprint, size, tokens, media.extras(), media.limit)

    def _media_of(self, request: Any, *, waits: bool = True) -> Media | None:
        """What a request's images are; None while that is looked at. See MediaReader.of."""
        if not getattr(request, "mm_features", None) or self._left_alone(request):
            return NO_MEDIA
        return self._media.of(request, time.monotonic(), waits=waits)

    def _namespace(self, request: Any) -> Namespace:
        lora = getattr(request, "lora_request", None)
        if lora is None:
            return self._namespaces[""]
        digest = self._adapters.digest(lora)
        known = self._namespaces.get(digest.hex())
        return known or self._namespace_of(digest.hex(), dataclasses.replace(self._identity, lora=digest))

    def _namespace_of(self, name: str, identity: NamespaceIdentity) -> Namespace:
        namespace = Namespace(identity, label=self._engine.label)
        self._namespaces[name] = namespace
        self._identities[namespace.epoch.fingerprint] = identity
        return namespace

    def _save_scheduled(self, orders: StepOrders, scheduler_output: Any) -> None:
        """Order what becomes whole in this step. Nearly every request of nearly every step only decodes a token: that
        must cost next to nothing, and vLLM's tables, which are made when they are asked for, are left alone."""
        size = self._options.block_tokens
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            request, entry = self._requests.get(request_id), self.book.get(request_id)
            if request is None or entry is None:
                continue
            computed = request.num_computed_tokens + count
            have = entry.saved_blocks
            if computed // size > have and self._known(entry, request, computed) // size > have:
                self._save(orders, entry, request, computed, self._tables.get(request_id))

    def _known(self, entry: Entry, request: Any, computed: int) -> int:
        """Of `computed` tokens those to save. Tokens not known yet (drafts, results on their way) wait."""
        most: int = request.num_prompt_tokens if self._options.prompt_only else request.num_tokens
        limit = entry.chain.limit
        return min(computed, most) if limit is None else min(computed, most, limit)

    def _save(
        self, orders: StepOrders, entry: Entry, request: Any, computed: int, table: tuple[list[int], ...] | None
    ) -> None:
        """Order what is whole when `computed` tokens are."""
        known = self._known(entry, request, computed)
        if table is None or known // self._options.block_tokens <= entry.saved_blocks:
            return
        digest = self._identities[entry.chain.fingerprint].lora
        if digest and not self._adapters.holds(request.lora_request, digest):
            if not entry.stale:
                self._skip(CHANGED)
            entry.stale = True
            return
        blocks = self.book.to_save(entry, known)
        if not blocks:
            return
        size = self._options.block_tokens
        order = SaveOrder(
            entry.request_id,
            entry.chain.fingerprint,
            entry.chain.keys(blocks.stop),
            blocks.start,
            blocks.stop,
            self._pages(table, blocks.start * size, blocks.stop * size),
            self._number,
            new_id(),
        )
        self._number += 1
        orders.saves.append(order)
        if self.announcements is not None:
            self.announcements.ordered(order.number, self._announced(request, order))
        self._name(orders, order.fingerprint)

    def _announced(self, request: Any, order: SaveOrder) -> StoredBlocks:
        size, first = self._options.block_tokens, order.first_block * KEY_BYTES
        lora = getattr(request, "lora_request", None)
        return StoredBlocks(
            order.keys[first:],
            order.keys[first - KEY_BYTES : first] if first else None,
            tuple(request.all_token_ids[order.first_block * size : order.end_block * size]),
            size,
            str(getattr(lora, "lora_name", "") or ""),
            str(getattr(request, "cache_salt", None) or ""),
            None if lora is None else int(lora.lora_int_id),
            order.first_block * size,
            _images(request),
        )

    def _pages(self, table: tuple[list[int], ...], first: int, end: int) -> tuple[PageRun, ...]:
        groups = self._engine.groups
        return tuple(page_run(ids, group.page_tokens, first, end) for ids, group in zip(table, groups, strict=True))

    def _name(self, orders: StepOrders, fingerprint: bytes) -> None:
        orders.namespaces[fingerprint] = self._identities[fingerprint]


def _images(request: Any) -> tuple[tuple[str, int, int], ...]:
    """(identifier, first token, tokens) of each."""
    features = getattr(request, "mm_features", None) or ()
    return tuple((str(f.identifier), int(f.mm_position.offset), int(f.mm_position.length)) for f in features)


def _reads_nothing(request: Any) -> bool:
    """Whether every token has to be computed, because something about each is asked for (`prompt_logprobs`)."""
    return bool(getattr(request, "skip_reading_prefix_cache", False))
