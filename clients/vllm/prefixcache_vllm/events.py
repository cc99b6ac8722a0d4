"""vLLM's form of announcements: its events, and how workers' confirmations travel to the scheduler's side.

What belongs here: vLLM's classes. Versions without them publish nothing of ours.
"""

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from vllm.distributed import kv_events

from prefixcache_vllm.announcing import Announcement, RemovedBlocks, StoredBlocks

MEDIUM: Final = "CPU"
_CARRIER: Any = getattr(kv_events, "KVConnectorKVEvents", None)
_FIELDS: Final = frozenset(getattr(kv_events.BlockStored, "__struct_fields__", ()))


class WithoutDraft(NamedTuple):
    """A request whose prefix was not loaded for its draft model, whatever became of the model's own."""

    request_id: str


class Confirmations(_CARRIER or object):  # type: ignore[misc] # a base that old versions lack
    """Numbers of saves that are visible, from one worker or several, and what else their scheduler must know."""

    def __init__(self, numbers: Iterable[Any] = (), without_draft: Iterable[str] = ()) -> None:
        self._numbers: list[Any] = [*numbers, *map(WithoutDraft, without_draft)]
        self._workers = 1

    def saves(self) -> list[int]:
        """The numbers."""
        return [each for each in self._numbers if not isinstance(each, WithoutDraft)]

    def without_draft(self) -> set[str]:
        """Requests of which some worker says so."""
        return {each.request_id for each in self._numbers if isinstance(each, WithoutDraft)}

    def add_events(self, events: list[Any]) -> None:
        """See the base class."""
        self._numbers.extend(events)

    def aggregate(self) -> "Confirmations":
        """See the base class. Of the ranks that store together one says that it is visible."""
        return self

    def increment_workers(self, count: int = 1) -> None:
        """See the base class."""
        self._workers += count

    def get_all_events(self) -> list[Any]:
        """See the base class."""
        return self._numbers

    def get_number_of_workers(self) -> int:
        """See the base class."""
        return self._workers

    def clear_events(self) -> None:
        """See the base class."""
        self._numbers = []


def can_announce() -> bool:
    """Whether this vLLM carries confirmations."""
    return _CARRIER is not None


def event_of(told: Announcement) -> Any:
    """vLLM's event. Block hashes are our block keys, 32 bytes."""
    if isinstance(told, StoredBlocks):
        return _block_stored(told)
    if not told.keys:
        return kv_events.AllBlocksCleared()
    return _block_removed(told)


def _block_removed(blocks: RemovedBlocks) -> Any:
    return kv_events.BlockRemoved(block_hashes=list(blocks.keys), medium=MEDIUM)


def _block_stored(blocks: StoredBlocks) -> Any:
    fields: dict[str, Any] = {
        "block_hashes": blocks.hashes(),
        "parent_block_hash": blocks.parent,
        "token_ids": list(blocks.tokens),
        "block_size": blocks.block_tokens,
        "lora_id": blocks.lora_id,
        "medium": MEDIUM,
        "lora_name": blocks.lora or None,
    }
    extra_keys = [_extra_keys(blocks, place) or None for place in range(len(blocks.hashes()))]
    if any(extra_keys):
        fields["extra_keys"] = extra_keys
    return kv_events.BlockStored(**{name: value for name, value in fields.items() if name in _FIELDS})


def _extra_keys(blocks: StoredBlocks, place: int) -> tuple[Any, ...]:
    """What one block's content depends on beside its tokens, in the order in which vLLM lists it: adapter, images with
    their place relative to the block, salt."""
    first = blocks.first_token + place * blocks.block_tokens
    end = first + blocks.block_tokens
    keys: list[Any] = [blocks.lora] if blocks.lora else []
    keys += [(name, at - first) for name, at, tokens in blocks.images if at < end and first < at + tokens]
    if blocks.salt and not first:
        keys.append(blocks.salt)
    return tuple(keys)
