"""Health: computed from the parts' heartbeats when asked, never remembered.

Not serving: a part is dead, or the server ends. Degraded: everything answers, but something is not as it should be
(the pool is failing, draining). The standard gRPC health service knows only serving and not serving.
"""

from collections.abc import Callable
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from prefixcache.server.grpc_server import ADMIN_SERVICE, CACHE_SERVICE
from prefixcache.server.heartbeats import Heartbeats

SERVICES: Final = ("", CACHE_SERVICE, ADMIN_SERVICE)


class Health:
    """`state()` answers ("serving" | "degraded" | "not_serving", why)."""

    def __init__(
        self, heartbeats: Heartbeats, troubles: Callable[[], list[str]], failure: Callable[[], str] = lambda: ""
    ) -> None:
        self.heartbeats = heartbeats
        self._failure = failure
        self._troubles = troubles
        self.ending = False

    def state(self) -> tuple[str, str]:
        """Health now, and why it is not "serving"."""
        if self.ending:
            return "not_serving", "the server is ending"
        if failure := self._failure():
            return "not_serving", failure
        dead = self.heartbeats.dead()
        if dead:
            return "not_serving", "; ".join(f"{part.part}: {part.detail}" for part in dead)
        troubles = self._troubles()
        return ("degraded", "; ".join(troubles)) if troubles else ("serving", "")

    def is_serving(self) -> bool:
        """Whether calls are answered."""
        return self.state()[0] != "not_serving"


class GrpcHealth(health.HealthServicer):
    """grpc.health.v1: Check computes, Watch is told by `refresh`."""

    def __init__(self, source: Health) -> None:
        super().__init__(experimental_non_blocking=True)
        self._source = source
        self._told: bool | None = None
        self.refresh()

    def register(self, server: grpc.Server) -> None:
        """Serve it."""
        health_pb2_grpc.add_HealthServicer_to_server(self, server)

    def refresh(self) -> None:
        """Tell watchers if something has changed; called by the timer."""
        serving = self._source.is_serving()
        if serving != self._told:
            self._told = serving
            for service in SERVICES:
                self.set(service, _status(serving=serving))

    def Check(self, request: Any, context: Any) -> Any:  # the rpc's name
        """The state of one service now."""
        if request.service not in SERVICES and request.service != health.SERVICE_NAME:
            context.set_code(grpc.StatusCode.NOT_FOUND)
            return health_pb2.HealthCheckResponse()
        return health_pb2.HealthCheckResponse(status=_status(serving=self._source.is_serving()))


def _status(*, serving: bool) -> Any:
    return health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
