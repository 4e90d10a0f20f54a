"""grpc.health.v1 with a Watch that stays open. Knows names and statuses, nothing of engines.

"" is the server as a whole; every other service by its full name. Check answers NOT_FOUND for an unknown
name; Watch answers SERVICE_UNKNOWN, as the protocol asks, and goes on watching.
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


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc, unused-ignore]
    """All names share one status: a server either serves or it does not."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = frozenset(("", *names))
        self._status: int = NOT_SERVING
        self._changed = asyncio.Event()

    @property
    def serving(self) -> bool:
        """The status is SERVING."""
        return bool(self._status == SERVING)

    def set(self, *, serving: bool) -> None:
        """Changes the status; every watcher hears of it."""
        self._status = SERVING if serving else NOT_SERVING
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: Any, context: Any) -> Any:
        """The status now. Raises: NotFound."""
        if request.service not in self._names:
            raise NotFound(f"no service {request.service!r}")
        return health_pb2.HealthCheckResponse(status=self._status)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """The status now and after every change, until the caller leaves."""
        known, last = request.service in self._names, None
        while True:
            changed = self._changed
            status = self._status if known else SERVICE_UNKNOWN
            if status != last:
                last = status
                yield health_pb2.HealthCheckResponse(status=status)
            if changed is self._changed:
                await changed.wait()
