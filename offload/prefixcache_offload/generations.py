"""The control page: one u64 generation per 4 KiB granule of a pool, indexed by slot.

Generation 0 means that the slot never had an owner. The daemon writes a slot's new generation before anybody may
learn of its new owner; a reader copies the bytes first and compares afterwards. Why that order is enough:

- Writer: the generation is stored, then the answer to Reserve leaves through a system call, and only the process that
  got the answer writes bytes. So whoever sees one new byte of a slot would also see its new generation.
- Reader: the loads of the copy must come before the load of the generation. `copy_batch` runs without the GIL and
  takes it back (a mutex: nothing moves down past the release, nothing up past the acquire) before `check` loads. On x86
  loads keep their order anyway. Each generation is one aligned 8-byte load or store, so it is never seen half-written.

Which generation a slot should have is decided elsewhere.
"""

import numpy as np
import numpy.typing as npt

Slots = npt.NDArray[np.uint32]
Generations = npt.NDArray[np.uint64]
Control = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]


def write_generations(control: Control, slots: npt.ArrayLike, generations: npt.ArrayLike) -> None:
    """Store `generations` (u64[n]) at `slots` (u32[n]). Raises IndexError on a slot outside the pool."""
    control[np.asarray(slots, dtype=np.uint32)] = np.asarray(generations, dtype=np.uint64)


def read_generations(control: Control, slots: npt.ArrayLike) -> Generations:
    """Generations now, u64[n], of `slots` (u32[n]). Raises IndexError on a slot outside the pool."""
    return control[np.asarray(slots, dtype=np.uint32)]


def check(control: Control, slots: npt.ArrayLike, expected: npt.ArrayLike) -> Mask:
    """bool[n]: whether each slot still has its expected generation (u64[n]). Call it after the copy, never before.

    False means that the bytes copied may be another owner's: treat the block as the miss `lease_lost`.
    """
    return np.equal(read_generations(control, slots), np.asarray(expected, dtype=np.uint64))
