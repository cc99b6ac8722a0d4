"""What each of several processes writes of one store, such as the ranks of one engine.

Rules:
1. All processes store the same blocks of the same prompt under one ticket, each the KV heads, or layers of them, that
   no other writes. A block becomes visible when all of it was written and committed.
2. A process that cannot write its portion gives the ticket up (`Client.give_up`, or a store that fails does it). Then,
   or when one dies or is too slow, nothing that is not whole becomes visible.
3. Only memory that is mapped is written so: a stream carries whole blocks.

It must not know what a rank is, nor calls.
"""

import hashlib
from dataclasses import dataclass, replace

from prefixcache.v1 import cache_pb2
from prefixcache_client.blocks import BlockFormat
from prefixcache_client.ids import ID_BYTES
from prefixcache_client.runs import SlotRun


@dataclass(frozen=True, slots=True)
class Portion:
    """`ticket`: 16 bytes, the same for all processes, and for this store only. `heads`: by part of a block, the KV
    heads that this process writes; empty where it writes none of the part. `layers`: by part, which of its layers,
    counted from the part's first; () for all of them."""

    ticket: bytes
    heads: tuple[range, ...]
    layers: tuple[range, ...] = ()

    def check(self, form: BlockFormat) -> None:
        """Raises ValueError for a portion that this layout does not have."""
        if len(self.ticket) != ID_BYTES:
            raise ValueError(f"a ticket is {ID_BYTES} bytes, got {len(self.ticket)}")
        if len(self.heads) != len(form.shapes) or len(self.layers) not in (0, len(form.shapes)):
            raise ValueError(f"heads and layers must name one range for each of the {len(form.shapes)} parts")
        for part, shape in enumerate(form.shapes):
            if not _within(self.heads[part], shape.kv_heads) or not _within(self._layers(part), shape.layers):
                text = f"heads {self.heads[part]} and layers {self._layers(part)}"
                raise ValueError(
                    f"{text} are not within part {part} of {shape.kv_heads} KV heads of {shape.layers} layers"
                )

    def writes(self, part_mask: int) -> bool:
        """Whether it holds anything of these parts; 0: of any."""
        return any(self._has(part) and (not part_mask or part_mask >> part & 1) for part in range(len(self.heads)))

    def of(self, runs: list[SlotRun]) -> list[SlotRun]:
        """The slots of which it writes something, with what that is."""
        return [
            replace(run, heads=self.heads[run.part], layers=self.layers[run.part] if self.layers else None)
            for run in runs
            if self._has(run.part)
        ]

    def written(self, runs: list[SlotRun]) -> list[cache_pb2.WrittenPart]:
        """What it has written, for a commit."""
        parts = sorted({run.part for run in runs})
        return [
            cache_pb2.WrittenPart(
                part=part,
                first_head=self.heads[part].start,
                heads=len(self.heads[part]),
                first_layer=self._layers(part).start,
                layers=len(self._layers(part)) if self.layers else 0,
            )
            for part in parts
        ]

    def _has(self, part: int) -> bool:
        return bool(self.heads[part]) and (not self.layers or bool(self.layers[part]))

    def _layers(self, part: int) -> range:
        return self.layers[part] if self.layers else range(0)


def _within(some: range, count: int) -> bool:
    return some.step == 1 and some.start >= 0 and some.stop <= count


def reservation_id(ticket: bytes, number: int) -> bytes:
    """The reservation that stands for the ticket's `number`-th group of parts that are reserved together."""
    return ticket if not number else hashlib.sha256(ticket + number.to_bytes(4, "little")).digest()[:ID_BYTES]
