"""What takes the place of placeholder tokens (images, videos, sound), told apart by what the model is given.

Rules:
1. vLLM names an item in `identifier`: a digest of what the client sent, whatever the client says it is (`uuid`), or,
   with vLLM's own caches off, a number that begins anew in every process. A name says nothing outside of its engine, so
   keys hold a digest of the item's processed data, of its place holders, and of what the encoder's output depends on.
2. vLLM takes an encoder's output by that name. A name under which other data came is not believed again in this engine,
   for it cannot be said what the model saw.
3. Data may be megabytes: it is read on a thread of its own, and `of` answers from memory. What takes too long, is not
   here (handles of shared memory, embeddings kept elsewhere) or is not understood gets an id that nothing else has:
   such an item is found by nobody, and nothing from it on is to be stored (`Media.limit`).

Attributes are read by name; nothing of vLLM is imported.
"""

import hashlib
import logging
import os
import queue
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from prefixcache.identity.keys import Extra
from prefixcache_vllm.encoder import Encoder

log = logging.getLogger("prefixcache_vllm")

KIND: Final = "mm"
NOT_HERE: Final = "media_not_here"
UNKNOWN: Final = "media_unknown"
LATE: Final = "media_late"
NAME_REUSED: Final = "media_name_reused"

_LEAST_BYTES: Final = 64
"""Less is no image: a handle, or the shape of one whose pixels are elsewhere."""
_MAX_NAMES: Final = 1 << 14
"""More than any encoder cache holds: a name that is forgotten here stands for nothing there either."""


class _UnreadableError(Exception):
    """Data of which no digest can be made; says the reason."""


class _Name:
    """What stands behind a name. `digest`: of the data; empty before any was read, None once it cannot be said.
    `unread`: how many items of that name the encoder may have been given before they are read."""

    __slots__ = ("data", "digest", "unread")

    def __init__(self) -> None:
        self.digest: bytes | None = b""
        self.data: weakref.ref[Any] | None = None
        self.unread = 0

    def came(self, content: bytes, data: object) -> None:
        """Data came under it."""
        if self.digest == b"":
            self.digest, self.data = content, weakref.ref(data)
        elif self.digest != content:
            self.digest = None

    def stands_for(self, data: object) -> bool:
        """Whether it is this very object."""
        return bool(self.digest) and self.data is not None and self.data() is data


class _Item:
    """One item of a request, as far as it is known. `given_up`: the request did not wait until it was read."""

    __slots__ = ("digest", "feature", "given_up", "name", "reason")

    def __init__(self, feature: Any) -> None:
        self.feature = feature
        self.name: _Name | None = None
        self.digest = b""
        self.reason = LATE
        self.given_up = False

    @property
    def offset(self) -> int:
        """Its first token."""
        return int(self.feature.mm_position.offset)

    @property
    def known(self) -> bool:
        """Whether it is, and still is, what its digest says."""
        name = self.name
        return name is not None and bool(name.digest) and not name.unread and not self.given_up


class Media:
    """The items of one request. `waits_from`: since when the request waits for them; None while it does not."""

    def __init__(self, features: Iterable[Any]) -> None:
        self.waits_from: float | None = None
        self.read = False
        self.items = [_Item(feature) for feature in features]
        self._extras: list[Extra] | None = None

    def extras(self) -> list[Extra]:
        """Of the whole request; the same at every call."""
        if self._extras is None:
            # What is not known gets an id of its own: nobody has a block behind it.
            self._extras = [
                Extra(KIND, item.digest if item.known else os.urandom(32), item.offset) for item in self.items
            ]
        return self._extras

    @property
    def reason(self) -> str:
        """Why not all is cached; "" where it is."""
        return next((item.reason for item in self.items if not item.known), "")

    def limit(self) -> int | None:
        """Tokens in front of the first item that is not known; None where all are."""
        return min((item.offset for item in self.items if not item.known), default=None)


NO_MEDIA: Final = Media(())


class MediaReader:
    """Reads the items of requests. One thread asks; its own one reads."""

    def __init__(self, encoder: Encoder, wait_s: float) -> None:
        """`wait_s`: how long a request may wait."""
        self._encoder, self._wait_s = encoder, wait_s
        self._requests: dict[str, Media] = {}
        self._names: OrderedDict[str, _Name] = OrderedDict()
        self._lock = threading.Lock()  # over _names, and what items and requests are known to be
        self._work: queue.SimpleQueue[Media | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def of(self, request: Any, now: float, *, waits: bool = True) -> Media | None:
        """What is known of a request's items once that is all there will be; None: ask again later. `waits`: whether
        the request could run by now."""
        media = self._requests.get(request.request_id)
        if media is None:
            media = self._requests[request.request_id] = Media(request.mm_features)
            self._begin(media)
        if waits and not media.read:
            media.waits_from = now if media.waits_from is None else media.waits_from
            if now - media.waits_from >= self._wait_s:
                self._give_up(media)
        return media if media.read else None

    def waited_from(self, request_id: str) -> float | None:
        """Since when a request whose items are known had to wait for them; told once. None where it had not to."""
        media = self._requests.get(request_id)
        if media is None:
            return None
        since, media.waits_from = media.waits_from, None
        return since

    def forget(self, request_id: str) -> None:
        """The request is gone."""
        self._requests.pop(request_id, None)

    def close(self) -> None:
        """End the thread."""
        self._work.put(None)

    def _begin(self, media: Media) -> None:
        if self._encoder.refused:
            for item in media.items:
                item.reason = self._encoder.refused
            media.read = True
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="prefixcache-media", daemon=True)
            self._thread.start()
        self._work.put(media)

    def _run(self) -> None:
        while (media := self._work.get()) is not None:
            for item in media.items:
                try:
                    self._read(item)
                except _UnreadableError as error:
                    self._unread(item, str(error))
                except (
                    ValueError,
                    TypeError,
                    LookupError,
                    AttributeError,
                    OSError,
                    RuntimeError,
                    MemoryError,
                ) as error:
                    # Data of a form that nobody thought of; this thread goes on.
                    log.warning("an item could not be read: %s: it is not cached", type(error).__name__)
                    self._unread(item, UNKNOWN)
            with self._lock:
                media.read = True

    def _unread(self, item: _Item, reason: str) -> None:
        item.reason = reason
        with self._lock:
            self._name(item).digest = None

    def _read(self, item: _Item) -> None:
        name, data = str(item.feature.identifier), getattr(item.feature, "data", None)
        with self._lock:
            known = self._names.get(name)
            content = known.digest if known is not None and known.stands_for(data) else b""
        content = content or _content(data)
        digest = hashlib.sha256(self._encoder.settings + content + _place(item.feature)).digest()
        with self._lock:
            item.digest, item.name = digest, self._name(item)
            item.name.came(content, data)
            if item.given_up:
                item.name.unread -= 1
            elif not item.known:
                item.reason = NAME_REUSED

    def _give_up(self, media: Media) -> None:
        """The request goes on with items that nobody has read yet: the encoder may keep them under their names."""
        with self._lock:
            media.read = True
            for item in media.items:
                if item.name is None:
                    item.given_up = True
                    self._name(item).unread += 1
            media.extras()

    def _name(self, item: _Item) -> _Name:
        key = str(item.feature.identifier)
        name = self._names.setdefault(key, _Name())
        self._names.move_to_end(key)
        if len(self._names) > _MAX_NAMES:
            self._names.popitem(last=False)
        return name


def _place(feature: Any) -> bytes:
    """Which of its place holders are replaced, and by what kind of thing."""
    place = feature.mm_position
    mask = getattr(place, "is_embed", None)
    digest = hashlib.sha256()
    _feed(digest, [str(getattr(feature, "modality", "")), int(place.length), mask])
    return digest.digest()


def _content(data: Any) -> bytes:
    """32 bytes over all that the encoder is given of an item. Raises _UnreadableError."""
    if not isinstance(data, Mapping):
        raise _UnreadableError(NOT_HERE if data is None else UNKNOWN)
    digest = hashlib.sha256()
    size = _feed(digest, {str(key): getattr(element, "data", None) for key, element in data.items()})
    if size < _LEAST_BYTES:
        raise _UnreadableError(NOT_HERE)
    return digest.digest()


def _feed(digest: Any, value: object) -> int:
    """Hash a value, each with its kind and length in front, so that no two give the same bytes. Answers how many bytes
    of tensors there were."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        _frame(digest, "tensor", f"{value.dtype} {tuple(value.shape)}".encode())
        return _array(digest, flat.view(torch.uint8).numpy()) if flat.numel() else 0
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        _frame(digest, "array", f"{value.dtype.str} {value.shape}".encode())
        return _array(digest, np.ascontiguousarray(value).reshape(-1).view(np.uint8))
    if isinstance(value, Mapping):
        return _several(digest, "map", [part for key in sorted(value, key=str) for part in (str(key), value[key])])
    if isinstance(value, list | tuple):
        return _several(digest, "list", value)
    if value is None or isinstance(value, bool | int | float | str | bytes):
        _frame(digest, type(value).__name__, repr(value).encode("utf-8", "backslashreplace"))
        return 0
    log.warning("an item holds a %s, which is not understood: it is not cached", type(value).__name__)
    raise _UnreadableError(UNKNOWN)


def _several(digest: Any, kind: str, values: Sequence[object]) -> int:
    _frame(digest, kind, str(len(values)).encode())
    return sum(_feed(digest, value) for value in values)


def _array(digest: Any, data: Any) -> int:
    digest.update(data)
    return int(data.nbytes)


def _frame(digest: Any, kind: str, data: bytes) -> None:
    digest.update(f"{kind} {len(data)} ".encode() + data)
