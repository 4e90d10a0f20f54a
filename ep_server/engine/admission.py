"""Admission: decides from counts alone whether one more request has room.

Units: requests (each sequence of a request counts as one), seconds of the caller's clock.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from ep_server.errors import InvalidArgument, QueueFull

FIRST_RETRY_SECONDS = 1.0  # used until the pace is measured
RETRY_SECONDS = (0.05, 30.0)  # bounds of the retry push-back, before jitter
LEAST_ENDS = 8  # ends measured before the pace may refuse requests
LEAST_WINDOW = 32  # ends that the pace averages


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """max_running: sequences that a rank runs at once; max_queue: requests that may wait beyond those."""

    num_ranks: int
    max_running: int
    max_queue: int
    max_streams: int


@dataclass(frozen=True, slots=True)
class Asked:
    """Part of a request that admission reads, so it can be refused before the rest is decoded.

    sequences: admitted together or not at all. max_new_tokens: None = not given.
    timeout: seconds until its deadline, None = it has none.
    """

    sequences: int = 1
    priority: int = 0
    dp_rank: int | None = None
    max_new_tokens: int | None = None
    timeout: float | None = None


MOST_URGENT = Asked(priority=2**31 - 1)


@dataclass(frozen=True, slots=True)
class Crowd:
    """Load that a request finds: on the rank that it asks for, or on all.

    open_streams: of all ranks, not yet read to their end. in_flight: admitted and not yet freed.
    ahead: of these, running, or waiting before the request. behind: waiting after it.
    """

    open_streams: int
    in_flight: int
    ahead: int
    behind: int = 0


class Pace:
    """Measured pace: how fast requests end while all ranks are full, and how long a run takes."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._keep = 1 - 1 / max(LEAST_WINDOW, 2 * slots)  # requests that began together end together
        self._count = 0  # of all ends ever; the other sums decay
        self._ends = self._seconds = 0.0
        self._last_full: float | None = None
        self._tokens = self._running = self._lengths = self._finished = 0.0

    def ended(self, now: float, left: int, *, finished: bool = True) -> None:
        """Records that a request which had run freed its room. left: requests still in flight.

        Time in which ranks had free room is ignored. A request that did not finish counts as time without a
        result: otherwise missed deadlines would look like a fast pace and admit more of the same.
        """
        if self._last_full is not None:
            self._count += finished
            self._ends = self._ends * self._keep + finished
            self._seconds = self._seconds * self._keep + now - self._last_full
        self._last_full = now if left >= self.slots else None

    def ran(self, seconds: float, tokens: int, *, finished: bool) -> None:
        """A request with a deadline ended, `seconds` after its first step.

        Unfinished ones count for the speed only; without them slow requests would be missing.
        """
        self._tokens = self._tokens * self._keep + tokens
        self._running = self._running * self._keep + seconds
        if finished:
            self._lengths = self._lengths * self._keep + tokens
            self._finished = self._finished * self._keep + 1

    @property
    def gap(self) -> float | None:
        """Mean seconds between two ends; None before there were enough."""
        return self._seconds / self._ends if self._count >= LEAST_ENDS else None

    def service(self, max_new_tokens: int | None) -> float:
        """Seconds that a request with a deadline will probably run; 0 before one did."""
        if not self._finished:
            return 0.0
        usual = self._lengths / self._finished
        tokens = usual if max_new_tokens is None else min(usual, max_new_tokens)
        return tokens * self._running / self._tokens


class Admission:
    """Judges the caller's counts by the limits and by how fast requests end.

    draw: from [0, 1), the jitter of the retry push-back.
    """

    def __init__(self, limits: AdmissionLimits, draw: Callable[[], float] = random.random) -> None:
        self.limits = limits
        self.pace = Pace(limits.num_ranks * limits.max_running)
        self._draw = draw

    def resize(self, num_ranks: int) -> None:
        """The ranks that take requests are more or fewer than before."""
        self.limits = replace(self.limits, num_ranks=num_ranks)
        self.pace.slots = num_ranks * self.limits.max_running

    def check(self, asked: Asked, crowd: Crowd) -> int:
        """Returns: how many requests behind this one must be refused to make room for it.

        Raises: InvalidArgument if it can never have room; QueueFull if it has none now, or would probably
            miss its deadline.
        """
        limits, wanted = self.limits, asked.sequences
        ranks = limits.num_ranks if asked.dp_rank is None else 1
        slots = ranks * limits.max_running
        self._check_possible(wanted, slots + limits.max_queue)
        wait = self._wait(crowd.ahead + wanted - slots, ranks)
        if crowd.open_streams + wanted > limits.max_streams:
            why = f"{crowd.open_streams} streams, the limit is grpc.max_streams = {limits.max_streams}"
            raise self._refusal(f"queue full: {why}", wait)
        over = max(crowd.ahead + crowd.behind + wanted - slots - limits.max_queue, 0)
        is_full = crowd.in_flight + wanted > slots + limits.max_queue
        if is_full and (not crowd.behind or over > crowd.behind):
            where = "" if asked.dp_rank is None else " on the requested rank"
            why = f"queue full: {crowd.in_flight} requests in flight{where}: {slots} may run "
            raise self._refusal(why + f"and scheduler.max_queue = {limits.max_queue} may wait", wait)
        self._check_deadline(asked, wait)
        return over

    def displaced(self, ahead: int) -> QueueFull:
        """Error of a request that gives its place to a higher priority. ahead: as in Crowd."""
        wait = self._wait(ahead + 1 - self.limits.num_ranks * self.limits.max_running, self.limits.num_ranks)
        return self._refusal("queue full: a request of higher priority took the place of this one", wait)

    def _refusal(self, why: str, wait: float | None) -> QueueFull:
        """wait: seconds until there would be room, None = unknown."""
        low, high = RETRY_SECONDS
        seconds = min(max(FIRST_RETRY_SECONDS if wait is None else wait, low), high)
        # Callers that are refused together must not retry together.
        return QueueFull(why, round(1000 * seconds * (1 + self._draw())))

    def _wait(self, ends: int, ranks: int) -> float | None:
        """Seconds until that many requests of `ranks` ranks have ended; None = unknown."""
        gap = self.pace.gap
        return None if gap is None else max(ends, 0) * gap * self.limits.num_ranks / ranks

    def _check_possible(self, wanted: int, room: int) -> None:
        most = min(room, self.limits.max_streams)
        if wanted > most:
            why = "as ranks x scheduler.max_running + scheduler.max_queue and grpc.max_streams allow"
            raise InvalidArgument("sampling.num_sequences", wanted, f"at most {most}, {why}")

    def _check_deadline(self, asked: Asked, wait: float | None) -> None:
        if not wait or asked.timeout is None:
            return  # it begins at once, or its wait is unknown
        needed = wait + self.pace.service(asked.max_new_tokens)
        if needed > asked.timeout:
            why = f"the request would end in {needed:.3g} s, its deadline is in {max(asked.timeout, 0):.3g} s"
            raise self._refusal(f"queue too long: {why}", needed - asked.timeout)
