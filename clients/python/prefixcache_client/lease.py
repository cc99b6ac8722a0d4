"""A lease: blocks of one prompt that stay valid until it is released or runs out.

Rules:
1. Bytes are trusted only after the copy: the lease must not have run out and every slot must still have its generation.
   Whatever fails is a `CopyResult` with a reason, never an exception.
2. A lease is released once, however it ends (held.py).
3. A miss is a lease of 0 tokens; nothing has to be told to the server about it.

It must not know how bytes travel (paths) or how calls are made (link).
"""

import logging
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from prefixcache.v1 import cache_pb2, common_pb2
from prefixcache_client.blocks import BlockFormat
from prefixcache_client.coming import Coming
from prefixcache_client.errors import Failure, LeaseEndedError
from prefixcache_client.handover import LeaseTicket
from prefixcache_client.held import Held, check_time
from prefixcache_client.link import Link
from prefixcache_client.reasons import DEADLINE, UNUSED
from prefixcache_client.results import CopyResult
from prefixcache_client.runs import SlotRun, leased_runs
from prefixcache_client.session import Session
from prefixcache_client.tensors import KvTensors, as_tensors
from prefixcache_offload.mapping import Bytes

log = logging.getLogger("prefixcache_client")


class Grant:
    """What a lease holds on to while it lives: the session, the id, when it runs out, and the slots.

    The slots are unpacked at the first copy: that is half the cost of an acquire, and the request's path is not the
    place.
    """

    __slots__ = ("_packed", "_runs", "coming", "ends_at", "lease", "session")

    def __init__(self, session: Session, lease: bytes, ends_at: float, packed: cache_pb2.AcquireResponse) -> None:
        self.session = session
        self.lease = lease
        self.ends_at = ends_at
        self._packed = packed
        self._runs: list[SlotRun] | None = None
        self.coming: Coming | None = None
        """Blocks that were not ready when the lease was granted."""

    @property
    def packed_tokens(self) -> common_pb2.TierTokens:
        """Planned tokens by tier, as the server told them."""
        return self._packed.tokens

    def runs(self, form: BlockFormat, blocks: range) -> list[SlotRun]:
        """The slots of those of `blocks`, always the same ones, that are ready by now.

        Raises Unreachable where the server contradicts itself."""
        if self._runs is None:
            ready = blocks if self.coming is None else range(blocks.start, self.coming.blocks.start)
            self._runs = leased_runs(form, self._packed.runs, ready, blocks.stop)
        return self._runs

    def wait(self, form: BlockFormat, blocks: range) -> list[SlotRun]:
        """The slots of the next blocks that come; none when no more do."""
        if self.coming is None:
            return []
        known = self.runs(form, blocks)
        fresh = self.coming.wait(form)
        known += fresh
        return fresh

    @property
    def missing(self) -> str:
        """Why some of the promised blocks did not come; empty where all did, or still may."""
        return self.coming.reason or DEADLINE if self.coming is not None and self.coming.blocks else ""


class Lease(Held[Grant]):
    """What `Client.acquire` answers; use it in a `with`. Not safe for two threads at once.

    `tokens`: length of the cached prefix, from token 0, that may be read; 0 on a miss. Where some of it still has to
    come from a slower tier, the copy waits for that. `blocks`: the same in blocks. `from_block`: the first block asked
    for; earlier ones are the engine's own. `reason`: why the prefix ends where it ends, "" when all whole blocks of the
    prompt were found.
    """

    __slots__ = ("_form", "_used", "blocks", "from_block", "reason", "tokens")

    def __init__(
        self, link: Link, form: BlockFormat, blocks: int, from_block: int, reason: str, grant: Grant | None
    ) -> None:
        """Made by the client only; without `grant` a miss."""
        self.blocks = blocks
        self.tokens = blocks * form.block_tokens
        self.from_block = from_block
        self.reason = reason
        self._form = form
        self._used = 0
        super().__init__(link, grant)

    @property
    def tokens_by_tier(self) -> dict[str, int]:
        """Where the tokens from `from_block` on were when the lease was granted: "gpu", "host", "disk", "peer".

        All zero on a miss, or once the lease was released."""
        packed = self._grant.packed_tokens if self._grant is not None else None
        return {tier: getattr(packed, tier, 0) for tier in ("gpu", "host", "disk", "peer")}

    def __bool__(self) -> bool:
        """Whether there is anything to copy."""
        return self.tokens > 0

    def _size(self) -> str:
        return f"{self.tokens} tokens"

    def parts(self, part: int = 0) -> range:
        """Positions of the blocks of `part` that may be read: all, or the last window of a sliding group."""
        if self._grant is not None and self._grant.coming is not None:  # some of its slots are not known yet
            return range(max(self.from_block, self.blocks - self._form.needed_blocks[part]), self.blocks)
        runs = [run for run in self._all_runs() if run.part == part]
        return range(int(runs[0].blocks[0]), int(runs[-1].blocks[-1]) + 1) if runs else range(0)

    def copy_to(self, tensors: Any) -> CopyResult:
        """Copy the leased blocks that `tensors` have room for; see prefixcache_client.tensors for what may be passed.

        The bytes are valid only if the result is `ok`; on a miss it is not. Raises LeaseEndedError after `release`,
        ValueError or TypeError for tensors that do not fit the layout.
        """
        if not self.tokens:
            return CopyResult(ok=False, tokens=0, size_bytes=0, reason=self.reason)
        grant = self._granted()
        target = as_tensors(tensors)
        try:
            wanted = self._wanted(grant, target)
            if not wanted and grant.coming is None:
                raise ValueError("the tensors have room for none of the leased blocks")
            check_time(grant)
            moved = grant.session.path.load(self._form, grant.lease, wanted, target) if wanted else 0
            check_time(grant)
            if grant.coming is not None:
                moved += self._copy_coming(grant, wanted, target)
        except Failure as failure:
            return self._lose(failure.reason)
        last_block = min((int(run.blocks[-1]) + 1 for run in _last_of_each_part(wanted)), default=0)
        self._link.counters.loaded(moved)
        tokens = last_block * self._form.block_tokens
        if grant.missing:
            reason = self._lose(grant.missing).reason
            return CopyResult(ok=False, tokens=tokens, size_bytes=moved, reason=reason)
        self._used = max(self._used, last_block)
        return CopyResult(ok=True, tokens=tokens, size_bytes=moved)

    def _copy_coming(self, grant: Grant, wanted: list[SlotRun], target: KvTensors) -> int:
        """Copies blocks as they come, while others are loaded; adds them to `wanted`. Answers bytes."""
        moved = 0
        while fresh := grant.wait(self._form, range(self.from_block, self.blocks)):
            cut = self._cut(fresh, target)
            if cut:
                check_time(grant)
                moved += grant.session.path.load(self._form, grant.lease, cut, target)
                check_time(grant)
                wanted += cut
        return moved

    def view(self, block: int, part: int = 0) -> "BlockView":
        """`with lease.view(i) as array`: the bytes of block i (its position in the prompt), read-only u8[part bytes].

        No copy where memory is shared. The bytes are promised while the lease lives: call `valid` after the last use.
        Raises IndexError when the lease does not hold the block; entering it raises LeaseEndedError after the lease.
        """
        if self.tokens:
            grant = self._granted()
            while grant.coming is not None and block >= grant.coming.blocks.start:
                if not grant.wait(self._form, range(self.from_block, self.blocks)):
                    break
        for run in self._all_runs():
            found = run.within(range(block, block + 1)) if run.part == part else None
            if found is not None:
                return BlockView(self, found)
        raise IndexError(f"the lease holds no block {block} of part {part}")

    def valid(self) -> bool:
        """Whether all that was read through the lease so far was what was leased. False once it ended or failed."""
        grant = self._grant
        if grant is None or time.monotonic() >= grant.ends_at:
            return False
        runs = self._all_runs()
        return not self._lost and grant.session.path.intact(runs)

    def ticket(self) -> LeaseTicket | None:
        """What another process on this host needs to copy these blocks; None when there is nothing to copy.

        Waits for blocks that come from a slower tier, within the lease's `load_timeout_s`; what did not come shortens
        the ticket. Keep the lease until the copies are over, then release it. Raises LeaseEndedError after `release`.
        """
        if not self.tokens:
            return None
        grant = self._granted()
        try:
            runs = list(grant.runs(self._form, range(self.from_block, self.blocks)))
            while grant.wait(self._form, range(self.from_block, self.blocks)):
                pass
            runs = list(grant.runs(self._form, range(self.from_block, self.blocks)))
        except Failure as failure:
            self._lose(failure.reason)
            return None
        blocks = self.blocks
        if grant.missing:
            # A shorter prefix of sliding layers would lack its window, so only full attention may be cut.
            self._lost = grant.missing
            blocks = grant.coming.blocks.start if grant.coming is not None and self._form.all_full else 0
        if blocks <= self.from_block:
            return None
        session = grant.session
        return LeaseTicket(session.incarnation, grant.lease, grant.ends_at, self.from_block, blocks, tuple(runs))

    def release(self, used_tokens: int | None = None) -> None:
        """Give the blocks back; a second call does nothing. `used_tokens`: what was used, else what was copied."""
        grant, self._grant = self._grant, None
        if grant is None:
            return
        used = self._used if used_tokens is None else min(used_tokens // self._form.block_tokens, self.blocks)
        reason = UNUSED if not self._lost else self._lost
        if used < self.blocks:
            unused = self.tokens - max(used, self.from_block) * self._form.block_tokens
            self._link.counters.lost(unused, reason)
        self._give_back(grant, used, reason)

    def enter_view(self, run: SlotRun) -> Bytes:
        """The bytes of one block. Raises LeaseEndedError once the lease is released, has run out or lost its server."""
        grant = self._granted()
        try:
            check_time(grant)
            array = grant.session.path.view(self._form, grant.lease, run)
        except Failure as failure:
            raise LeaseEndedError(f"the lease has ended ({failure.reason}): {failure}") from failure
        self._used = max(self._used, int(run.blocks[0]) + 1)
        return array

    def _all_runs(self) -> Sequence[SlotRun]:
        try:
            return self._grant.runs(self._form, range(self.from_block, self.blocks)) if self._grant is not None else ()
        except Failure as failure:
            self._lose(failure.reason)
            return ()

    def _granted(self) -> Grant:
        if self._grant is None:
            raise LeaseEndedError("the lease has been released" if self.tokens else "the lease holds no block")
        return self._grant

    def _wanted(self, grant: Grant, target: KvTensors) -> list[SlotRun]:
        return self._cut(grant.runs(self._form, range(self.from_block, self.blocks)), target)

    def _cut(self, runs: Sequence[SlotRun], target: KvTensors) -> list[SlotRun]:
        """What the tensors have room for."""
        covered = [target.covers(self._form, part) for part in range(len(self._form.parts))]
        cut = (run.within(covered[run.part]) for run in runs)
        return [run for run in cut if run is not None]

    def _lose(self, reason: str) -> CopyResult:
        self._lost = reason
        self._used = min(self._used, self.from_block)
        return CopyResult(ok=False, tokens=0, size_bytes=0, reason=reason)


class BlockView:
    """One block of a lease; what `with` gives is the array. An array kept beyond the `with` stays readable; its bytes
    are promised no longer."""

    __slots__ = ("_lease", "_run")

    def __init__(self, lease: Lease, run: SlotRun) -> None:
        self._lease = lease
        self._run = run

    def __enter__(self) -> Bytes:
        return self._lease.enter_view(self._run)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


def _last_of_each_part(runs: Sequence[SlotRun]) -> list[SlotRun]:
    return list({run.part: run for run in runs}.values())
