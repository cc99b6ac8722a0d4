"""The same refusal was counted as `Release` over gRPC and as `release` on the local channel: two rows of one thing."""

from pathlib import Path

import pytest

from prefixcache.v1 import cache_pb2 as pb
from tests.contract.conftest import Worker, new_id, start_daemon, stop_daemon
from tests.contract.drivers import Driver, Failure, GrpcDriver, LocalDriver


def test_one_name_on_every_transport(tmp_path: Path) -> None:
    daemon = start_daemon(tmp_path)
    drivers: list[Driver] = [GrpcDriver(f"unix:{daemon.config.socket}"), LocalDriver(daemon.place.local_path)]
    for driver in drivers:
        worker = Worker(driver)
        with pytest.raises(Failure):
            worker.release(new_id(), 0)
        with pytest.raises(Failure):
            driver.call("OpenNamespace", pb.OpenNamespaceRequest(session=worker.session))
        driver.close()
    counted = daemon.counters.refused
    assert counted == {("Release", "lease_unknown"): 2, ("OpenNamespace", "bad_layout"): 2}
    stop_daemon(daemon)
