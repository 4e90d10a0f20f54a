"""Traces of requests to figures: latencies, throughput, goodput. Pure. Units: seconds, tokens."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ep_server.cli.bench.trace import Trace

QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must keep to count as good; None = no such limit. itl: of its mean gap."""

    ttft: float | None = None
    itl: float | None = None

    @property
    def given(self) -> bool:
        """There is a limit."""
        return self.ttft is not None or self.itl is not None

    def holds(self, trace: Trace) -> bool:
        """The request brought everything, in time."""
        first, gap = trace.first_token, trace.mean_gap or 0.0
        if not trace.ok or first is None:
            return False
        return (self.ttft is None or first <= self.ttft) and (self.itl is None or gap <= self.itl)


def summarise(traces: Sequence[Trace], concurrency: int, slo: Slo | None = None) -> dict[str, Any]:
    """Figures by name, for a table or JSON.

    Latencies are of requests that were answered in full; tokens that came before an error count in the
    throughput. The clock runs from the first planned request to the end of the last one.

    Args:
        concurrency: requests in flight of a closed loop, 0 for an open one.
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
    """What was answered in full and in time; an error is never good."""
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
    """Tokens that came while all streams ran, and the seconds that this was."""

    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def steady(traces: Sequence[Trace], concurrency: int) -> Steady | None:
    """What came while `concurrency` streams gave tokens: without what comes in before and after.

    From the moment when so many requests had brought their first token, until fewer than so many were still
    to end: with as many requests as streams nothing but decoding. Tokens of a message count evenly over the
    time since the message before it: else most streams would lose their last one, which comes just too late.
    None where there was no such time.
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
