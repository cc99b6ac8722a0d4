"""How blocks are stored: reserve, fill, look that the slots are still ours, commit.

Rules:
1. A reservation that was granted ends once: by Commit, or by Abort, whatever happens in between.
2. Nothing is committed unless every byte of it was written into slots that still had their generation afterwards.
3. Parts whose tensors begin at different blocks (a sliding layer forgets) are reserved apart, the longest first.
4. Of a store that several processes make together (`portions`) each reserves the same, fills and commits its heads; one
   that fails gives up all that is left, for nobody else can make it whole.

Whatever goes wrong with the cache is a reason in the result; mistakes in the tensors raise. It must not know sockets.
"""

from collections import Counter
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from prefixcache.identity.keys import KEY_BYTES
from prefixcache.v1 import cache_pb2
from prefixcache_client.blocks import BlockFormat
from prefixcache_client.errors import Failure
from prefixcache_client.handover import NOT_MAPPED
from prefixcache_client.ids import new_id
from prefixcache_client.link import Link
from prefixcache_client.namespace import Epoch, Namespace, Prompt
from prefixcache_client.paths import MappedPath
from prefixcache_client.portions import Portion, reservation_id
from prefixcache_client.reasons import ALREADY_STORED, NEVER_SENT, count_reasons
from prefixcache_client.results import ForeignStore, StoreResult
from prefixcache_client.runs import granted_runs
from prefixcache_client.session import Session
from prefixcache_client.tensors import KvTensors, Places, as_tensors, held
from prefixcache_client.transport import COMMIT, RESERVE

_MS: Final = 1000


class _Share(NamedTuple):
    """Parts that are stored together: which, for which blocks, and the keys from block 0 to the last of them. Under
    which reservation, for how long, and what of them this process writes, None for everything."""

    part_mask: int
    blocks: range
    keys: bytes
    reservation: bytes = b""
    priority: cache_pb2.Priority.ValueType = cache_pb2.PRIORITY_NORMAL
    parents: bytes = b""
    portion: Portion | None = None


class _Outcome(NamedTuple):
    committed: int
    size_bytes: int
    refused: dict[str, int]
    reason: str = ""
    blocks: Places | None = None
    """Positions of the committed ones, where all that was granted was."""


Priority = Literal["low", "normal", "high"]
_PRIORITIES: Final[dict[str, cache_pb2.Priority.ValueType]] = {
    "low": cache_pb2.PRIORITY_LOW,
    "normal": cache_pb2.PRIORITY_NORMAL,
    "high": cache_pb2.PRIORITY_HIGH,
}


class Wish(NamedTuple):
    """Where storing begins, how long the blocks should stay, and what of them this process writes, None for all."""

    from_token: int
    priority: cache_pb2.Priority.ValueType
    portion: Portion | None = None


def wish(from_token: int, priority: str, portion: Portion | None = None) -> Wish:
    """What a caller asks for, checked. Raises ValueError."""
    if priority not in _PRIORITIES:
        raise ValueError(f"priority must be one of {', '.join(_PRIORITIES)}, got {priority!r}")
    return Wish(from_token, _PRIORITIES[priority], portion)


def store(link: Link, ns: Namespace, epoch: Epoch, prompt: Prompt, tensors: Any, asked: Wish) -> StoreResult:
    """See Client.store. `epoch`: the namespace's when the store was asked for, which may be some time ago."""
    target = as_tensors(tensors)
    keys = ns.hash(prompt, epoch).keys
    if ns.reason_off:
        return StoreResult(0, 0, 0, {ns.reason_off: len(keys) // KEY_BYTES}, ns.reason_off)
    committed, moved, reason = 0, 0, ""
    refused: Counter[str] = Counter()
    shares = _named(_shares(ns, target, keys, -(-asked.from_token // ns.block_tokens)), asked)
    for place, share in enumerate(shares):
        outcome = _store_share(link, ns, epoch, target, share)
        # Each share makes other parts of the same blocks visible; a block counts once.
        committed = max(committed, outcome.committed)
        moved += outcome.size_bytes
        refused.update(outcome.refused)
        reason = outcome.reason
        if reason:
            refused[reason] += len(share.blocks)
            if asked.portion is not None:
                for left in shares[place + 1 :]:
                    link.abort(left.reservation, shared=True)
            break
    link.counters.stored(committed, moved, refused)
    return StoreResult(committed, committed * ns.block_tokens, moved, dict(refused), reason)


def store_foreign(
    link: Link, ns: Namespace, keys: tuple[bytes, bytes], tensors: Any, asked: Wish
) -> ForeignStore:  # fmt: skip
    """See ForeignCache.store. `keys`: of the blocks and of their parents, packed."""
    target, (own, parents), count = as_tensors(tensors), keys, len(keys[0]) // KEY_BYTES
    stored = np.zeros(count, np.bool_)
    if ns.reason_off or not count:
        return ForeignStore(0, 0, 0, {ns.reason_off: count} if ns.reason_off else {}, ns.reason_off, stored)
    covered = [target.covers(ns.form, part.index) for part in ns.form.parts]
    if any(each != range(count) for each in covered):
        raise ValueError(f"the tensors must have one block for each of the {count} keys")
    share = _Share(0, range(count), own, new_id(), asked.priority, parents)
    outcome = _store_share(link, ns, ns.epoch, target, share)
    refused = dict(outcome.refused)
    if outcome.reason:
        refused[outcome.reason] = refused.get(outcome.reason, 0) + count
    elif set(refused) <= {ALREADY_STORED}:
        stored[:] = True
    if outcome.blocks is not None:
        stored[outcome.blocks] = True
    link.counters.stored(outcome.committed, outcome.size_bytes, refused)
    tokens = outcome.committed * ns.block_tokens
    return ForeignStore(outcome.committed, tokens, outcome.size_bytes, refused, outcome.reason, stored)


def _shares(ns: Namespace, target: KvTensors, keys: bytes, from_block: int) -> list[_Share]:
    masks: dict[range, int] = {}
    for part in ns.form.parts:
        covered = target.covers(ns.form, part.index)
        blocks = range(max(covered.start, from_block), min(covered.stop, len(keys) // KEY_BYTES))
        if blocks:
            masks[blocks] = masks.get(blocks, 0) | 1 << part.index
    every = (1 << len(ns.form.parts)) - 1
    ordered = sorted(masks.items(), key=lambda item: item[0].start)
    return [_Share(0 if mask == every else mask, blocks, keys[: blocks.stop * KEY_BYTES]) for blocks, mask in ordered]


def _named(shares: list[_Share], asked: Wish) -> list[_Share]:
    """The shares of which this process writes something, under the names that all writers have for them."""
    portion = asked.portion
    if portion is None:
        return [share._replace(reservation=new_id(), priority=asked.priority) for share in shares]
    named = [
        share._replace(reservation=reservation_id(portion.ticket, number), priority=asked.priority, portion=portion)
        for number, share in enumerate(shares)
    ]
    return [share for share in named if portion.writes(share.part_mask)]


def give_up(link: Link, form: BlockFormat, ticket: bytes) -> None:
    """See Client.give_up."""
    for number in range(len(form.parts)):
        link.abort(reservation_id(ticket, number), shared=True)


def _store_share(link: Link, ns: Namespace, epoch: Epoch, target: KvTensors, share: _Share) -> _Outcome:
    shared = share.portion is not None
    request = cache_pb2.ReserveRequest(
        reservation=share.reservation,
        shared=shared,
        keys=share.keys,
        from_block=share.blocks.start,
        parents=share.parents,
        part_mask=share.part_mask,
        priority=share.priority,
        ttl_ms=int(link.options.reservation_ttl_s * _MS),
    )

    def build(session: Session, deadline: float) -> bytes:
        request.session = session.session_id
        request.namespace_id = session.namespace_id(epoch.fingerprint, ns.form, ns.label, deadline)
        return request.SerializeToString()

    try:
        session, answer = link.call(RESERVE, cache_pb2.ReserveResponse, build, link.options.store_timeout_s)
    except Failure as failure:
        if shared or failure.reason not in NEVER_SENT:
            link.abort(share.reservation, shared=shared)
        return _Outcome(0, 0, {}, failure.reason)
    refused = count_reasons(answer.refused)
    if not answer.grants:
        return _Outcome(0, 0, refused)
    outcome = _fill(link, ns, target, session, answer, share)
    return outcome._replace(refused=dict(Counter(refused) + Counter(outcome.refused)))


def _fill(
    link: Link,
    ns: Namespace,
    target: KvTensors,
    session: Session,
    answer: cache_pb2.ReserveResponse,
    share: _Share,
) -> _Outcome:
    portion, committed = share.portion, False
    try:
        runs = granted = granted_runs(ns.form, answer.grants, share.blocks)
        if portion is not None:
            if not isinstance(session.path, MappedPath):
                raise Failure(NOT_MAPPED, "the daemon's memory is not mapped here, and a stream carries whole blocks")
            runs = portion.of(granted)
        with held(target):
            moved = session.path.save(ns.form, share.reservation, runs, target)
        done = _commit(link, session, share.reservation, [] if portion is None else portion.written(runs))
        committed = True
    except Failure as failure:
        return _Outcome(0, 0, {}, failure.reason)
    finally:
        if not committed:
            link.abort(share.reservation, shared=portion is not None)
    blocks = np.unique(np.concatenate([run.blocks for run in granted]))
    whole = blocks if done.committed_blocks == blocks.size else None
    return _Outcome(done.committed_blocks, moved, count_reasons(done.dropped), blocks=whole)


def _commit(
    link: Link, session: Session, reservation: bytes, parts: list[cache_pb2.WrittenPart]
) -> cache_pb2.CommitResponse:  # fmt: skip
    def build(now: Session, deadline: float) -> bytes:
        if now is not session:
            raise Failure("reservation_unknown", "the session that held the reservation has ended")
        request = cache_pb2.CommitRequest(session=session.session_id, reservation=reservation, parts=parts)
        return request.SerializeToString()

    _, done = link.call(COMMIT, cache_pb2.CommitResponse, build, link.options.store_timeout_s)
    return done
