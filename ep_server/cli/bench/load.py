"""The load of a benchmark and what each of its requests saw. Times are seconds.

With Poisson arrivals (an open loop) the schedule is drawn in advance, and late answers do not delay later
arrivals. A closed loop keeps `concurrency` requests in flight: each answer starts the next request. The load
does not depend on the number of client processes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, fields
from typing import Any

from ep_server.errors import ConfigError

OK = "OK"
INCOMPLETE = "INCOMPLETE"  # ended without an error, but with fewer tokens than requested


@dataclass(frozen=True, slots=True)
class Load:
    """rate: arrivals per second; 0 = closed loop of `concurrency` streams.

    vocab_size: prompts are drawn from ids 0 to vocab_size - 1. stream_interval: tokens per message.
    timeout: seconds that one request may take.
    """

    requests: int
    concurrency: int
    rate: float
    prompt_tokens: int
    new_tokens: int
    vocab_size: int = 0
    seed: int = 0
    stream_interval: int = 1
    timeout: float = 600.0

    def check_length(self, context: int) -> None:
        """Refuses requests longer than the context, in tokens. Raises: ConfigError."""
        length = self.prompt_tokens + self.new_tokens
        if length > context:
            raise ConfigError(
                "--prompt-tokens + --new-tokens", length, f"at most {context}, the model's context"
            )

    def prompt(self, index: int) -> list[int]:
        """Token ids of request `index`. Negative indices are warm-up requests."""
        source = random.Random(f"{self.seed} prompt {index}")
        return [source.randrange(self.vocab_size) for _ in range(self.prompt_tokens)]

    def arrivals(self) -> list[float]:
        """Seconds from the start to each arrival; empty for a closed loop."""
        return poisson(self.rate, self.requests, self.seed) if self.rate else []


def poisson(rate: float, count: int, seed: int) -> list[float]:
    """Times of `count` arrivals, ascending, in seconds. Gaps are exponential with mean 1 / rate."""
    source, time, times = random.Random(f"{seed} arrivals"), 0.0, []
    for _ in range(count):
        time += source.expovariate(rate)
        times.append(time)
    return times


@dataclass(slots=True)
class Trace:
    """What the caller of one request saw. Times are of the monotonic clock, which processes of a host share.

    planned: when the request was due. Latencies count from it, so a late sender hides nothing.
    asked: tokens of output. arrivals: (time, tokens) of each message.
    status: OK, INCOMPLETE or a gRPC status. why: the server's explanation.
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
        """Tokens received."""
        return sum(count for _, count in self.arrivals)

    @property
    def ok(self) -> bool:
        """Whether every requested token arrived."""
        return self.status == OK

    @property
    def first_token(self) -> float | None:
        """Seconds from the planned time to the first token."""
        return self.arrivals[0][0] - self.planned if self.arrivals else None

    @property
    def end_to_end(self) -> float:
        """Seconds from the planned time to the end."""
        return self.ended - self.planned

    @property
    def gaps(self) -> list[float]:
        """Seconds before each token after the first.

        Tokens of one message arrive together: the first of them gets the gap, the others 0.
        """
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
        """Records the end of the stream."""
        self.ended, self.why = now, why
        self.status = INCOMPLETE if status == OK and self.tokens != self.asked else status

    def values(self) -> list[Any]:
        """For JSON. `from_values` reverses it."""
        return [getattr(self, each.name) for each in fields(self)]

    @staticmethod
    def from_values(values: list[Any]) -> Trace:
        """A trace from `values`."""
        trace = Trace(*values)
        trace.arrivals = [(time, count) for time, count in trace.arrivals]
        return trace
