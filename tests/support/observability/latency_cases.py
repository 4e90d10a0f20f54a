"""Cases of the regression alerts: latencies that moved, at the same load or another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.support.observability.cases import PAST, AlertCases, Case, Series, cut, steady, then


def load(before: float = 20, after: float | None = None) -> Series:
    """Tokens of a rank's step, at 600 steps a minute."""
    after = before if after is None else after
    return {
        'epserver_step_tokens_total{rank="0"}': then(600 * before, 600 * after),
        'epserver_steps_total{rank="0"}': steady(600),
    }


@dataclass(frozen=True)
class Shift:
    """Of a latency: its mean before and now; the share beyond the first of two edges now."""

    past: float
    now: float
    tail: float = 0.0
    edges: tuple[float, float] = (0.000131072, 0.002097152)
    per_minute: float = 1000


def latency(family: str, labels: str, shift: Shift) -> Series:
    """A histogram of two buckets; all of the past lies in the first one."""
    comma = labels + ", " if labels else ""
    many = shift.per_minute
    return {
        f"{family}_sum{{{labels}}}": then(many * shift.past, many * shift.now),
        f"{family}_count{{{labels}}}": steady(many),
        f'{family}_bucket{{{comma}le="{shift.edges[0]}"}}': then(many, many * (1 - shift.tail)),
        f'{family}_bucket{{{comma}le="{shift.edges[1]}"}}': steady(many),
        f'{family}_bucket{{{comma}le="+Inf"}}': steady(many),
    }


def dispatch(*shift: Any, **more: Any) -> Series:
    labels = 'op="dispatch", part="total", rank="0"'
    return latency("epserver_comm_latency_seconds", labels, Shift(*shift, **more))


def tokens(*shift: Any, **more: Any) -> Series:
    return latency("epserver_inter_token_latency_seconds", "", Shift(*shift, **more))


def first_tokens(*shift: Any, per_minute: float = 40, **more: Any) -> Series:
    family = "epserver_time_to_first_token_seconds"
    return latency(family, "", Shift(*shift, per_minute=per_minute, **more))


COMM = AlertCases(
    fires={
        "mean": Case(
            load() | dispatch(100e-6, 160e-6),
            {"signal": "dispatch", "stat": "mean"},
            "dispatch of demo takes 1.60 times what it took at this load (mean)",
        ),
        "tail": Case(
            load() | dispatch(100e-6, 120e-6, tail=0.02),
            {"signal": "dispatch", "stat": "p99"},
            "dispatch of demo takes 8.59 times what it took at this load (p99)",
        ),
    },
    silent={
        "a busier hour": Case(load(20, 40) | dispatch(100e-6, 160e-6)),
        "a busier hour of the same band": Case(load(17, 30) | dispatch(100e-6, 160e-6)),
        "less than a quarter slower": Case(load() | dispatch(100e-6, 120e-6)),
        "a few microseconds": Case(load() | dispatch(10e-6, 18e-6)),
        "a tail within the next bucket": Case(load() | dispatch(100e-6, 110e-6, tail=0.0105)),
        "a tail of microseconds": Case(load() | dispatch(1e-6, 1.1e-6, tail=0.02, edges=(1e-6, 16e-6))),
        "too few samples": Case(load() | dispatch(100e-6, 160e-6, per_minute=150)),
        "shorter than ten minutes": Case(cut(load() | dispatch(100e-6, 160e-6), PAST + 9)),
    },
)
ITL = AlertCases(
    fires={
        "mean": Case(
            load() | tokens(0.020, 0.030),
            {"signal": "itl", "stat": "mean"},
            "Tokens of demo take 1.50 times what they took at this load (mean)",
        ),
        "tail": Case(
            load() | tokens(0.020, 0.022, tail=0.02, edges=(0.03, 0.15)),
            {"signal": "itl", "stat": "p99"},
            "Tokens of demo take 3.03 times what they took at this load (p99)",
        ),
    },
    silent={
        "a busier hour": Case(load(20, 40) | tokens(0.020, 0.030)),
        "a busier hour of the same band": Case(load(17, 30) | tokens(0.020, 0.030)),
        "less than a quarter slower": Case(load() | tokens(0.020, 0.024)),
        "a millisecond": Case(load() | tokens(0.003, 0.0042)),
        "a tail within the next bucket": Case(load() | tokens(0.02, 0.02, tail=0.0105, edges=(0.03, 0.5))),
        "a tail of milliseconds": Case(load() | tokens(0.001, 0.001, tail=0.02, edges=(0.001, 0.006))),
        "too few samples": Case(load() | tokens(0.020, 0.030, per_minute=50)),
        "shorter than ten minutes": Case(cut(load() | tokens(0.020, 0.030), PAST + 9)),
    },
)
TTFT = AlertCases(
    fires={
        "mean": Case(
            load() | first_tokens(0.2, 0.4),
            {"signal": "ttft", "stat": "mean"},
            "First tokens of demo take 2.00 times what they took at this load (mean)",
        ),
        "tail": Case(
            load() | first_tokens(0.2, 0.21, tail=0.02, edges=(0.25, 1)),
            {"signal": "ttft", "stat": "p99"},
            "First tokens of demo take 2.53 times what they took at this load (p99)",
        ),
    },
    silent={
        "a busier hour": Case(load(20, 40) | first_tokens(0.2, 0.4)),
        "a busier hour of the same band": Case(load(17, 31) | first_tokens(0.2, 0.4)),
        "longer prompts, within bounds": Case(load() | first_tokens(0.2, 0.27)),
        "tens of milliseconds": Case(load() | first_tokens(0.05, 0.09)),
        "a tail within the next bucket": Case(load() | first_tokens(0.2, 0.2, tail=0.0105, edges=(0.25, 5))),
        "a tail of milliseconds": Case(load() | first_tokens(0.01, 0.01, tail=0.02, edges=(0.01, 0.1))),
        "too few samples": Case(load() | first_tokens(0.2, 0.4, per_minute=10)),
        "shorter than ten minutes": Case(cut(load() | first_tokens(0.2, 0.4), PAST + 9)),
    },
)

CASES = {
    "EpServerCommLatencyRegression": COMM,
    "EpServerInterTokenLatencyRegression": ITL,
    "EpServerTimeToFirstTokenRegression": TTFT,
}
