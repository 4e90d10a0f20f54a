"""Figures from measurements: latencies, throughput, goodput, decode rates. Pure. Units: seconds, tokens."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ep_server.cli.bench.breakdown import Steps
from ep_server.cli.bench.load import Load, Trace

QUANTILES = (0.5, 0.9, 0.99)
SHORT_TOKENS = 8  # of output in the run that is subtracted


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits that a good request keeps; None = no limit. itl: of the mean gap between its tokens."""

    ttft: float | None = None
    itl: float | None = None

    @property
    def given(self) -> bool:
        """Whether there is a limit."""
        return self.ttft is not None or self.itl is not None

    def holds(self, trace: Trace) -> bool:
        """Whether the request returned all tokens in time."""
        first, gap = trace.first_token, trace.mean_gap or 0.0
        if not trace.ok or first is None:
            return False
        return (self.ttft is None or first <= self.ttft) and (self.itl is None or gap <= self.itl)


def summarise(traces: Sequence[Trace], concurrency: int, slo: Slo | None = None) -> dict[str, Any]:
    """Figures by name, for tables and JSON.

    Latencies are of requests that returned all tokens. Tokens before an error count in the throughput. The
    clock runs from the first planned request to the end of the last one.

    Args:
        concurrency: requests in flight in a closed loop; 0 for an open one.
    """
    streams = min(concurrency, len(traces))
    whole = steady(traces, streams)
    good = [trace for trace in traces if trace.ok]
    begin = min((trace.planned for trace in traces), default=0.0)
    elapsed = max(max((trace.ended for trace in traces), default=0.0) - begin, 1e-9)
    tokens, messages = sum(t.tokens for t in traces), sum(len(t.arrivals) for t in traces)
    found: dict[str, Any] = {
        "requests": len(good),
        "errors": len(traces) - len(good),
        "statuses": dict(Counter(trace.status for trace in traces if not trace.ok)),
        "first_reasons": {trace.status: trace.why for trace in reversed(traces) if not trace.ok},
        "seconds": elapsed,
        "output_tokens": tokens,
        "tokens_per_second": tokens / elapsed,
        "streams": streams or None,
        "steady_tokens_per_second": None if whole is None else whole.rate,
        "steady_seconds": None if whole is None else whole.seconds,
        "requests_per_second": len(good) / elapsed,
        "tokens_per_message": tokens / max(messages, 1),
        "time_to_first_token": quantiles([t.first_token for t in good if t.first_token is not None]),
        "inter_token_latency": quantiles([gap for t in good for gap in t.gaps]),
        "time_per_output_token": quantiles([t.mean_gap for t in good if t.mean_gap is not None]),
        "end_to_end": quantiles([t.end_to_end for t in good]),
        "send_delay": quantiles([t.sent - t.planned for t in traces if t.sent]),
    }
    return found | (goodput(traces, slo, elapsed) if slo is not None and slo.given else {})


def goodput(traces: Sequence[Trace], slo: Slo, elapsed: float) -> dict[str, Any]:
    """Requests that kept the limits. A request that failed is never good."""
    kept = [trace for trace in traces if slo.holds(trace)]
    return {
        "goodput": {
            "slo_ttft": slo.ttft,
            "slo_itl": slo.itl,
            "requests": len(kept),
            "share": len(kept) / max(len(traces), 1),
            "requests_per_second": len(kept) / elapsed,
            "tokens_per_second": sum(trace.tokens for trace in kept) / elapsed,
        }
    }


@dataclass(frozen=True, slots=True)
class Steady:
    """Tokens received while all streams ran, and for how many seconds they did."""

    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def steady(traces: Sequence[Trace], concurrency: int) -> Steady | None:
    """What arrived while `concurrency` streams ran, without ramp-up and ramp-down. None if they never did.

    The interval begins when `concurrency` requests have received their first token and ends when fewer than
    that are left. With as many requests as streams it is decoding alone. The tokens of a message are spread
    evenly over the time since the previous message. Otherwise most streams would lose their last message,
    which arrives just after the interval.
    """
    firsts = sorted(trace.arrivals[0][0] for trace in traces if trace.arrivals)
    ends = sorted(trace.arrivals[-1][0] for trace in traces if trace.arrivals)
    if not 1 <= concurrency <= len(firsts):
        return None
    begin, end = firsts[concurrency - 1], ends[-concurrency]
    if begin >= end:
        return None
    return Steady(sum(_tokens_between(trace, begin, end) for trace in traces), end - begin)


def _tokens_between(trace: Trace, begin: float, end: float) -> float:
    tokens, last = 0.0, None
    for time, count in trace.arrivals:
        if last is None or last == time:
            share = float(begin < time <= end)
        else:
            share = max(min(time, end) - max(last, begin), 0.0) / (time - last)
        tokens, last = tokens + share * count, time
    return tokens


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """mean, p50, p90, p99, max; empty for no values."""
    if not values:
        return {}
    ordered = sorted(values)
    picked = {f"p{round(q * 100)}": quantile(ordered, q) for q in QUANTILES}
    return {"mean": sum(ordered) / len(ordered), **picked, "max": ordered[-1]}


def quantile(ordered: Sequence[float], q: float) -> float:
    """Nearest rank: the smallest value that a share q of all does not exceed.

    Args:
        ordered: ascending, not empty.
    """
    return ordered[max(math.ceil(q * len(ordered) - 1e-9) - 1, 0)]


@dataclass(frozen=True, slots=True)
class Plan:
    """What bench offline measures. batches: sequences per rank. rounds: per batch; the median counts."""

    batches: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int
    rounds: int = 3
    seed: int = 0
    timeout: float = 600.0

    def load(self, batch: int, ranks: int, vocab_size: int) -> Load:
        """The prompts of one run."""
        count = batch * ranks
        lengths = (self.prompt_tokens, self.new_tokens)
        return Load(count, count, 0.0, *lengths, vocab_size, self.seed, timeout=self.timeout)


@dataclass(frozen=True, slots=True)
class Round:
    """A whole and a short run of a batch. None means that the run was too short to measure it.

    by_difference: decode tokens per second of all ranks, from the difference of the two runs.
    direct: the same, while all sequences decoded. whole: with the prefill. steps: the decode steps alone.
    """

    by_difference: float | None
    direct: float | None
    whole: float
    steps: Steps | None


@dataclass(frozen=True, slots=True)
class Result:
    """One batch size. rounds: in the order in which they ran."""

    batch: int
    ranks: int
    rounds: tuple[Round, ...]

    @property
    def steps(self) -> Steps | None:
        """Of the round with the median step time."""
        known = sorted((r.steps for r in self.rounds if r.steps is not None), key=lambda steps: steps.seconds)
        return known[(len(known) - 1) // 2] if known else None

    def rate(self, kind: str) -> float | None:
        """Median over the rounds of the rate `kind` of Round; None if no round has it."""
        known = [value for r in self.rounds if (value := getattr(r, kind)) is not None]
        return median(known) if known else None

    def values(self) -> dict[str, Any]:
        """For JSON."""
        names = ("by_difference", "direct", "whole")
        return {
            "sequences_per_rank": self.batch,
            "ranks": self.ranks,
            "tokens_per_second": {name: self.rate(name) for name in names},
            "rounds": [{name: getattr(r, name) for name in names} for r in self.rounds],
        }


def short_of(new_tokens: int) -> int:
    """Tokens of output in the short run, whose time is subtracted."""
    return min(SHORT_TOKENS, max(new_tokens // 2, 1))
