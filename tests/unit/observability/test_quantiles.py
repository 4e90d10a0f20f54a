"""Quantiles of log2 histograms against the durations that were counted."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ep_server.observability.quantiles import Summary, balance, merge, quantile, summarise, summarise_ranks
from tests.support.observability.reports import bucketed, report

DURATIONS = st.lists(st.integers(1, 2**40), min_size=1, max_size=200)


@settings(deadline=None)
@given(DURATIONS, st.floats(0.0, 1.0))
def test_a_quantile_is_in_the_bucket_of_the_true_one(durations: list[int], q: float) -> None:
    ordered = sorted(durations)
    true = ordered[max(math.ceil(q * len(ordered)) - 1, 0)]
    low = 2 ** (true.bit_length() - 1)
    assert low * 0.999e-9 <= quantile(bucketed(durations), q) <= 2 * low * 1.001e-9


@settings(deadline=None)
@given(DURATIONS, st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_quantiles_do_not_fall(durations: list[int], one: float, two: float) -> None:
    buckets = bucketed(durations)
    assert quantile(buckets, min(one, two)) <= quantile(buckets, max(one, two))


@settings(deadline=None)
@given(DURATIONS, DURATIONS)
def test_merging_counts_the_same_as_counting_together(one: list[int], two: list[int]) -> None:
    assert merge([bucketed(one), bucketed(two)]) == bucketed(one + two)


def test_merging_takes_histograms_of_different_length() -> None:
    assert merge([(1, 2), (), (0, 1, 5)]) == (1, 3, 5)
    assert merge([]) == ()


def test_nothing_counted_gives_zeros() -> None:
    assert summarise((), 0) == summarise((0, 0, 0), 0) == Summary()
    assert quantile((), 0.5) == 0.0


def test_a_summary_has_the_exact_count_and_mean() -> None:
    durations = [1000, 2000, 3000, 100_000]
    summary = summarise(bucketed(durations), sum(durations))
    assert summary.count == 4
    assert summary.mean == pytest.approx(sum(durations) / 4 * 1e-9)
    assert summary.p50 <= summary.p90 <= summary.p99
    assert 65536e-9 <= summary.p99 <= 131072e-9


def test_ranks_are_summed_by_name() -> None:
    ranks = [report(0, 30), report(1, 50)]
    summaries = summarise_ranks(ranks)
    assert list(summaries) == sorted(ranks[0].histograms)
    name = "dispatch/wait"
    assert summaries[name].count == 80
    assert summaries[name].mean == pytest.approx(sum(rank.sums[name] for rank in ranks) / 80 * 1e-9)
    assert summarise_ranks([]) == {}


@pytest.mark.parametrize(
    ("loads", "expected"), [([], 0.0), ([0, 0], 0.0), ([3, 3, 3], 1.0), ([8, 0, 0, 0], 0.25), ([1, 3], 2 / 3)]
)
def test_balance_is_mean_over_maximum(loads: list[int], expected: float) -> None:
    assert balance(loads) == pytest.approx(expected)
