"""A worker that came and went over the local channel left a session in the planner for ever: after `max_sessions`
connections, however short, the daemon took nobody any more."""

from pathlib import Path

from tests.contract.conftest import Worker, new_id, new_keys, start_daemon, stop_daemon
from tests.contract.drivers import LocalDriver
from tests.e2e.processes import wait_until

LIMIT = 4


def test_sessions_that_hold_nothing_are_forgotten(tmp_path: Path) -> None:
    daemon = start_daemon(tmp_path, max_sessions=LIMIT)
    for _ in range(3 * LIMIT):
        driver = LocalDriver(daemon.place.local_path)
        worker = Worker(driver)
        reservation, keys = new_id(), new_keys(2)
        assert worker.reserve(reservation, keys).grants
        worker.commit(reservation)
        assert worker.acquire(keys).planned_blocks == 2
        driver.close()
        assert wait_until(lambda: not len(daemon.shell.sessions))
    assert not daemon.planner.state.sessions
    stop_daemon(daemon)
