"""What a client can be told, with defaults that suit an engine's request path. Plain data."""

import math
from dataclasses import dataclass

from prefixcache_client.devices import AUTO


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Limits of one client; times in seconds.

    `timeout_s` bounds every call on a request's path, connecting included. `load_timeout_s` is how long a lease waits
    for blocks that have to come from a slower tier; 0 takes only what is in memory. `recompute_s_per_token` is what a
    token costs to compute: a lease takes from a slower tier only what comes faster than that; 0, not known, takes all
    that comes in `load_timeout_s`. `store_timeout_s` bounds the calls of a store, and `stream_timeout_s` a whole stream
    of blocks where memory cannot be shared. `breaker_threshold` failures in a row open the circuit breaker for
    `breaker_open_s`, doubling up to `breaker_max_open_s`. `lease_ttl_s` and `reservation_ttl_s` of 0 take the server's
    defaults. `local_channel` False goes by gRPC alone. `store_queue` bounds the stores waiting for
    `Client.store_later`. `session_ttl_s` is asked for gRPC sessions. `client_name` is shown by `prefixcache status`.
    `device` is this worker's GPU, out of whose memory it reads copies where the daemon keeps some there: "auto" is the
    one that torch uses when the session is opened, "" none, else "cuda:0" and the like ("cpu" is the stand-in of a
    daemon started with `--gpu cpu=SIZE`).
    """

    timeout_s: float = 1.0
    load_timeout_s: float = 1.0
    store_timeout_s: float = 2.0
    stream_timeout_s: float = 10.0
    breaker_threshold: int = 3
    breaker_open_s: float = 0.25
    breaker_max_open_s: float = 4.0
    lease_ttl_s: float = 0.0
    reservation_ttl_s: float = 0.0
    local_channel: bool = True
    store_queue: int = 16
    session_ttl_s: float = 10.0
    client_name: str = ""
    device: str = AUTO
    recompute_s_per_token: float = 0.0

    def __post_init__(self) -> None:
        if min(self.timeout_s, self.store_timeout_s, self.stream_timeout_s, self.session_ttl_s) <= 0:
            raise ValueError("timeouts must be above zero")
        if min(self.lease_ttl_s, self.reservation_ttl_s, self.load_timeout_s) < 0 or self.store_queue < 1:
            raise ValueError("times to live must not be negative, and the store queue holds at least one")
        if not 0 <= self.recompute_s_per_token < math.inf:
            raise ValueError(f"recompute_s_per_token must be 0 (not known) or above, got {self.recompute_s_per_token}")
