"""Which KV heads of a model a rank has, and which of them it stores.

Rules: the stages of a pipeline have layers of their own, and all heads of them. The tensor-parallel ranks of a stage
split the heads evenly, or, where there are more ranks than heads, several have the same one; then the first of them
stores it. Anything else no engine does, and it is refused. Integers only.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rank:
    """One worker among those of a model: tensor-parallel rank `number` of `count`, in `stage` of `stages`."""

    number: int = 0
    count: int = 1
    stage: int = 0
    stages: int = 1

    @property
    def alone(self) -> bool:
        """Whether it is the only worker."""
        return self.count * self.stages == 1

    @property
    def first(self) -> bool:
        """Whether it is the one that counts what is counted once."""
        return not self.number and not self.stage

    def holds(self, kv_heads: int) -> range:
        """The heads that this rank has, of a model's `kv_heads`."""
        if kv_heads >= self.count:
            each = kv_heads // self.count
            return range(self.number * each, (self.number + 1) * each)
        head = self.number * kv_heads // self.count
        return range(head, head + 1)

    def stores(self, kv_heads: int) -> range:
        """Those of them that it stores: empty where a lower rank has the same."""
        held = self.holds(kv_heads)
        if kv_heads < self.count and self.number % (self.count // kv_heads):
            return range(held.start, held.start)
        return held


def splits(kv_heads: int, ranks: int) -> bool:
    """Whether so many ranks can have so many heads."""
    return not (kv_heads % ranks if kv_heads >= ranks else ranks % kv_heads)
