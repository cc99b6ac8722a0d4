"""How things end on disk, by name. More than two outcomes is an enum; every one of them is counted.

Only names live here, and which of them an error number means.
"""

import errno
from enum import IntEnum, StrEnum


class Outcome(IntEnum):
    """How one record's write or read ended. Arrays of outcomes are u8."""

    OK = 0
    QUEUE_FULL = 1
    """The bounded queue had no room: dropped, nothing was written."""
    NO_ROOM = 2
    """The cap leaves no room for another segment: free one first."""
    TIER_OFF = 3
    """The tier (or this direction of it) is off; `Health` has the reason."""
    IO_ERROR = 4
    NO_SPACE = 5
    """The file system is full, although the cap is not reached."""
    MISMATCH = 6
    """The bytes are not those of this record: flipped, zeroed, swapped or stale. Never data."""
    TRUNCATED = 7
    """The file ends before the record does."""
    GONE = 8
    """There is no such segment (any more)."""
    CANCELLED = 9
    SHUT_DOWN = 10
    REVOKED = 11
    """It was cleared before it could be appended again."""
    UNKNOWN_CODEC = 12
    """The payload has a form that this version cannot read; it stays on disk for one that can."""


class Trouble(StrEnum):
    """Why a direction of the tier is off."""

    NO_SPACE = "no_space"
    IO_ERROR = "io_error"
    READ_ONLY = "read_only"
    DIRECTORY_GONE = "directory_gone"
    STALLED = "stalled"
    THREAD_DIED = "thread_died"
    CLOSED = "closed"


class Refusal(StrEnum):
    """Why a data directory is not opened at all."""

    IN_USE = "in_use"
    FOREIGN = "foreign"
    NEWER_FORMAT = "newer_format"
    OTHER_FORMAT = "other_format"
    DAMAGED_FORMAT = "damaged_format"
    CAP_TOO_SMALL = "cap_too_small"
    BAD_OPTIONS = "bad_options"
    UNUSABLE = "unusable"


class DiskRefused(Exception):
    """The data directory cannot be used; `reason` is for programs, the text for people."""

    def __init__(self, reason: Refusal, message: str) -> None:
        super().__init__(message)
        self.reason = reason


_TROUBLES = {
    errno.ENOSPC: Trouble.NO_SPACE,
    errno.EDQUOT: Trouble.NO_SPACE,
    errno.EROFS: Trouble.READ_ONLY,
    errno.ENOENT: Trouble.DIRECTORY_GONE,
    errno.ENOTDIR: Trouble.DIRECTORY_GONE,
    errno.ESTALE: Trouble.DIRECTORY_GONE,
    errno.ENODEV: Trouble.DIRECTORY_GONE,
}


def trouble_of(error: OSError) -> Trouble:
    """What a failed call says about the disk."""
    return _TROUBLES.get(error.errno or 0, Trouble.IO_ERROR)


def outcome_of(trouble: Trouble) -> Outcome:
    """How the record whose call failed so has ended."""
    return Outcome.NO_SPACE if trouble is Trouble.NO_SPACE else Outcome.IO_ERROR
