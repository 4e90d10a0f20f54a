"""What is asked, and when: the statistics of a Poisson process, the same load for any number of readers."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from ep_server.cli.bench.load import Load, poisson
from ep_server.cli.bench.online import divide, longest
from ep_server.client import Target

LOAD = Load(requests=23, concurrency=5, rate=0.0, prompt_tokens=9, new_tokens=4, vocab_size=50, seed=3)


def test_gaps_of_arrivals_are_exponential() -> None:
    """Kolmogorov-Smirnov against the distribution function, and what only a Poisson process has."""
    rate, count = 40.0, 20_000
    times = poisson(rate, count, seed=1)
    gaps = sorted(b - a for a, b in pairwise([0.0, *times]))
    assert gaps[0] > 0 and len(gaps) == count
    mean = sum(gaps) / count
    assert mean == pytest.approx(1 / rate, rel=0.03)
    assert sum((gap - mean) ** 2 for gap in gaps) / count == pytest.approx(1 / rate**2, rel=0.06)
    distance = max(abs((i + 0.5) / count - (1 - math.exp(-rate * gap))) for i, gap in enumerate(gaps))
    assert distance < 1.63 / math.sqrt(count)  # exceeded by one seed in a hundred; this one is fixed
    counts = [0] * int(times[-1])
    for time in times:
        if time < len(counts):
            counts[int(time)] += 1
    expected = sum(counts) / len(counts)
    spread = sum((n - expected) ** 2 for n in counts) / len(counts)
    assert spread == pytest.approx(expected, rel=0.2)  # of Poisson counts, variance is the mean


def test_arrivals_are_those_of_their_seed() -> None:
    assert poisson(5.0, 10, 1) == poisson(5.0, 20, 1)[:10] != poisson(5.0, 10, 2)
    assert poisson(10.0, 10, 1) == pytest.approx([time / 2 for time in poisson(5.0, 10, 1)])


def test_prompts_are_different_and_within_the_vocabulary() -> None:
    prompts = [LOAD.prompt(index) for index in range(-2, 30)]
    assert all(len(ids) == 9 and all(0 <= token < 50 for token in ids) for ids in prompts)
    assert len({tuple(ids) for ids in prompts}) == 32
    assert LOAD.prompt(4) == replace(LOAD, requests=99).prompt(4) != replace(LOAD, seed=4).prompt(4)


@pytest.mark.parametrize("readers", [1, 2, 4, 7, 30])
@pytest.mark.parametrize("rate", [0.0, 100.0])
def test_readers_share_one_load(readers: int, rate: float) -> None:
    load = replace(LOAD, rate=rate)
    work = divide(Target("nobody"), load, readers, warmup=6)
    assert sorted(index for part in work for index in part.indices) == list(range(23))
    assert all(part.indices for part in work)
    assert sorted(index for part in work for index in part.warmup) == list(range(-6, 0))
    if rate:
        planned = {i: at for part in work for i, at in zip(part.indices, part.offsets, strict=True)}
        assert [planned[index] for index in range(23)] == poisson(rate, 23, 3)
        assert longest(load) > planned[22]
    else:
        streams = [part.streams for part in work]
        assert sum(streams) == 5 and min(streams) > 0 and max(streams) - min(streams) <= 1
        assert len(work) == min(readers, 5) and not any(part.offsets for part in work)


@pytest.mark.parametrize("readers", [1, 3, 4, 8])
def test_as_many_requests_as_streams_are_one_wave(readers: int) -> None:
    """No reader has a request for which one of its others must end first."""
    for part in divide(Target("nobody"), replace(LOAD, concurrency=LOAD.requests), readers, warmup=0):
        assert part.streams == len(part.indices)
