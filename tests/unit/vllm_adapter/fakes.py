"""Stand-ins: an asker that answers when told to, tickets, and what vLLM hands over, with only the attributes it has."""

from collections import UserDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from prefixcache.identity.fingerprint import NamespaceIdentity
from prefixcache.identity.keys import KEY_BYTES
from prefixcache.identity.layout import GroupKind, LayerGroup, Layout
from prefixcache_client import LeaseTicket, Namespace
from prefixcache_client.runs import SlotRun
from prefixcache_vllm.asking import Ask, Found, Hint
from prefixcache_vllm.identity import EngineIdentity, GroupPages
from tests.e2e.processes import wait_until

SIZE = 64
LAYOUT = Layout.of(LayerGroup(GroupKind.FULL, (0, 1), 2, 32, 32, "bfloat16"))
IDENTITY = NamespaceIdentity(weights=b"w" * 32, layout=LAYOUT, block_tokens=SIZE)
NAMESPACE = Namespace(IDENTITY)


def engine(*, page_tokens: int = 32, layout: Layout = LAYOUT) -> EngineIdentity:
    """An engine whose layers are all in one group."""
    identity = NamespaceIdentity(weights=b"w" * 32, layout=layout, block_tokens=SIZE)
    layers = {f"model.layers.{i}.self_attn.attn": i for group in layout.groups for i in group.layers}
    return EngineIdentity(identity, (GroupPages(layers, page_tokens),), "tiny")


def ticket(blocks: int, from_block: int = 0, ends_at: float = 1e9) -> LeaseTicket:
    """A ticket for blocks from_block.. of a namespace of one part."""
    count = blocks - from_block
    run = SlotRun(
        0, 0, np.arange(from_block, blocks, dtype=np.int64), np.arange(count, dtype=np.uint32),
        np.ones(count, np.uint64),
    )  # fmt: skip
    return LeaseTicket(b"i" * 16, b"l" * 16, ends_at, from_block, blocks, (run,))


@dataclass
class FakeAsker:
    """Answers when `tell` is called. `given_back`: (ask, used tokens)."""

    pool_bytes: int = 0
    asked: list[Ask] = field(default_factory=list)
    given_back: list[tuple[Ask, int]] = field(default_factory=list)
    hints: list[Hint] = field(default_factory=list)

    def submit(self, ask: Ask) -> None:
        self.asked.append(ask)

    def give_back(self, ask: Ask, used_tokens: int) -> None:
        self.given_back.append((ask, used_tokens))

    def hint(self, hint: Hint) -> None:
        self.hints.append(hint)

    def tell(self, blocks: int, *, ends_at: float = 1e9, ask: Ask | None = None) -> None:
        """The last question's answer: so many blocks from 0, or nothing."""
        question = ask or self.asked[-1]
        first = question.question.from_token // SIZE
        found = ticket(blocks, first, ends_at) if blocks > first else None
        assert question.came(Found(found, "" if found else "not_stored"), None) is None

    @property
    def open(self) -> int:
        """Questions that were not given back."""
        return len(self.asked) - len(self.given_back)


@dataclass
class FakeRequest:
    """The attributes of vLLM's Request that are read."""

    request_id: str
    prompt_token_ids: list[int] | None
    output: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    cache_salt: str | None = None
    lora_request: Any = None
    mm_features: list[Any] = field(default_factory=list)
    prompt_embeds: Any = None
    pooling_params: Any = None
    resumable: bool = False
    skip_reading_prefix_cache: bool = False
    status: Any = field(default_factory=lambda: SimpleNamespace(name="RUNNING"))

    @property
    def all_token_ids(self) -> "FakeTokens":
        return FakeTokens(self)

    @property
    def num_tokens(self) -> int:
        return len((self.prompt_token_ids or []) + self.output)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids or [])


@dataclass
class FakeTokens(Sequence[int]):
    """A view of a request's tokens that grows with them."""

    request: FakeRequest

    def __getitem__(self, item: Any) -> Any:
        return ((self.request.prompt_token_ids or []) + self.request.output)[item]

    def __len__(self) -> int:
        return self.request.num_tokens


def image(content: int | str, offset: int, tokens: int = 20, *, name: str = "") -> Any:
    """A MultiModalFeatureSpec; vLLM calls it by its content unless it has a `name`."""
    seed = hash_of(str(content))
    pixels = torch.rand((3, 8, 8), generator=torch.Generator().manual_seed(seed))
    return SimpleNamespace(
        data=UserDict({"pixel_values": SimpleNamespace(data=pixels)}), modality="image",
        identifier=name or f"digest of {content}", mm_position=SimpleNamespace(offset=offset, length=tokens),
    )  # fmt: skip


def hash_of(content: str) -> int:
    """A small number, the same in every process."""
    return int.from_bytes(content.encode(), "little") % (1 << 31)


def until_read(ask: Callable[[], Any]) -> Any:
    """What `ask` answers in the end: images are read on another thread, and None means later."""
    found: list[Any] = []
    assert wait_until(lambda: found.append(ask()) or found[-1] is not None)  # type: ignore[func-returns-value] # or
    return found[-1]


def step(scheduled: dict[str, int], tables: dict[str, tuple[list[int], ...]], **more: Any) -> Any:
    """A SchedulerOutput of a new vLLM."""
    state = SimpleNamespace(get_block_ids=lambda name: tables[name] if name in scheduled else None)
    return SimpleNamespace(num_scheduled_tokens=scheduled, kv_connector_block_state=state, **more)


def blocks_of(keys: bytes) -> int:
    """How many keys these are."""
    return len(keys) // KEY_BYTES
