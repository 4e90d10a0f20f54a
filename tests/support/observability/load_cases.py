"""Cases of the alerts on error budgets and on saturation."""

from __future__ import annotations

from tests.support.observability.cases import AlertCases, Case, Series, Values, constant, cut, steady, then


def requests(good: Values, **bad: Values) -> Series:
    """Counters by status."""
    found: Series = {'epserver_requests_total{status="OK", finish_reason="eos"}': good}
    for status, counted in bad.items():
        found[f'epserver_requests_total{{status="{status}", finish_reason=""}}'] = counted
    return found


def stepping(to: float) -> Values:
    """A counter that moves once in two hours."""
    return [*constant(0, 60), *constant(to, 60)]


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
        "deadlines of callers": Case(requests(steady(980, 90), DEADLINE_EXCEEDED=steady(20, 90))),
        "one deadline in three requests an hour": Case(requests(stepping(2), DEADLINE_EXCEEDED=stepping(1))),
        "one failure in three requests an hour": Case(requests(stepping(2), INTERNAL=stepping(1))),
        "slow readers": Case(
            requests(steady(980, 90))
            | {
                'epserver_requests_total{status="RESOURCE_EXHAUSTED", finish_reason="slow_reader"}': steady(
                    20, 90
                )
            }
        ),
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
        "one of three": Case(requests(steady(0.4, 30), RESOURCE_EXHAUSTED=steady(0.2, 30))),
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
        "one in six, of few": Case(preempting(0.5, admitted=3)),
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

DAY = 86_400.0
EXPIRY = 'epserver_tls_expiry_timestamp_seconds{file="tls.crt"}'  # promtool's time begins at 0
EXPIRES = AlertCases(
    fires={
        "in two days": Case(
            {EXPIRY: constant(2 * DAY, 31)},
            {"file": "tls.crt"},
            "tls.crt of one:9400 expires in 1d 23h 30m 0s",
        )
    },
    silent={
        "in a month": Case({EXPIRY: constant(30 * DAY, 30)}),
        "renewed": Case({EXPIRY: [*constant(2 * DAY, 10), *constant(90 * DAY, 20)]}),
    },
)
REFUSED_FILES = "epserver_tls_rotations_refused_total{}"
NOT_TAKEN = AlertCases(
    fires={
        "one": Case({REFUSED_FILES: [0] * 20 + [1] * 10}, {}, "one:9400 could not use its changed TLS files")
    },
    silent={"none": Case({REFUSED_FILES: [1] * 30}), "long ago": Case({REFUSED_FILES: [0] * 20 + [1] * 90})},
)

CASES = {
    "EpServerCertificateExpires": EXPIRES,
    "EpServerCertificateRefused": NOT_TAKEN,
    "EpServerErrorBudgetBurnFast": BURN_FAST,
    "EpServerErrorBudgetBurnSlow": BURN_SLOW,
    "EpServerQueueSaturated": QUEUE,
    "EpServerRequestsRefused": REFUSED,
    "EpServerKvCacheSaturated": KV_CACHE,
    "EpServerPreempting": PREEMPTING,
    "EpServerExpertImbalance": EXPERTS,
}
