"""While the circuit breaker was open, every acquire still posted a Release of a lease it had never asked for. A frozen
daemon's socket filled up, the connection ended, and with it the session, its mappings and the slots being filled."""

import os
import signal

from prefixcache_client import Client, ClientOptions
from tests.e2e.processes import DaemonProcess, wait_until
from tests.issues.conftest import store_soon
from tests.issues.test_daemon_frozen import freeze
from tests.issues.workers import TOKENS, bytes_of, namespace

MANY = 20_000  # a socket buffer takes a few hundred frames
OPTIONS = ClientOptions(timeout_s=0.2, store_timeout_s=0.2, breaker_open_s=60, breaker_max_open_s=60)


def test_calls_that_are_not_made_send_nothing(daemon: DaemonProcess) -> None:
    with Client(f"unix://{daemon.socket}", ClientOptions(timeout_s=20, store_timeout_s=20)) as patient:
        assert store_soon(patient, namespace(patient), TOKENS, 1)
    with Client(f"unix://{daemon.socket}", OPTIONS) as client:
        ns = namespace(client)
        assert wait_until(lambda: client.lookup(ns, TOKENS).tokens == len(TOKENS))
        freeze(daemon)
        try:
            assert wait_until(lambda: client.acquire(ns, TOKENS).reason == "circuit_open")
            for _ in range(MANY):
                client.acquire(ns, TOKENS)
            client.store(ns, TOKENS, bytes_of(1))
            session = client._link.session
            assert session is not None
            assert session.alive
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
