"""What can go wrong, split by whose fault it is.

`Failure` and its children never leave the SDK: each ends as a miss with their `reason`. What a caller does see is a
mistake of the caller's: `LeaseEndedError`, `WatchRefusedError`, or the ValueError and TypeError that the functions
document.
"""

from prefixcache_client import reasons


class Failure(Exception):
    """A call that gave no answer to use. `reason` is the name that the miss will carry."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Unreachable(Failure):
    """No answer came: no server, a broken connection, a deadline. The circuit breaker counts these.

    `lost`: the connection is gone for good, so another one may be tried at once.
    """

    def __init__(self, message: str, *, reason: str = reasons.SERVER_UNAVAILABLE, lost: bool = False) -> None:
        super().__init__(reason, message)
        self.lost = lost


class Refused(Failure):
    """The server answered with an Error: it lives, and it says no. `code` is the canonical gRPC status code."""

    def __init__(self, reason: str, message: str, code: int) -> None:
        super().__init__(reason, message)
        self.code = code


class WatchRefusedError(RuntimeError):
    """The daemon will never let this be watched. `reason`: machine-readable, as everywhere."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class LeaseEndedError(RuntimeError):
    """A lease was used after its release, or a view was entered after its lease had ended."""
