"""`blocks_skipped` was labelled with words of the planner (`parent_missing`, `quota`) where clients, logs and the
contract say `orphaned` and `limit`: a refusal that a client had counted could not be found in the daemon's metrics."""

from __future__ import annotations

from prefixcache.core.ledger import Stats
from prefixcache.core.reasons import Skip
from prefixcache.server.stats import _core_counters
from prefixcache_client.reasons import reason_value


def test_every_label_is_a_reason_of_the_contract_and_nothing_is_lost() -> None:
    stats = Stats()
    for number, skip in enumerate(Skip, 1):
        stats.blocks_skipped[skip] = number
    told = {each.label: each.value for each in _core_counters(stats) if each.name == "blocks_skipped"}
    assert all(reason_value(label) for label in told)
    assert sum(told.values()) == sum(stats.blocks_skipped.values())
    assert told["orphaned"] == stats.blocks_skipped[Skip.PARENT_MISSING] + stats.blocks_skipped[Skip.ORPHANED]
