"""What happened to one request, as its caller saw it. Data only.

Times are seconds of the monotonic clock, which all processes of a host share.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

OK = "OK"
INCOMPLETE = "INCOMPLETE"  # ended well and had not brought what was asked


@dataclass(slots=True)
class Trace:
    """planned: when the request was to go; latencies count from it, so a late sender hides nothing.

    asked: tokens of output. arrivals: (time, tokens) of each message.
    status: OK, or the name of what it ended with. why: what the server said of it.
    """

    index: int
    asked: int
    planned: float
    sent: float = 0.0
    ended: float = 0.0
    status: str = ""
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    why: str = ""

    @property
    def tokens(self) -> int:
        """Tokens that came."""
        return sum(count for _, count in self.arrivals)

    @property
    def ok(self) -> bool:
        """It brought all that was asked."""
        return self.status == OK

    @property
    def first_token(self) -> float | None:
        """Seconds from the plan to the first token."""
        return self.arrivals[0][0] - self.planned if self.arrivals else None

    @property
    def end_to_end(self) -> float:
        """Seconds from the plan to the end."""
        return self.ended - self.planned

    @property
    def gaps(self) -> list[float]:
        """Seconds before each token after the first. Tokens of one message came together: the first of them
        gets the gap, the others 0."""
        gaps, last = [], None
        for time, count in self.arrivals:
            gaps += [0.0] * (count - 1) if last is None else [time - last, *[0.0] * (count - 1)]
            last = time
        return gaps

    @property
    def mean_gap(self) -> float | None:
        """Seconds per token after the first; None with fewer than two tokens."""
        tokens = self.tokens
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / (tokens - 1) if tokens > 1 else None

    def end(self, status: str, now: float, why: str = "") -> None:
        """The stream is over."""
        self.ended, self.why = now, why
        self.status = INCOMPLETE if status == OK and self.tokens != self.asked else status

    def values(self) -> list[Any]:
        """As JSON carries it; from_values(t.values()) == t."""
        return [getattr(self, each.name) for each in fields(self)]

    @staticmethod
    def from_values(values: list[Any]) -> Trace:
        """The trace again."""
        trace = Trace(*values)
        trace.arrivals = [(time, count) for time, count in trace.arrivals]
        return trace
