"""Implements grpc.health.v1 with a Watch that stays open.

The name "" is the process, for liveness probes: NOT_SERVING means that only a restart helps. A service's
full name is readiness: whether it takes requests. Check answers NOT_FOUND for an unknown name; Watch
answers SERVICE_UNKNOWN, as the protocol requires, and keeps watching.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from ep_server.errors import NotFound

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
add_HealthServicer_to_server = health_pb2_grpc.add_HealthServicer_to_server
SERVICE_NAME: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


SHOWN = 80  # characters of a name that an error message repeats


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc, unused-ignore]
    """The process works until fail(). The services share one status: a server takes requests or not."""

    def __init__(self, services: tuple[str, ...]) -> None:
        self._services = frozenset(services)
        self._ready = False
        self._failed = False
        self._changed = asyncio.Event()

    @property
    def live(self) -> bool:
        """The process works, also while it loads or drains."""
        return not self._failed

    @property
    def serving(self) -> bool:
        """The services are SERVING."""
        return self._ready and not self._failed

    def set(self, *, serving: bool) -> None:
        """Changes the status of the services; "" keeps its own."""
        self._ready = serving
        self._publish()

    def fail(self) -> None:
        """The process cannot serve any more: NOT_SERVING under every name, for good."""
        self._failed = True
        self._publish()

    def _publish(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _status(self, service: str) -> int:
        if service and service not in self._services:
            return int(SERVICE_UNKNOWN)
        well = self.serving if service else self.live
        return int(SERVING if well else NOT_SERVING)

    async def Check(self, request: Any, context: Any) -> Any:
        """The status now. Raises: NotFound."""
        status = self._status(request.service)
        if status == SERVICE_UNKNOWN:
            raise NotFound(f"no service {request.service[:SHOWN]!r}")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """The status now and after every change, until the caller leaves."""
        last = None
        while True:
            changed = self._changed
            status = self._status(request.service)
            if status != last:
                last = status
                yield health_pb2.HealthCheckResponse(status=status)
            if changed is self._changed:
                await changed.wait()
