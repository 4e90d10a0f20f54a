"""What the step meter adds up, against sums made by hand."""

from __future__ import annotations

from ep_server.backends.cpu.runner import RunnerStatistics
from ep_server.ranks.statistics import BUCKETS, LAST_STEPS, Histogram, StepMeter, StepTimes
from ep_server.records import RankLoad, SeqSlice, StepBatch, StepTrace, TokenEvent

NO_EXCHANGE = {"histograms": {}, "sums": {}, "counters": {}, "peer_wait_ns": {}, "expert_tokens": {}}
NO_RUNNER = RunnerStatistics({}, {}, {})


def batch(*numbers: int) -> StepBatch:
    return StepBatch(tuple(SeqSlice(n, 0, (1, 2), (0,), True) for n in numbers), 2 * len(numbers))


def test_buckets_are_powers_of_two() -> None:
    histogram = Histogram()
    for ns in (0, 1, 2, 3, 4, 1023, 1024, 2**60):
        histogram.add(ns)
    filled = {bucket: count for bucket, count in enumerate(histogram.counts) if count}
    assert filled == {0: 2, 1: 2, 2: 1, 9: 1, 10: 1, BUCKETS - 1: 1}
    assert histogram.sum == 0 + 1 + 2 + 3 + 4 + 1023 + 1024 + 2**60


def test_steps_are_added_up() -> None:
    meter = StepMeter(rank=3, sequences=8)
    meter.arrived(7, now=100)
    meter.arrived(8, now=110)
    meter.arrived(9, now=120)
    meter.left(9)
    meter.began(batch(7), now=1010)
    meter.stepped(batch(7), 1, StepTimes(start=1000, planned=1010, voted=1050, ran=2000, published=2030))
    meter.began(batch(7, 8), now=3020)
    meter.stepped(
        batch(7, 8), 2, StepTimes(start=3000, planned=3020, voted=3021, ran=4000, published=4003), bucket=7
    )
    meter.stepped(StepBatch((), 0), 1, StepTimes(5000, 5001, 5002, 5003, 5004))
    meter.parked(work_number=5)
    record = meter.gather(RankLoad(steps=3), NO_EXCHANGE, NO_RUNNER)
    assert (record.rank, record.load.steps) == (3, 3)
    assert record.counters == {
        "tokens": 6,
        "padded_tokens": 3,
        "idle_steps": 1,
        "overlap_steps": 1,
        "graph_steps": 1,
        "decode_steps": 1,
        "decode_tokens": 4,
        "run_steps": 3,
        "parks": 1,
        "parked_at_work": 5,
    }
    assert record.sums == {
        "step/plan": 10 + 20 + 1,
        "step/vote": 40 + 1 + 1,
        "step/publish": 30 + 3 + 1,
        "step/total": 1030 + 1003 + 4,
        "step/decode": 1003,
        "request/queue": (1010 - 100) + (3020 - 110),
    }
    assert sum(record.histograms["step/total"]) == 3
    assert record.last_steps == (
        StepTrace(0, 1000, 2, 1, 1, plan_ns=10, vote_ns=40, run_ns=950, publish_ns=30),
        StepTrace(1, 3000, 4, 2, 2, plan_ns=20, vote_ns=1, run_ns=979, publish_ns=3),
        StepTrace(2, 5000, 0, 0, 1, plan_ns=1, vote_ns=1, run_ns=1, publish_ns=1),
    )
    assert sum(record.histograms["request/queue"]) == 2  # 9 never ran, 7 counts once


def test_only_the_last_steps_are_kept() -> None:
    meter = StepMeter(rank=0, sequences=8)
    for step in range(LAST_STEPS + 5):
        meter.stepped(batch(1), 1, StepTimes(step, step, step, step, step))
    kept = meter.gather(RankLoad(), NO_EXCHANGE, NO_RUNNER).last_steps
    assert [step.step for step in kept] == list(range(5, LAST_STEPS + 5))


def test_the_first_event_of_a_request_tells_how_long_it_waited() -> None:
    meter = StepMeter(rank=0, sequences=8)
    for number in (7, 8, 9):
        meter.arrived(number, now=100)
    first = [TokenEvent(7, 1)]
    assert meter.with_queue_times(first) is first
    meter.began(batch(7, 8, 9), now=150)
    assert meter.with_queue_times(first) == [TokenEvent(7, 1, queued_ns=50)]  # 8 and 9 are in mid-prefill
    meter.began(batch(7, 8, 9), now=170)
    meter.left(9)
    events = [TokenEvent(7, 2), TokenEvent(8, 3)]
    assert meter.with_queue_times(events) == [TokenEvent(7, 2), TokenEvent(8, 3, queued_ns=50)]
    assert meter.with_queue_times(events) is events


def test_parts_are_joined_and_empty_ends_left_out() -> None:
    meter = StepMeter(0, sequences=8)
    exchange = {
        "histograms": {"dispatch/send": (0, 5, 0, 0), "vote/wait": (0, 0)},
        "sums": {"dispatch/send": 11},
        "counters": {"exchange_tokens": 4},
        "peer_wait_ns": {("vote", 1): 12},
        "expert_tokens": {2: 6},
    }
    runner = RunnerStatistics({"step/router": (1, 0)}, {"step/router": 13}, {2: 99})
    record = meter.gather(RankLoad(), exchange, runner)
    assert record.histograms == {"dispatch/send": (0, 5), "step/router": (1,)}
    assert record.sums["dispatch/send"] == 11
    assert record.sums["step/router"] == 13
    assert {name: n for name, n in record.counters.items() if n} == {"exchange_tokens": 4}
    assert record.peer_wait_ns == {("vote", 1): 12}
    assert record.expert_tokens == {2: 6}


def test_what_was_measured_before_ready_is_in_no_record() -> None:
    def parts(n: int) -> tuple[dict[str, object], RunnerStatistics]:
        exchange = {
            "histograms": {"dispatch/send": (n, 0, 5 * n, 0)},
            "sums": {"dispatch/send": 11 * n},
            "counters": {"exchange_tokens": 4 * n},
            "peer_wait_ns": {("vote", 1): 12 * n},
            "expert_tokens": {2: 6 * n},
        }
        return exchange, RunnerStatistics({"step/router": (n,)}, {"step/router": 13 * n}, {})

    meter = StepMeter(0, sequences=8)
    meter.ready(*parts(2))
    record = meter.gather(RankLoad(), *parts(2))
    assert record.histograms == {}
    assert {*record.sums.values(), *record.counters.values(), *record.peer_wait_ns.values()} == {0}
    assert record.expert_tokens == {2: 0}
    record = meter.gather(RankLoad(), *parts(3))
    assert record.histograms == {"dispatch/send": (1, 0, 5), "step/router": (1,)}
    assert (record.sums["dispatch/send"], record.sums["step/router"]) == (11, 13)
    assert record.counters["exchange_tokens"] == 4
    assert (record.peer_wait_ns, record.expert_tokens) == ({("vote", 1): 12}, {2: 6})
