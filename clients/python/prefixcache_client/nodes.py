"""Several daemons asked at once what they hold of a prompt, for a router that has no model.

What belongs here: which namespaces are asked for and when, so that a request waits for at most one deadline of a daemon
that does not answer. It does not choose: what a cached token is worth against a busy worker is the router's to know.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Final, Self

from prefixcache.identity.keys import Tokens, pack_tokens
from prefixcache_client.aio import AsyncClient
from prefixcache_client.options import ClientOptions
from prefixcache_client.results import LookupResult
from prefixcache_client.served import ServedNamespace

NAMESPACES_S: Final = 5.0
"""For how long a daemon's namespaces are taken as known: workers open one with their first request, and one with new
weights."""
NONE_S: Final = 0.25
"""The same where none is known."""
LONGEST_SHARE: Final = 0.1
"""Of the time, that may be spent asking: a host that does not answer costs a whole deadline."""

NOT_SERVED: Final = "not_served"
"""Why a daemon of which no namespace is known holds nothing: no worker has opened one, or it was never reached."""


class Nodes:
    """Daemons by whatever name the router gives them; never raises because of them. Use it in an `async with`."""

    def __init__(
        self,
        addresses: Mapping[str, str],
        options: ClientOptions | None = None,
        *,
        tenant_key: bytes | None = None,
        cache_salt: bytes = b"",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`addresses`: of the daemons, by name. `tenant_key`, `cache_salt`: as their workers have them."""
        self._nodes = {
            name: _Node(AsyncClient(address, options), tenant_key, cache_salt, clock)
            for name, address in addresses.items()
        }

    @property
    def names(self) -> list[str]:
        """In the order of the addresses."""
        return list(self._nodes)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(node.close() for node in self._nodes.values()))

    async def lookup(self, prompt: Tokens) -> dict[str, LookupResult]:
        """What each daemon holds of a prompt, by name, in the order of the addresses: of its namespaces the one that
        holds most. A daemon that does not answer holds nothing, with the reason. Raises ValueError or TypeError for
        tokens that are none."""
        packed = pack_tokens(prompt)
        found = await asyncio.gather(*(node.lookup(packed) for node in self._nodes.values()))
        return dict(zip(self._nodes, found, strict=True))


class _Node:
    """One daemon and its namespaces, as far as they are known."""

    def __init__(
        self, client: AsyncClient, tenant_key: bytes | None, cache_salt: bytes, clock: Callable[[], float]
    ) -> None:
        self.client = client
        self._tenant_key, self._cache_salt, self._clock = tenant_key, cache_salt, clock
        self._namespaces: list[ServedNamespace] = []
        self._again_at = float("-inf")
        self._asking: asyncio.Task[None] | None = None

    async def lookup(self, packed: bytes | memoryview) -> LookupResult:
        """See Nodes.lookup. Waits for the namespaces where none is known; else they are asked for behind it."""
        if (self._asking is None or self._asking.done()) and self._clock() >= self._again_at:
            self._asking = asyncio.create_task(self._ask())
        if self._asking is not None and not self._namespaces:
            await asyncio.shield(self._asking)  # others may wait for it too
        found = [await self.client.lookup(each, packed) for each in self._namespaces]
        return max(found, key=lambda each: each.tokens, default=LookupResult(0, reason=NOT_SERVED))

    async def close(self) -> None:
        """End the client; what is being asked ends with it."""
        if self._asking is not None:
            await self._asking
        await self.client.close()

    async def _ask(self) -> None:
        began = self._clock()
        served = await self.client.served_namespaces(tenant_key=self._tenant_key, cache_salt=self._cache_salt)
        self._namespaces = served or self._namespaces
        ended = self._clock()
        self._again_at = ended + max(NAMESPACES_S if self._namespaces else NONE_S, (ended - began) / LONGEST_SHARE)
