"""Recorded reports of ranks, and the exporter's text read back by Prometheus' own parsers."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from prometheus_client.parser import text_string_to_metric_families

from ep_server.observability.status_history import OPS, Snapshot
from ep_server.records import RankLoad, RankStatistics

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def bucketed(durations: Iterable[int], buckets: int = 48) -> tuple[int, ...]:
    """Log2 histogram of durations in ns, counted the obvious way."""
    counts = [0] * buckets
    for ns in durations:
        counts[max(ns, 1).bit_length() - 1] += 1
    return tuple(counts)


def report(rank: int, step: int, ranks: int = 2) -> RankStatistics:
    """The report of a rank after `step` steps; every number grows with the steps."""
    draw = random.Random(rank)
    times = [draw.randrange(500, 3_000_000) for _ in range(step)]
    parts = {
        "dispatch": ("send", "wait", "expand"),
        "combine": ("send", "wait", "reduce"),
        "vote": ("wait",),
        "step": ("attention", "experts", "device", "total"),
        "request": ("queue",),
    }
    names = [f"{op}/{part}" for op, several in parts.items() for part in several]
    totals = {name: [4 * ns for ns in times] for name in ("dispatch/total", "combine/total", "vote/total")}
    durations = {**dict.fromkeys(names, times), **totals}
    return RankStatistics(
        rank=rank,
        load=RankLoad(
            running=3 + rank,
            waiting=2,
            kv_blocks_used=10,
            kv_blocks_total=40,
            kv_blocks_cached=5,
            steps=step,
            prefix_queries=7 * step,
            prefix_hits=2 * step,
            preemptions=step // 4,
        ),
        histograms={name: bucketed(values) for name, values in durations.items()},
        sums={name: sum(values) for name, values in durations.items()},
        counters={
            "run_steps": step,
            "idle_steps": step // 3,
            "padded_tokens": step // 2,
            "tokens": 5 * step,
            "overlap_steps": step,
            "graph_steps": step,
            "kernels_compiled": step,
            "parks": step,
            "exchange_tokens": 5 * step,
            "exchange_rows": 9 * step,
            "exchange_sleeps": step,
            "bytes/dispatch": 1000 * step,
            "bytes/combine": 500 * step,
        },
        peer_wait_ns={(op, peer): 100 * step for op in ("dispatch", "combine") for peer in range(ranks)},
        expert_tokens={2 * rank: 3 * step, 2 * rank + 1: step},
    )


def series(text: str) -> Series:
    """Every sample of a scrape by name and labels; a series that comes twice fails."""
    found: Series = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found, key
            found[key] = sample.value
    return found


def value(scrape: Series, name: str, **labels: str) -> float:
    return scrape[name, frozenset(labels.items())]


def counts_below(buckets: Sequence[int], exponent: int) -> int:
    """Durations shorter than 2^exponent ns."""
    return sum(buckets[:exponent])


RANKS, STEPS = 3, 100


def statistics(rank: int, steps: int, late: int | None = None, late_steps: int = 0) -> RankStatistics:
    """Each waited 10 us per step and operation for each peer; in `late_steps` 2 ms for the late one."""
    waits = {
        (op, peer): steps * 10_000 + (late_steps * 1_990_000 if peer == late else 0)
        for op in OPS
        for peer in range(RANKS)
        if peer != rank
    }
    times = [100_000 + 1_000 * step for step in range(steps)]
    return RankStatistics(
        rank,
        RankLoad(running=2, waiting=rank, kv_blocks_used=10 * (rank + 1), kv_blocks_total=40, steps=steps),
        histograms={f"{op}/total": bucketed(times) for op in OPS},
        counters={"idle_steps": steps // 4, "tokens": 8 * steps},
        peer_wait_ns=waits,
        expert_tokens={2 * rank: 30 * steps, 2 * rank + 1: (rank + 1) * 10 * steps},
    )


def snapshot(at: float, steps: int, *late: int, **late_steps: int) -> Snapshot:
    return Snapshot(
        at=at,
        generated=40.0 * steps,
        running=6,
        waiting=3,
        token_gaps=((0.001, 0.0), (0.002, 10.0 * steps), (0.004, 20.0 * steps), (float("inf"), 20.0 * steps)),
        up=dict.fromkeys(range(RANKS), True),
        ranks={rank: statistics(rank, steps, *late, **late_steps) for rank in range(RANKS)},
    )
