"""Counts the requests of this protocol, for ModelStatistics."""

from __future__ import annotations

import time
from typing import Any

from tritonclient.grpc import service_pb2

from ep_server.engine.stream import Completion
from ep_server.frontend.doors.oip.inference import VERSION

NANO = 1_000_000_000


class Statistics:
    """Counts and total times since the server started."""

    def __init__(self, model_name: str) -> None:
        self._sum = service_pb2.ModelStatistics(name=model_name, version=VERSION)

    def succeeded(self, started: float, completions: list[Completion]) -> None:
        """A request ended well. started: time.monotonic() when it arrived."""
        stats = self._sum.inference_stats
        self._sum.last_inference = time.time_ns() // 1_000_000
        self._sum.inference_count += 1
        self._sum.execution_count += 1
        _add(stats.success, time.monotonic() - started)
        queued = max((each.queued_seconds for each in completions), default=0.0)
        total = max((each.total_seconds for each in completions), default=0.0)
        _add(stats.queue, queued)
        _add(stats.compute_infer, total - queued)

    def failed(self, started: float) -> None:
        """A request was refused, failed or cancelled."""
        _add(self._sum.inference_stats.fail, time.monotonic() - started)

    def message(self) -> Any:
        """As ModelStatistics reports them."""
        return service_pb2.ModelStatisticsResponse(model_stats=[self._sum])


def _add(duration: Any, seconds: float) -> None:
    duration.count += 1
    duration.ns += max(int(seconds * NANO), 0)
