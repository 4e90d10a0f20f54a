"""Whether one more request may come in, from counts alone. Knows neither ranks nor streams nor a clock.

Units: requests, seconds (of the clock that the caller passes).
"""

from __future__ import annotations

from dataclasses import dataclass

from ep_server.errors import QueueFull

SMOOTHING = 0.2  # weight of the newest gap between two ends
FIRST_RETRY_SECONDS = 1.0  # before any request ended
RETRY_SECONDS = (0.05, 10.0)  # bounds of what a refused caller is told


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """max_running: sequences that a rank runs at once; max_queue: requests that may wait beyond those."""

    num_ranks: int
    max_running: int
    max_queue: int
    max_streams: int


class Admission:
    """Counts are the caller's; this only judges them and learns how fast requests end."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self.limits = limits
        self._last_end: float | None = None
        self._gap = FIRST_RETRY_SECONDS

    def check(self, in_flight: int, on_wished_rank: int | None, open_streams: int, wanted: int = 1) -> None:
        """Raises QueueFull if there is no room.

        Args:
            in_flight: admitted and not yet freed, all ranks.
            on_wished_rank: the same on the rank that the request insists on, None if any will do.
            open_streams: neither read to their end nor left, those of requests that have finished included.
            wanted: how many want to come in, together or not at all.
        """
        limits = self.limits
        if open_streams + wanted > limits.max_streams:
            raise self._full(f"{open_streams} streams, the limit is grpc.max_streams = {limits.max_streams}")
        ranks, count = (limits.num_ranks, in_flight) if on_wished_rank is None else (1, on_wished_rank)
        if count + wanted > ranks * limits.max_running + limits.max_queue:
            where = "" if on_wished_rank is None else " on the wished rank"
            raise self._full(
                f"{count} requests in flight{where}: {ranks * limits.max_running} may run "
                f"and scheduler.max_queue = {limits.max_queue} may wait"
            )

    def ended(self, now: float) -> None:
        """A request left; the smoothed gap between two of these is what a refused caller is told to wait."""
        if self._last_end is not None:
            self._gap += SMOOTHING * (now - self._last_end - self._gap)
        self._last_end = now

    def _full(self, why: str) -> QueueFull:
        low, high = RETRY_SECONDS
        return QueueFull(f"queue full: {why}", round(1000 * min(max(self._gap, low), high)))
