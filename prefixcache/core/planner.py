"""The one door into the core: `handle(event, now) -> commands`.

Belongs here: dispatch. Must not know: how any one event is decided (the modules by concern do).
"""

from __future__ import annotations

from prefixcache.core.commands import Command
from prefixcache.core.events import Event
from prefixcache.core.spec import PlannerConfig


class Planner:
    """All state of one daemon. Not thread-safe: one owner calls it. Never raises on what a client can send."""

    def __init__(self, config: PlannerConfig) -> None:
        self.config = config

    def handle(self, event: Event, now: float) -> list[Command]:
        """What is to be done about `event` at time `now` (seconds, monotonic, never going back), in this order.

        At most one command is the reply to the event's sender (see `commands.Reply`); it may come in a later call
        only where the event's docstring says so. Others may concern anybody (leases that ended, slabs that move).
        """
        raise NotImplementedError
