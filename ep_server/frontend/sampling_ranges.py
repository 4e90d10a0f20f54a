"""What the numbers of Sampling may be, whoever gives them: a request or generation_config.json."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Range:
    """Finite numbers from low to high, low itself only where `closed`."""

    low: float
    high: float = math.inf
    closed: bool = True

    def holds(self, value: float) -> bool:
        """Whether the value is allowed; NaN and infinities never are."""
        above = value >= self.low if self.closed else value > self.low
        return math.isfinite(value) and above and value <= self.high

    def __str__(self) -> str:
        low = f"at least {self.low:g}" if self.closed else f"above {self.low:g}"
        return low + (f", at most {self.high:g}" if self.high < math.inf else ", finite")


SAMPLING = {
    "temperature": Range(0),
    "top_k": Range(0),
    "top_p": Range(0, 1, closed=False),
    "min_p": Range(0, 1),
    "repetition_penalty": Range(0.01, 100),  # beyond, a logit times it leaves float32
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
}
