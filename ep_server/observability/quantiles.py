"""Quantiles and sums of log2 histograms, the form in which ranks report durations.

Bucket b counts durations in [2^b, 2^(b+1)) nanoseconds; shorter ones are in bucket 0. Results are seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from ep_server.records import RankStatistics

NANO = 1e-9


@dataclass(frozen=True, slots=True)
class Summary:
    """One histogram, summarised for a table. Durations in seconds; all 0 if nothing was counted."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0


def merge(histograms: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Adds histograms bucket by bucket; they may differ in length."""
    return tuple(map(sum, zip_longest(*histograms, fillvalue=0)))


def quantile(buckets: Sequence[int], q: float) -> float:
    """The duration that a share q of the counted ones does not exceed, seconds; 0 for an empty histogram.

    Linear inside the bucket it falls into, so at most a factor of 2 off.

    Args:
        q: 0 to 1.
    """
    wanted = q * sum(buckets)
    below = 0
    for exponent, count in enumerate(buckets):
        if count and below + count >= wanted:
            low = 2.0**exponent
            return (low + low * (wanted - below) / count) * NANO
        below += count
    return 0.0


def summarise(buckets: Sequence[int], sum_ns: int) -> Summary:
    """Count, mean and the usual quantiles of one histogram.

    Args:
        sum_ns: sum of the durations, nanoseconds.
    """
    count = sum(buckets)
    if not count:
        return Summary()
    p50, p90, p99 = (quantile(buckets, q) for q in (0.5, 0.9, 0.99))
    return Summary(count, sum_ns / count * NANO, p50, p90, p99)


def summarise_ranks(statistics: Iterable[RankStatistics]) -> dict[str, Summary]:
    """One summary per histogram name ("<op>/<part>", "step/<phase>") over all ranks, sorted by name."""
    ranks = list(statistics)
    names = sorted({name for rank in ranks for name in rank.histograms})
    return {
        name: summarise(
            merge(rank.histograms.get(name, ()) for rank in ranks),
            sum(rank.sums.get(name, 0) for rank in ranks),
        )
        for name in names
    }


def balance(loads: Iterable[int]) -> float:
    """Mean over maximum of loads: 1 is perfectly even, 1/n is all on one of n, 0 is no load at all."""
    values = list(loads)
    top = max(values, default=0)
    return sum(values) / (len(values) * top) if top else 0.0
