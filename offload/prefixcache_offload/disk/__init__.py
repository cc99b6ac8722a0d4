"""The disk tier's bytes: a log of segments that survives kill -9, read and written with large direct calls.

Knows segments, records, slots of memory and opaque keys. Decides nothing: which blocks to write, evict or keep, and
what a hit is, is told by the caller. `tier.DiskTier` is the way in; README-level rules stand at the top of each file.
"""

from prefixcache_offload.disk.options import DiskOptions
from prefixcache_offload.disk.outcomes import DiskRefused, Outcome, Refusal, Trouble
from prefixcache_offload.disk.records import ENTRY, Entries, Kind

__all__ = ["ENTRY", "DiskOptions", "DiskRefused", "Entries", "Kind", "Outcome", "Refusal", "Trouble"]
