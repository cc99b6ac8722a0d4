"""The same surface for asyncio: every call runs on a thread of the client's own, so the loop never waits for a byte.

A copy of a request's blocks takes milliseconds, a frozen daemon takes a whole deadline; both would stop every other
request of the loop. The thread costs some 50 us a call. A task that is cancelled leaves nothing behind: a lease that
is granted after all is released unseen.

What belongs here: the hop to a thread and back. All else is the blocking client's.
"""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Final, Self, TypeVar, Unpack

from prefixcache_client.client import AcquireOptions, Client
from prefixcache_client.lease import Lease
from prefixcache_client.namespace import Namespace, Prompt
from prefixcache_client.options import ClientOptions
from prefixcache_client.results import CopyResult, LookupResult, PinResult, PrefetchResult, StoreResult
from prefixcache_client.served import ServedNamespace
from prefixcache_client.store import Priority
from prefixcache_offload.mapping import Bytes

T = TypeVar("T")

THREADS: Final = 4


class AsyncClient:
    """See Client; made without a server, never raises because of the cache."""

    def __init__(
        self, address: str | None = None, options: ClientOptions | None = None, *, threads: int = THREADS
    ) -> None:
        """`threads`: how many calls and copies may be under way at once; more wait for their turn.

        What makes no call and waits for nothing is the blocking client's own: `namespace`, `namespace_from_hf`,
        `store_later` (asyncio.wrap_future makes its result awaitable) and `stats`.
        """
        self._client = Client(address, options)
        self.namespace = self._client.namespace
        self.namespace_from_hf = self._client.namespace_from_hf
        self.store_later = self._client.store_later
        self.stats = self._client.stats
        self._threads = _Threads(threads)

    @property
    def blocking(self) -> Client:
        """The client behind this one, for code that runs on threads."""
        return self._client

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the session and the threads; calls under way end as misses."""
        await asyncio.get_running_loop().run_in_executor(None, self._close)

    async def acquire(self, ns: Namespace, prompt: Prompt, **options: Unpack[AcquireOptions]) -> "AsyncLease":
        """See Client.acquire; use the lease in an `async with`."""
        lease = self._threads.submit(lambda: self._client.acquire(ns, prompt, **options))
        try:
            return AsyncLease(await asyncio.wrap_future(lease), self._threads)
        except asyncio.CancelledError:
            lease.add_done_callback(_release_unseen)
            raise

    async def store(
        self, ns: Namespace, prompt: Prompt, tensors: Any, *, from_token: int = 0, priority: Priority = "normal"
    ) -> StoreResult:
        """See Client.store. Cancelling does not stop a store that has begun, so do not reuse `tensors` after it."""
        return await self._run(
            lambda: self._client.store(ns, prompt, tensors, from_token=from_token, priority=priority)
        )  # fmt: skip

    async def lookup(
        self, ns: Namespace | ServedNamespace, prompt: Prompt, *, timeout_s: float | None = None
    ) -> LookupResult:
        """See Client.lookup."""
        return await self._run(lambda: self._client.lookup(ns, prompt, timeout_s=timeout_s))

    async def served_namespaces(
        self, *, tenant_key: bytes | None = None, cache_salt: bytes = b"", timeout_s: float | None = None
    ) -> list[ServedNamespace]:
        """See Client.served_namespaces."""
        return await self._run(
            lambda: self._client.served_namespaces(tenant_key=tenant_key, cache_salt=cache_salt, timeout_s=timeout_s)
        )

    async def prefetch(self, ns: Namespace, prompt: Prompt, *, timeout_s: float | None = None) -> PrefetchResult:
        """See Client.prefetch."""
        return await self._run(lambda: self._client.prefetch(ns, prompt, timeout_s=timeout_s))

    async def pin(
        self, ns: Namespace, prompt: Prompt, *, label: str = "", ttl_s: float = 0.0, forever: bool = False
    ) -> PinResult:
        """See Client.pin."""
        return await self._run(lambda: self._client.pin(ns, prompt, label=label, ttl_s=ttl_s, forever=forever))

    async def unpin(self, pin: PinResult | bytes) -> str:
        """See Client.unpin."""
        return await self._run(lambda: self._client.unpin(pin))

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._threads.submit(work))

    def _close(self) -> None:
        self._client.close()
        self._threads.shutdown()


class AsyncLease:
    """See Lease; what moves bytes or waits is awaited."""

    __slots__ = ("_lease", "_threads")

    def __init__(self, lease: Lease, threads: "_Threads") -> None:
        self._lease = lease
        self._threads = threads

    @property
    def tokens(self) -> int:
        """See Lease."""
        return self._lease.tokens

    @property
    def blocks(self) -> int:
        """See Lease."""
        return self._lease.blocks

    @property
    def reason(self) -> str:
        """See Lease."""
        return self._lease.reason

    def parts(self, part: int = 0) -> range:
        """See Lease."""
        return self._lease.parts(part)

    def __bool__(self) -> bool:
        return bool(self._lease)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    async def copy_to(self, tensors: Any) -> CopyResult:
        """See Lease.copy_to. Cancelling does not stop a copy that has begun, so do not reuse `tensors` after it."""
        return await asyncio.wrap_future(self._threads.submit(lambda: self._lease.copy_to(tensors)))

    def view(self, block: int, part: int = 0) -> "AsyncBlockView":
        """See Lease.view; for an `async with`."""
        return AsyncBlockView(self, block, part)

    async def valid(self) -> bool:
        """See Lease.valid."""
        return await asyncio.wrap_future(self._threads.submit(self._lease.valid))

    def release(self, used_tokens: int | None = None) -> None:
        """See Lease.release; done by a thread, nothing to wait for."""
        try:
            self._threads.submit(lambda: self._lease.release(used_tokens))
        except RuntimeError:  # the client is closed: the lease has ended with its session
            self._lease.release(used_tokens)

    async def enter(self, block: int, part: int) -> Bytes:
        """The bytes of one block; see Lease.view for what it raises."""
        view = self._lease.view(block, part)
        return await asyncio.wrap_future(self._threads.submit(view.__enter__))


class AsyncBlockView:
    """One block of a lease; see BlockView."""

    __slots__ = ("_block", "_lease", "_part")

    def __init__(self, lease: AsyncLease, block: int, part: int) -> None:
        self._lease = lease
        self._block = block
        self._part = part

    async def __aenter__(self) -> Bytes:
        return await self._lease.enter(self._block, self._part)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class _Threads:
    """Threads to run calls on. In a forked child, where the parent's do not exist, they are made anew."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._make()

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        """Run `work`. Raises RuntimeError after `shutdown`."""
        if os.getpid() != self._process:
            self._make()
        return self._pool.submit(work)

    def shutdown(self) -> None:
        """Wait for what runs and end the threads."""
        self._pool.shutdown(wait=True)

    def _make(self) -> None:
        self._pool = ThreadPoolExecutor(self._count, thread_name_prefix="prefixcache-async")
        self._process = os.getpid()


def _release_unseen(lease: "Future[Lease]") -> None:
    if not lease.cancelled() and lease.exception() is None:
        lease.result().release()
