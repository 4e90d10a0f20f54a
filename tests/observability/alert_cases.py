"""For each alert: what the servers measured when it has to fire, and a counter-case in which it must not.

A series is a name with labels and one value a minute. `steady` counts up by as much each minute; `then`
changes the pace. `namespace`, `job` and `instance` are added to all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

Values = Sequence[float | str]
Series = dict[str, Values]
PAST, NOW = 100, 25  # minutes of history, and of what is being judged


@dataclass(frozen=True)
class Case:
    """series: all that there is. fires, summary: labels and text of the alert at the end; None: no alert."""

    series: Series
    fires: dict[str, str] | None = None
    summary: str = ""


@dataclass(frozen=True)
class AlertCases:
    """fires: one case or more in which it does. silent: name of a counter-case -> case."""

    fires: dict[str, Case]
    silent: dict[str, Case] = field(default_factory=dict)


def steady(per_minute: float, minutes: int = PAST + NOW) -> list[float]:
    """A counter."""
    return [per_minute * minute for minute in range(minutes)]


def then(before: float, after: float, minutes: int = NOW, past: int = PAST) -> list[float]:
    """A counter that changes its pace."""
    first = steady(before, past)
    return [*first, *(first[-1] + after * (minute + 1) for minute in range(minutes))]


def constant(value: float, minutes: int = PAST + NOW) -> list[float]:
    """A gauge."""
    return [value] * minutes


def cut(series: Series, minutes: int) -> Series:
    """Judged after so many minutes."""
    return {name: values[:minutes] for name, values in series.items()}


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
        "longer prompts, within bounds": Case(load() | first_tokens(0.2, 0.27)),
        "tens of milliseconds": Case(load() | first_tokens(0.05, 0.09)),
        "a tail within the next bucket": Case(load() | first_tokens(0.2, 0.2, tail=0.0105, edges=(0.25, 5))),
        "a tail of milliseconds": Case(load() | first_tokens(0.01, 0.01, tail=0.02, edges=(0.01, 0.1))),
        "too few samples": Case(load() | first_tokens(0.2, 0.4, per_minute=10)),
        "shorter than ten minutes": Case(cut(load() | first_tokens(0.2, 0.4), PAST + 9)),
    },
)


def waits(seconds: Sequence[float], steps: float = 600, minutes: int = 20) -> Series:
    """seconds: how long each other rank waits for rank 0, 1, ... in each of the last minutes."""
    found: Series = {}
    for rank in range(len(seconds)):
        found[f'epserver_ep_rank_up{{rank="{rank}"}}'] = constant(1, 10 + minutes)
        found[f'epserver_steps_total{{rank="{rank}"}}'] = steady(steps / len(seconds), 10 + minutes)
        found[f'epserver_step_seconds_sum{{phase="total", rank="{rank}"}}'] = steady(60, 10 + minutes)
        for peer, waited in enumerate(seconds):
            if peer != rank:
                labels = f'op="dispatch", peer="{peer}", rank="{rank}"'
                found[f"epserver_comm_peer_wait_seconds_total{{{labels}}}"] = then(0, waited, minutes, 10)
    return found


SLOW_RANK = AlertCases(
    fires={
        "one of four": Case(
            waits((1, 1, 12, 1)),
            {"peer": "2"},
            "Ranks of one:9400 spend 15% of their steps waiting for rank 2",
        ),
        "one of two, waited for alone": Case(
            waits((12, 0)), {"peer": "0"}, "Ranks of one:9400 spend 10% of their steps waiting for rank 0"
        ),
    },
    silent={
        "all wait for all": Case(waits((12, 12, 12, 12))),
        "late, but little": Case(waits((0.1, 0.1, 3, 0.1))),
        "hardly any steps": Case(waits((1, 1, 12, 1), steps=60)),
        "for four minutes": Case(waits((1, 1, 12, 1), minutes=4)),
    },
)
RANK_DOWN = AlertCases(
    fires={
        "one": Case(
            {'epserver_ep_rank_up{rank="0"}': [1, 1, 1], 'epserver_ep_rank_up{rank="1"}': [1, 1, 0]},
            {"rank": "1"},
            "Rank 1 of one:9400 is not part of its group",
        ),
        "seen once, then the server was gone": Case(
            {'epserver_ep_rank_up{rank="1"}': [1, 1, 0, "stale"]},
            {"rank": "1"},
            "Rank 1 of one:9400 is not part of its group",
        ),
    },
    silent={"all up": Case({f'epserver_ep_rank_up{{rank="{rank}"}}': constant(1) for rank in range(4)})},
)
BUILD = 'epserver_build_info{version="1.0.0", model="demo"}'
DOWN = AlertCases(
    fires={
        "the only one": Case(
            {BUILD: [1] * 30 + ["stale"] + ["_"] * 9}, {}, "No server of demo answers scrapes"
        )
    },
    silent={
        "one of two": Case({BUILD: [1] * 30 + ["stale"] + ["_"] * 9, BUILD[:-1] + ', pod="b"}': constant(1)}),
        "a minute ago": Case({BUILD: [1] * 30 + ["stale", "_"]}),
        "removed long ago": Case({BUILD: [1] * 30 + ["stale"] + ["_"] * 90}),
        "up": Case({BUILD: constant(1)}),
    },
)
STARTED = "process_start_time_seconds{}"
RESTARTS = AlertCases(
    fires={
        "twice": Case(
            {BUILD: constant(1, 20), STARTED: [1] * 10 + [2] * 5 + [3] * 5},
            {},
            "one:9400 was started 2 times in 15 minutes",
        )
    },
    silent={
        "once, a deploy": Case({BUILD: constant(1, 20), STARTED: [1] * 10 + [2] * 10}),
        "some other program": Case({STARTED: [1] * 10 + [2] * 5 + [3] * 5}),
    },
)


def in_flight(running: float, waiting: float, steps: Iterable[float]) -> Series:
    return {
        "epserver_requests_running{}": constant(running, 30),
        "epserver_requests_waiting{}": constant(waiting, 30),
        'epserver_step_tokens_total{rank="0"}': list(steps),
    }


STALLED = AlertCases(
    fires={
        "stuck": Case(
            in_flight(3, 1, constant(5000, 30)),
            {},
            "one:9400 has 4 or more requests in flight and runs no step for them",
        )
    },
    silent={
        "at work": Case(in_flight(3, 1, steady(500, 30))),
        "idle": Case(in_flight(0, 0, constant(5000, 30))),
        "just started": Case(cut(in_flight(3, 1, constant(5000, 30)), 2)),
    },
)


def requests(good: Values, **bad: Values) -> Series:
    """Counters by status."""
    found: Series = {'epserver_requests_total{status="OK", finish_reason="eos"}': good}
    for status, counted in bad.items():
        found[f'epserver_requests_total{{status="{status}", finish_reason=""}}'] = counted
    return found


SLOW_TOKENS = {
    "epserver_inter_token_latency_seconds_count{}": steady(1000, 90),
    'epserver_inter_token_latency_seconds_bucket{le="0.1"}': steady(800, 90),
}
BURN_FAST = AlertCases(
    fires={
        "failing requests": Case(
            requests(steady(980, 90), UNAVAILABLE=steady(20, 90)),
            {"slo": "availability", "window": "1h"},
            "demo spends its availability budget 20.0 times too fast",
        ),
        "slow tokens": Case(
            SLOW_TOKENS, {"slo": "itl", "window": "1h"}, "demo spends its itl budget 20.0 times too fast"
        ),
    },
    silent={
        "a blip": Case(requests(steady(980, 93), UNAVAILABLE=then(0, 200, 3, 90))),
        "over since ten minutes": Case(requests(steady(980, 90), UNAVAILABLE=then(100, 0, 10, 80))),
        "since a minute": Case(requests(steady(1000, 91), UNAVAILABLE=then(0, 10_000, 1, 90))),
        "errors of callers": Case(requests(steady(980, 90), INVALID_ARGUMENT=steady(20, 90))),
    },
)
BURN_SLOW = AlertCases(
    fires={
        "for hours": Case(
            requests(steady(992, 420), INTERNAL=steady(8, 420)),
            {"slo": "availability", "window": "6h"},
            "demo spends its availability budget 8.0 times too fast",
        )
    },
    silent={
        "within twice the budget": Case(requests(steady(998, 420), INTERNAL=steady(2, 420))),
        "an hour of it": Case(requests(steady(984, 420), INTERNAL=then(0, 16, 60, 360))),
        "over since an hour": Case(requests(steady(980, 420), INTERNAL=then(20, 0, 60, 360))),
        "since ten minutes": Case(requests(steady(1000, 370), INTERNAL=then(0, 5000, 10, 360))),
    },
)


def queued(*depths: float) -> Series:
    found: Series = {"epserver_queue_limit{}": constant(256, 30)}
    return found | {
        f'epserver_queue_depth{{rank="{rank}"}}': constant(depth, 30) for rank, depth in enumerate(depths)
    }


QUEUE = AlertCases(
    fires={"two ranks": Case(queued(128, 112), {}, "The queue of one:9400 is 93.75% full")},
    silent={
        "half full": Case(queued(128, 0)),
        "a burst": Case(queued(0, 0) | {'epserver_queue_depth{rank="0"}': [0] * 25 + [256] * 5}),
        "no queue": Case(queued(3, 0) | {"epserver_queue_limit{}": constant(0, 30)}),
    },
)
REFUSED = AlertCases(
    fires={
        "one in twenty": Case(
            requests(steady(95, 30), RESOURCE_EXHAUSTED=steady(5, 30)), {}, "demo refuses 5% of its requests"
        )
    },
    silent={
        "one in two hundred": Case(requests(steady(199, 30), RESOURCE_EXHAUSTED=steady(1, 30))),
        "a burst": Case(requests(steady(95, 30), RESOURCE_EXHAUSTED=then(0, 5, 4, 26))),
    },
)
USAGE = 'epserver_kv_cache_usage_ratio{rank="1"}'
KV_CACHE = AlertCases(
    fires={
        "full": Case({USAGE: constant(0.98, 30)}, {"rank": "1"}, "KV cache of rank 1 of one:9400 is 98% full")
    },
    silent={
        "busy": Case({USAGE: constant(0.9, 30)}),
        "full for a moment": Case({USAGE: [0.9] * 25 + [1] * 5}),
    },
)


def preempting(per_minute: float, minutes: int = 20, admitted: float = 60) -> Series:
    return {
        'epserver_preemptions_total{rank="0"}': then(0, per_minute, minutes, 10),
        "epserver_requests_admitted_total{}": steady(admitted, 10 + minutes),
    }


PREEMPTING = AlertCases(
    fires={"one in six": Case(preempting(10), {}, "one:9400 puts back 0.17 sequences per admitted request")},
    silent={
        "one in sixty": Case(preempting(1)),
        "for nine minutes": Case(preempting(10, minutes=9)),
        "nothing to compare with": Case(preempting(10, admitted=0)),
    },
)


def expert_tokens(*per_minute: float) -> Series:
    """Two experts on each rank."""
    return {
        f'epserver_expert_tokens_total{{expert="{expert}", rank="{expert // 2}"}}': steady(number, 40)
        for expert, number in enumerate(per_minute)
    }


EXPERTS = AlertCases(
    fires={
        "one rank": Case(
            expert_tokens(9000, 1000, 1000, 1000, 1000, 1000, 1000, 1000),
            {"scope": "rank"},
            "One rank of one:9400 receives far more tokens than the others: mean / maximum = 0.40",
        )
    },
    silent={
        "even over ranks": Case(expert_tokens(9000, 1000, 1000, 9000, 5000, 5000, 2000, 8000)),
        "hardly any tokens": Case(expert_tokens(90, 10, 10, 10, 10, 10, 10, 10)),
        "for ten minutes": Case(cut(expert_tokens(9000, *[1000] * 7), 11)),
    },
)

CASES: dict[str, AlertCases] = {
    "EpServerCommLatencyRegression": COMM,
    "EpServerInterTokenLatencyRegression": ITL,
    "EpServerTimeToFirstTokenRegression": TTFT,
    "EpServerSlowRank": SLOW_RANK,
    "EpServerRankDown": RANK_DOWN,
    "EpServerDown": DOWN,
    "EpServerRestartLoop": RESTARTS,
    "EpServerStalled": STALLED,
    "EpServerErrorBudgetBurnFast": BURN_FAST,
    "EpServerErrorBudgetBurnSlow": BURN_SLOW,
    "EpServerQueueSaturated": QUEUE,
    "EpServerRequestsRefused": REFUSED,
    "EpServerKvCacheSaturated": KV_CACHE,
    "EpServerPreempting": PREEMPTING,
    "EpServerExpertImbalance": EXPERTS,
}
