"""What ranks measured, as a scrape shows it: the text is read back by Prometheus' parser and recomputed."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from ep_server.observability.rank_metrics import MAX_EXPERT_SERIES, RankCollector, prometheus_buckets
from ep_server.records import RankLoad, RankStatistics
from tests.support.observability.reports import Series, bucketed, counts_below, report, series, value

Scrape = Callable[[], Series]


@pytest.fixture
def collector() -> RankCollector:
    return RankCollector()


@pytest.fixture
def scrape(collector: RankCollector) -> Scrape:
    return lambda: scraped(collector)


def scraped(collector: RankCollector) -> Series:
    registry = CollectorRegistry()
    registry.register(collector)
    return series(generate_latest(registry).decode())


def test_no_rank_gives_an_empty_page(scrape: Scrape) -> None:
    assert scrape() == {}


def test_histograms_are_cumulative_and_in_seconds(collector: RankCollector, scrape: Scrape) -> None:
    statistics = report(1, 100)
    collector.update(statistics)
    found = scrape()
    buckets = statistics.histograms["dispatch/wait"]
    labels = {"rank": "1", "op": "dispatch", "mode": "low_latency", "part": "wait"}
    for exponent in range(10, 35):
        edge = repr(2**exponent / 1e9)
        at_edge = value(found, "epserver_comm_latency_seconds_bucket", le=edge, **labels)
        assert at_edge == counts_below(buckets, exponent)
    assert value(found, "epserver_comm_latency_seconds_bucket", le="+Inf", **labels) == 100
    assert value(found, "epserver_comm_latency_seconds_count", **labels) == 100
    total = value(found, "epserver_comm_latency_seconds_sum", **labels)
    assert total == pytest.approx(statistics.sums["dispatch/wait"] * 1e-9)


@pytest.mark.parametrize("length", [0, 1, 9, 10, 11, 34, 35, 48])
def test_histograms_of_any_length_keep_every_count(length: int) -> None:
    edges = prometheus_buckets((1,) * length)
    assert [float(edge) for edge, _ in edges] == [*(2**e / 1e9 for e in range(10, 35)), float("inf")]
    assert [count for _, count in edges] == [*(min(length, e) for e in range(10, 35)), length]


def test_durations_beyond_both_ends_are_counted() -> None:
    edges = dict(prometheus_buckets(bucketed([1, 3, 2**36])))
    assert edges["1.024e-06"] == edges[repr(2**34 / 1e9)] == 2
    assert edges["+Inf"] == 3


def test_each_kind_of_histogram_has_its_family(collector: RankCollector, scrape: Scrape) -> None:
    collector.update(report(0, 10))
    found = scrape()
    for phase in ("attention", "device", "total"):
        assert value(found, "epserver_step_seconds_count", rank="0", phase=phase) == 10
    assert value(found, "epserver_request_queue_seconds_count", rank="0") == 10
    vote = {"op": "vote", "mode": "", "part": "total"}
    assert value(found, "epserver_comm_latency_seconds_count", rank="0", **vote) == 10


def test_operations_of_many_rows_have_their_mode(collector: RankCollector, scrape: Scrape) -> None:
    """Also in what is computed from them."""
    sums = {"normal_dispatch/wait": 30, "normal_dispatch/send": 10, "normal_dispatch/total": 130}
    collector.update(
        RankStatistics(
            0,
            RankLoad(steps=1),
            histograms={"normal_dispatch/total": bucketed([1000, 3000]), "dispatch/total": bucketed([1000])},
            sums=sums,
            counters={"bytes/normal_combine": 7, "bytes/combine": 5},
            peer_wait_ns={("normal_dispatch", 1): 2000},
        )
    )
    found, rank = scrape(), {"rank": "0", "op": "dispatch"}
    name = "epserver_comm_latency_seconds_count"
    assert value(found, name, mode="normal", part="total", **rank) == 2
    assert value(found, name, mode="low_latency", part="total", **rank) == 1
    assert value(found, "epserver_comm_bytes_total", rank="0", op="combine", mode="normal") == 7
    assert value(found, "epserver_comm_bytes_total", rank="0", op="combine", mode="low_latency") == 5
    waits = value(found, "epserver_comm_peer_wait_seconds_total", peer="1", mode="normal", **rank)
    assert waits == pytest.approx(2e-6)
    assert value(found, "epserver_overlap_ratio", rank="0") == pytest.approx(90 / 120)


def test_histograms_that_counted_nothing_are_left_out(collector: RankCollector, scrape: Scrape) -> None:
    collector.update(
        RankStatistics(0, histograms={"dispatch/reduce": (0,) * 48}, sums={"dispatch/reduce": 0})
    )
    assert not any(name.startswith("epserver_comm_latency") for name, _ in scrape())


def test_counters_and_gauges_of_a_rank(collector: RankCollector, scrape: Scrape) -> None:
    collector.set_up(0, True)
    collector.set_up(1, True)
    collector.update(report(0, 12))
    collector.update(report(1, 24))
    collector.set_up(1, False)
    found = scrape()
    assert value(found, "epserver_ep_rank_up", rank="0") == 1
    assert value(found, "epserver_ep_rank_up", rank="1") == 0
    assert value(found, "epserver_idle_steps_total", rank="0") == 4
    assert value(found, "epserver_padded_tokens_total", rank="1") == 12
    assert value(found, "epserver_graph_steps_total", rank="0") == 12
    assert value(found, "epserver_kernels_compiled_total", rank="1") == 24
    assert value(found, "epserver_comm_bytes_total", rank="1", op="combine", mode="low_latency") == 12_000
    assert value(found, "epserver_comm_bytes_total", rank="0", op="dispatch", mode="low_latency") == 12_000
    assert value(found, "epserver_prefix_cache_queries_total", rank="0") == 84
    assert value(found, "epserver_prefix_cache_hits_total", rank="0") == 24
    assert value(found, "epserver_preemptions_total", rank="1") == 6
    assert value(found, "epserver_steps_total", rank="1") == 24
    assert value(found, "epserver_queue_depth", rank="0") == 2
    assert value(found, "epserver_rank_running", rank="1") == 4
    assert value(found, "epserver_kv_cache_usage_ratio", rank="0") == 0.25


def test_held_blocks_are_no_use_of_the_cache(collector: RankCollector, scrape: Scrape) -> None:
    """They are given up when a sequence needs room. A rank that nobody may fetch from has no such series."""
    load = RankLoad(kv_blocks_used=10, kv_blocks_total=40, kv_blocks_held=4)
    counters = {"handoff_hold_ns": 3_000_000_000, "handoff_holds/expired": 2, "handoff_holds/fetched": 1}
    collector.update(RankStatistics(0, load, counters=counters))
    collector.update(report(1, 12))
    found = scrape()
    assert value(found, "epserver_kv_blocks_held", rank="0") == 4
    assert value(found, "epserver_kv_blocks_used", rank="0") == 10
    assert value(found, "epserver_kv_cache_usage_ratio", rank="0") == 6 / 40
    assert value(found, "epserver_kv_handoff_hold_seconds_total", rank="0") == 3
    assert value(found, "epserver_kv_handoff_holds_total", rank="0", end="expired") == 2
    assert value(found, "epserver_kv_handoff_holds_total", rank="0", end="fetched") == 1
    ranks = {dict(labels)["rank"] for name, labels in found if name == "epserver_kv_blocks_held"}
    assert ranks == {"0"}


def test_the_wait_matrix_leaves_out_the_diagonal(collector: RankCollector, scrape: Scrape) -> None:
    for rank in range(3):
        collector.update(report(rank, 10, ranks=3))
    waits = {
        (labels["rank"], labels["peer"], labels["op"]): seconds
        for (name, pairs), seconds in scrape().items()
        if name == "epserver_comm_peer_wait_seconds_total"
        for labels in [dict(pairs)]
    }
    pairs = [(r, p) for r in "012" for p in "012" if r != p]
    assert waits == {(r, p, op): pytest.approx(1e-6) for r, p in pairs for op in ("dispatch", "combine")}


def test_expert_balance_is_of_the_last_interval(collector: RankCollector, scrape: Scrape) -> None:
    def tell(step: int, first: int, second: int) -> None:
        for rank, tokens in ((0, first), (1, second)):
            load = RankLoad(steps=step)
            collector.update(RankStatistics(rank, load, expert_tokens={2 * rank: tokens, 2 * rank + 1: 0}))

    tell(1, 100, 0)
    assert value(scrape(), "epserver_expert_balancedness", scope="rank") == pytest.approx(0.5)
    assert value(scrape(), "epserver_expert_balancedness", scope="expert") == pytest.approx(0.25)
    tell(2, 110, 10)
    assert value(scrape(), "epserver_expert_balancedness", scope="rank") == pytest.approx(1.0)
    assert value(scrape(), "epserver_expert_tokens_total", rank="0", expert="0") == 110
    tell(2, 110, 10)  # the report of a parked rank changes nothing
    assert value(scrape(), "epserver_expert_balancedness", scope="rank") == pytest.approx(1.0)


def test_many_experts_become_one_series_per_rank(collector: RankCollector, scrape: Scrape) -> None:
    half = MAX_EXPERT_SERIES // 2 + 1
    for rank in range(2):
        experts = range(rank * half, (rank + 1) * half)
        collector.update(RankStatistics(rank, expert_tokens=dict.fromkeys(experts, 2)))
    found = {key: n for key, n in scrape().items() if key[0] == "epserver_expert_tokens_total"}
    assert len(found) == 2
    assert value(found, "epserver_expert_tokens_total", rank="1", expert="all") == 2 * half


def test_overlap_is_what_was_not_waited_for(collector: RankCollector, scrape: Scrape) -> None:
    sums = {"dispatch/send": 10, "dispatch/wait": 30, "dispatch/expand": 5, "dispatch/total": 135}
    collector.update(RankStatistics(0, RankLoad(steps=1), sums=sums))
    assert value(scrape(), "epserver_overlap_ratio", rank="0") == pytest.approx(90 / 120)
    later = sums | {"dispatch/wait": 130, "dispatch/total": 235}
    collector.update(RankStatistics(0, RankLoad(steps=2), sums=later))
    assert value(scrape(), "epserver_overlap_ratio", rank="0") == 0


def test_skew_is_how_much_longer_the_earliest_rank_waits(collector: RankCollector, scrape: Scrape) -> None:
    collector.update(RankStatistics(0, RankLoad(steps=4), sums={"vote/wait": 4_000}))
    assert not any(name == "epserver_step_skew_seconds" for name, _ in scrape())
    collector.update(RankStatistics(1, RankLoad(steps=4), sums={"vote/wait": 24_000}))
    assert value(scrape(), "epserver_step_skew_seconds") == pytest.approx(5e-6)
    collector.update(RankStatistics(1, RankLoad(steps=6), sums={"vote/wait": 26_000}))
    assert value(scrape(), "epserver_step_skew_seconds") == pytest.approx(0)


def test_counters_never_fall_and_scraping_changes_nothing(collector: RankCollector, scrape: Scrape) -> None:
    before: Series = {}
    for step in range(1, 40, 3):
        for rank in range(2):
            collector.update(report(rank, step))
        now = scrape()
        assert scrape() == now
        for key, earlier in before.items():
            if key[0].endswith(("_total", "_count", "_sum", "_bucket")):
                assert now[key] >= earlier, key
        before = now


def test_every_field_of_a_load_is_exported() -> None:
    from ep_server.observability.rank_metrics import LOAD_COUNTERS, LOAD_GAUGES

    queues = {"running", "waiting"}  # families of their own: the engine knows newer numbers
    planned = {"steps"}  # votes that parked included; what ran is a counter of the rank
    exported = {*LOAD_GAUGES, *LOAD_COUNTERS} | planned | queues
    assert {field.name for field in dataclasses.fields(RankLoad)} == exported


def test_a_summary_adds_up_all_ranks() -> None:
    reports = [report(rank, 40, ranks=3) for rank in range(3)]
    full, summary = RankCollector(), RankCollector(summary=True)
    for collector, one in itertools.product((full, summary), reports):
        collector.update(one)
    details, found = scraped(full), scraped(summary)
    merged = tuple(f"epserver_{name}" for name in ("comm_latency", "step_sec", "comm_peer", "request_queue"))
    wanted: Counter[tuple[str, frozenset[tuple[str, str]]]] = Counter()
    for (name, labels), number in details.items():
        kept = dict(labels)
        if name.startswith(merged):
            kept["rank"] = "all"
        elif name.startswith("epserver_expert_tokens"):
            kept["expert"] = "all"
        wanted[name, frozenset(kept.items())] += number
    assert found.keys() == wanted.keys()
    assert all(found[key] == pytest.approx(wanted[key]) for key in wanted)


def test_a_summary_of_64_ranks_is_short() -> None:
    collector = RankCollector(summary=True)
    for rank in range(64):
        collector.set_up(rank, True)
        collector.update(report(rank, 20, ranks=64))
    assert 0 < len(scraped(collector)) <= 3000
