"""A thread waited for its answer when the connection ended; before it looked, the watcher had closed the descriptor,
and an OSError came out of `acquire`."""

import time

import pytest

from prefixcache_client.errors import Unreachable
from prefixcache_client.local import LocalTransport, _Call
from tests.e2e.processes import DaemonProcess, wait_until


def test_it_is_a_lost_connection(daemon: DaemonProcess) -> None:
    transport = LocalTransport(f"{daemon.socket}.local", 20.0)
    transport.close()
    assert wait_until(lambda: transport._sock.fileno() == -1)
    with pytest.raises(Unreachable) as caught:
        transport._wait(1, _Call(), time.monotonic() + 20)
    assert caught.value.lost
