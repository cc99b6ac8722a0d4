"""A view entered after its lease is an error; an array kept beyond it is readable for ever, also without a daemon."""

import gc

import numpy as np
import pytest

from prefixcache_client import Client, LeaseEndedError, Namespace
from tests.e2e.processes import DaemonProcess, wait_until
from tests.issues.conftest import store_soon
from tests.issues.workers import TOKENS, bytes_of


def test_entering_late_raises(daemon: DaemonProcess, client: Client, ns: Namespace) -> None:
    assert store_soon(client, ns, TOKENS, 1)
    with client.acquire(ns, TOKENS) as lease:
        view = lease.view(0)
    with pytest.raises(LeaseEndedError, match="released"):
        view.__enter__()
    with client.acquire(ns, TOKENS) as lease:
        daemon.kill()
        assert wait_until(lambda: not lease.valid())
        with pytest.raises(LeaseEndedError, match="ended"):
            lease.view(0).__enter__()


def test_an_array_outlives_lease_client_and_daemon(daemon: DaemonProcess, client: Client, ns: Namespace) -> None:
    assert store_soon(client, ns, TOKENS, 1)
    with client.acquire(ns, TOKENS) as lease, lease.view(3) as array:
        assert np.array_equal(array, bytes_of(1)[3])
    store_soon(client, ns, [9, *TOKENS[1:]], 2)
    assert array.sum() >= 0
    client.close()
    daemon.kill()
    gc.collect()
    assert array.sum() >= 0
    assert not array.flags.writeable
