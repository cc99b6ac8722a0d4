"""`PrefixCacheStorage`: what SGLang calls. Each call is passed on to the pool it belongs to; nothing is decided here.

Rules:
1. Nothing but a setting that means nothing raises: a daemon that is missing, slow, frozen or full costs pages, each
   with a counted reason, and every call ends in time. Reuse returns by itself.
2. SGLang's threads ask, load and store at the same time; a pool may be registered later than the first call.

What versions of SGLang do differently is found by looking, never by version.
"""

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from sglang.srt.mem_cache import hicache_storage as base

from prefixcache.identity.canonical import CanonicalError, Value
from prefixcache.identity.fingerprint import IdentityError, NamespaceIdentity
from prefixcache.identity.layout import LayoutError
from prefixcache_client import Client, Namespace
from prefixcache_sglang import hits, placing, weights
from prefixcache_sglang.counting import Counts, Numbers, Transferred
from prefixcache_sglang.facts import CannotShareError, EngineFacts, engine_facts, running_settings
from prefixcache_sglang.forms import CanonicalForm, FlatForm, Form, flat_form, form_of
from prefixcache_sglang.metrics import storage_metrics
from prefixcache_sglang.options import read_options
from prefixcache_sglang.pages import Places
from prefixcache_sglang.shelf import ENGINE_ERRORS, Shelf

log = logging.getLogger("prefixcache_sglang")

KV: Final = "kv"
POOL_UNKNOWN: Final = "pool_unknown"
POOL_UNREGISTERED: Final = "pool_unregistered"
NOT_THE_WRITER: Final = "not_the_writer"
_DRAFT: Final = "draft"


class PrefixCacheStorage(base.HiCacheStorage):  # type: ignore[misc] # no SGLang where types are checked
    """See docs/sglang.md."""

    def __init__(self, storage_config: Any, kwargs: Mapping[str, Any] | None = None) -> None:
        """Raises ValueError for settings that mean nothing. A daemon need not be there."""
        options = read_options(storage_config.extra_config)
        key = options.tenant_key()
        self.counts = Counts()
        self.reason_off = ""
        """Why nothing is cached; "" where it is."""
        self._config = storage_config
        self._options = options
        self._tenant_key = key
        self._lock = threading.Lock()
        self._changes = 0
        self._shelves: dict[str, Shelf] = {}
        self._namespaces: list[Namespace] = []
        self._off: dict[str, str] = {}
        """Why a pool is not cached, by name."""
        self._flat: Shelf | None = None
        self._facts: EngineFacts | None = None
        try:
            placing.check(storage_config)
            self._facts = engine_facts(storage_config.model_name, running_settings(), options)
        except CannotShareError as error:
            self.reason_off = error.reason
            log.warning("prefixcache is off: %s", error)
        label = self._facts.label if self._facts is not None else "off"
        limits = options.limits(
            options.ask_timeout_s,
            f"sglang {label} tp{storage_config.tp_rank}",
            store_timeout_s=options.store_timeout_s,
            load_timeout_s=options.load_timeout_s,
            device="",
        )
        self._client = Client(options.address or None, limits)
        self._watcher = weights.Watcher(self.weights_changed)
        if not weights.install():
            log.info("no weight updater in this process: weights changed in place would not be noticed")

    @property
    def numbers(self) -> Numbers:
        """What was done and not done since the backend was made, in pages."""
        return self.counts.numbers()

    # Pools.

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """See the base class."""
        super().register_mem_pool_host(mem_pool_host)
        self._add(KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """See the base class."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(_value(host_pool_name))
        if name != KV or host_pool is not getattr(self, "mem_pool_host", None):
            self._add(name, host_pool)

    def _add(self, name: str, pool: Any) -> None:
        if self._facts is None:
            return
        try:
            shelf = self._shelf(name, pool, self._facts)
        except CannotShareError as error:
            self._off[name] = error.reason
            log.warning("the pool %s is not cached: %s", name, error)
            return
        except ENGINE_ERRORS as error:
            self._off[name] = POOL_UNKNOWN
            log.warning("the pool %s is not cached: %s: %s", name, type(error).__name__, error)
            return
        self._off.pop(name, None)
        self._shelves[name] = shelf
        if name == KV:
            self._flat = None

    def _shelf(self, name: str, pool: Any, facts: EngineFacts, form: Form | None = None) -> Shelf:
        """A pool's door to the cache. Raises CannotShareError."""
        form, cut = self._form(name, pool) if form is None else (form, self._is_cut(name, form))
        each = form.heads_each if isinstance(form, CanonicalForm) else 0
        names = placing.suffixes(self._config, cut=cut, heads_each=each, pieces=form.pieces)
        detail: dict[str, Value] = {"pool": name, **form.detail}
        if each and cut:
            detail["heads"] = each * form.pieces * int(self._config.tp_size)
        layers = int(getattr(pool, "layer_num", 0))
        drafts = layers - int(getattr(pool, "target_layer_num", layers))
        if drafts or name.startswith(_DRAFT):
            detail |= {"draft": facts.draft_digest(), "draft_layers": drafts}
        namespace = self._namespace(name, form, facts, detail)
        shelf = Shelf(name, self._client.foreign(namespace), form, names, self.counts)
        shelf.writes = placing.is_writer(self._config, cut=cut)
        return shelf

    def _form(self, name: str, pool: Any) -> tuple[Form, bool]:
        """How a pool keeps pages, in as many pieces as are to be shared, and whether they are this rank's own."""
        form = form_of(pool, 1)
        cut = self._is_cut(name, form)
        if cut and isinstance(form, CanonicalForm):
            form = form_of(pool, placing.pieces_of(self._config))
        return form, cut

    def _is_cut(self, name: str, form: Form) -> bool:
        if isinstance(form, CanonicalForm):
            group = form.layout.groups[0]
            return placing.heads_are_cut(self._config, group.kv_heads, group.v_dim)
        return not placing.is_replicated(self._config, name)

    def _namespace(self, name: str, form: Form, facts: EngineFacts, detail: dict[str, Value]) -> Namespace:
        with self._lock:
            try:
                identity = NamespaceIdentity(
                    weights=facts.weights,
                    layout=form.layout,
                    block_tokens=form.block_tokens,
                    weights_epoch=weights.epoch_number(self._changes),
                    overrides={"sglang": dict(facts.settings), "page": detail},
                    tenant=self._options.tenant,
                    engine="sglang",
                )
                made = Namespace(identity, tenant_key=self._tenant_key, label=f"{facts.label} {name}")
            except (IdentityError, LayoutError, CanonicalError) as error:
                raise CannotShareError("identity_invalid", str(error)) from error
            self._namespaces.append(made)
            return made

    # Zero copy, one pool.

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """See the base class."""
        return hits.leading(self._present(KV, keys, prefix=True)) if keys else 0

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """See the base class."""
        return self._load(KV, keys, host_indices)

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """See the base class."""
        before = getattr(extra_info, "prefix_keys", None)
        return self._store(KV, keys, host_indices, placing.parents_of(keys, before))

    # Zero copy, several pools.

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """See the base class."""
        transfers = list(pool_transfers or ())
        pages = self._main_pages(keys, transfers)
        found: dict[Any, int] = {base.PoolName.KV: pages} if pages else {}
        lengths = list(range(1, pages + 1))
        for transfer in transfers:
            if not lengths:
                break
            policy = str(_value(transfer.hit_policy))
            name = str(_value(transfer.name))
            present = self._present(name, keys[:pages], prefix=policy == hits.ALL_PAGES)
            allowed = hits.allowed(policy, present, len(transfer.keys or ()))
            if allowed is None:
                continue
            if allowed:
                found[transfer.name] = allowed[-1]
            chosen = set(allowed)
            lengths = [length for length in lengths if length in chosen]
        return base.PoolTransferResult(lengths[-1] if lengths else 0, found, lengths)

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        """See the base class."""
        return {
            each.name: self._load(str(_value(each.name)), each.keys or [], each.host_indices) for each in transfers
        }  # fmt: skip

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        """See the base class."""
        done = {}
        for each in transfers:
            keys = each.keys or []
            chained = str(_value(each.hit_policy)) == hits.ALL_PAGES
            before = getattr(extra_info, "prefix_keys", None) if chained else None
            parents = placing.parents_of(keys, before) if chained else [None] * len(keys)
            done[each.name] = self._store(str(_value(each.name)), keys, each.host_indices, parents)
        return done

    # One flat copy of each page.

    def exists(self, key: str) -> bool:
        """See the base class."""
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """See the base class."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """See the base class. Pages are the pool's own flat ones; what is not there is None."""
        targets = list(target_locations or ())
        shelf = self._flat_shelf()
        if shelf is None or len(targets) != len(keys) or any(target is None for target in targets):
            self.counts.loaded(Transferred(0, 0, 0.0), len(keys), self._why(KV))
            return [None] * len(keys)
        loaded = shelf.load_flat(keys, targets).tolist()
        return [target if done else None for target, done in zip(targets, loaded, strict=True)]

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:  # fmt: skip
        """See the base class."""
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:  # fmt: skip
        """See the base class."""
        pages = list(values or ())
        shelf = self._flat_shelf()
        if shelf is None or len(pages) != len(keys) or any(page is None for page in pages):
            self.counts.stored(Transferred(0, 0, 0.0), {self._why(KV): len(keys)})
            return False
        return bool(shelf.store_flat(keys, pages, placing.parents_of(keys, None)).all())

    # The rest.

    def clear(self) -> bool:
        """Nothing that was stored before is found again by this engine; the daemon drops it as it needs room."""
        self.weights_changed()
        return True

    def weights_changed(self) -> None:
        """Move on to another weights epoch, the same on all ranks of this engine and on no other."""
        with self._lock:
            self._changes += 1
            number = weights.epoch_number(self._changes)
            for namespace in self._namespaces:
                namespace.invalidate(number)

    def get_stats(self) -> Any:
        """See the base class."""
        return storage_metrics(*self.counts.take_recent()) if self._config.enable_storage_metrics else None

    def close(self) -> None:
        """End the session with the daemon; later calls are misses."""
        self._client.close()

    def _main_pages(self, keys: list[str], transfers: Sequence[Any]) -> int:
        """How many of the main pool's pages there are from the first on."""
        if not self._is_logical():
            return self.batch_exists(keys)
        # Its pages have no bytes of their own, so what the other pools have is all there is to know.
        bounded = any(str(_value(each.hit_policy)) == hits.ALL_PAGES for each in transfers)
        return len(keys) if bounded else 0

    def _present(self, name: str, keys: Sequence[str], *, prefix: bool) -> np.ndarray[Any, np.dtype[np.bool_]]:
        shelf = self._shelves.get(name)
        if shelf is None:
            self.counts.asked(0, len(keys), self._why(name))
            return np.zeros(len(keys), np.bool_)
        return shelf.present(keys, prefix=prefix)

    def _load(self, name: str, keys: Sequence[str], host_indices: Any) -> list[bool]:
        if name == KV and self._is_logical():
            return [True] * len(keys)
        shelf = self._shelves.get(name)
        if shelf is None:
            self.counts.loaded(Transferred(0, 0, 0.0), len(keys), self._why(name))
            return [False] * len(keys)
        done: list[bool] = shelf.load(keys, _first_tokens(host_indices, shelf.form.page_tokens)).tolist()
        return done

    def _store(
        self, name: str, keys: Sequence[str], host_indices: Any, parents: Sequence[str | None]
    ) -> list[bool]:  # fmt: skip
        if name == KV and self._is_logical():
            return [True] * len(keys)
        shelf = self._shelves.get(name)
        if shelf is None:
            self.counts.stored(Transferred(0, 0, 0.0), {self._why(name): len(keys)})
            return [False] * len(keys)
        if not shelf.writes:
            self.counts.stored(Transferred(0, 0, 0.0), {NOT_THE_WRITER: len(keys)})
            return [True] * len(keys)
        done: list[bool] = shelf.store(keys, _first_tokens(host_indices, shelf.form.page_tokens), parents).tolist()
        return done

    def _is_logical(self) -> bool:
        """Whether the main pool has page numbers only."""
        pool = getattr(self, "mem_pool_host", None)
        return pool is not None and getattr(pool, "size_per_token", None) == 0 and self._facts is not None

    def _flat_shelf(self) -> Shelf | None:
        """Where the main pool's flat pages are: with the others where they are understood, else apart."""
        main = self._shelves.get(KV)
        if main is None or isinstance(main.form, CanonicalForm | FlatForm):
            return main
        if self._flat is None and self._facts is not None:
            try:
                pool = self.mem_pool_host
                self._flat = self._shelf(KV, pool, self._facts, flat_form(pool))
            except CannotShareError as error:
                log.warning("flat pages are not cached: %s", error)
        return self._flat

    def _why(self, name: str) -> str:
        return self.reason_off or self._off.get(name, POOL_UNREGISTERED)


def _first_tokens(host_indices: Any, page_tokens: int) -> Places:
    """Where pages begin, i64[n]; nothing where there are no indices or they make no whole pages."""
    if not isinstance(host_indices, torch.Tensor) or host_indices.numel() % page_tokens:
        return np.zeros(0, np.int64)
    return np.asarray(host_indices.reshape(-1)[::page_tokens].cpu().numpy(), np.int64)


def _value(name: Any) -> Any:
    return getattr(name, "value", name)
