"""Turns measurements of the ranks (RankStatistics) into Prometheus families when Prometheus scrapes.

Ranks report cumulative numbers, so this module counts nothing and a scrape changes nothing: counters rise for
as long as the ranks live. A family without samples is left out. Units: seconds, bytes, tokens.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ep_server.engine.observer import RankQueue
from ep_server.observability.intervals import (
    Interval,
    expert_balance,
    op_and_mode,
    overlap_ratio,
    step_skew,
)
from ep_server.observability.quantiles import NANO
from ep_server.records import RankLoad, RankStatistics

FIRST_EDGE, LAST_EDGE = 10, 34  # bucket edges from 2^10 ns (1 us) to 2^34 ns (17 s), doubling
MAX_EXPERT_SERIES = 512  # with more experts, one series per rank counts all of them

# RankLoad field -> (family without prefix, help); the gauges of one rank.
LOAD_GAUGES: Mapping[str, tuple[str, str]] = {
    "kv_blocks_used": ("kv_blocks_used", "KV blocks that sequences use, or that are held for other servers."),
    "kv_blocks_total": ("kv_blocks", "KV blocks of this rank."),
    "kv_blocks_cached": ("kv_blocks_cached", "KV blocks kept only for their prefix, and free when needed."),
    "kv_blocks_held": ("kv_blocks_held", "KV blocks held for other servers alone; given up when needed."),
    "host_blocks_total": ("kv_host_blocks", "KV blocks that the host tier of this rank has room for."),
    "host_blocks_used": ("kv_host_blocks_used", "KV blocks in the host tier."),
}
LOAD_COUNTERS: Mapping[str, tuple[str, str]] = {
    "prefix_queries": ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_hits": ("prefix_cache_hits", "Prompt tokens found in the prefix cache or its host tier."),
    "prefix_host_hits": ("prefix_cache_host_hits", "Prompt tokens found in the host tier alone."),
    "preemptions": ("preemptions", "Sequences put back into the queue because KV blocks ran out."),
}
OF_HOST_TIER = {"host_blocks_total", "host_blocks_used", "prefix_host_hits"}  # not of a rank without one
HOLD_TIME = "handoff_hold_ns"  # of ranks that other servers may fetch from
# RankStatistics.counters name -> the same.
COUNTERS: Mapping[str, tuple[str, str]] = {
    "run_steps": ("steps", "Steps that this rank took part in."),
    "idle_steps": ("idle_steps", "Steps that this rank took part in without a token of its own."),
    "padded_tokens": ("padded_tokens", "Rows without a token, to fill captured steps. 0 on CPU ranks."),
    "overlap_steps": ("overlap_steps", "Steps run as two micro-batches."),
    "normal_steps": ("normal_steps", "Steps that used the exchange of many rows (exchange.mode)."),
    "graph_steps": ("graph_steps", "Steps replayed from a captured graph."),
    "kernels_compiled": ("kernels_compiled", "Kernels compiled during traffic, each while a step waited."),
    "kv_saved_bytes": ("kv_host_saved_bytes", "Bytes of KV blocks copied to the host tier."),
    "kv_loaded_bytes": ("kv_host_loaded_bytes", "Bytes of KV blocks that came back from the host tier."),
    "kv_lost_tokens": (
        "recovery_copied_tokens",
        "Tokens that were not run again after the loss of a rank: their KV came from its memory.",
    ),
    "handoff_ns": ("kv_handoff_seconds", "Time that KV blocks took to arrive from other servers."),
    HOLD_TIME: ("kv_handoff_hold_seconds", "Time that KV blocks were held, of holds that have ended."),
    "moe_layers": ("moe_layers", "MoE layers whose time was measured."),
    "moe_layer_ns": ("moe_layer_seconds", "Time of these layers, from router to residual, as ranks saw it."),
    "parks": ("parks", "Times the group went to sleep because nobody had work."),
    "tokens": ("step_tokens", "Tokens computed, in prefill and decode."),
    "exchange_tokens": ("comm_tokens", "Tokens passed to dispatch, once per MoE layer."),
    "exchange_rows": ("comm_rows", "Rows that dispatch received, one per token and receiving rank."),
    "exchange_sleeps": ("comm_sleeps", "Waits for a peer that spun for a while and then slept."),
}
# Kind of a counter "<kind>/<label>" -> (family without prefix, help, label). An op has a mode too.
LABELLED: Mapping[str, tuple[str, str, str]] = {
    "bytes": ("comm_bytes", "Bytes sent to other ranks.", "op"),
    "handoffs": ("kv_handoffs", "Hand-offs of KV blocks to and from other servers that ended.", "result"),
    "handoff_holds": (
        "kv_handoff_holds",
        "Requests whose KV blocks were held for another server, by how that ended.",
        "end",
    ),
    "handoff_fetches": ("kv_handoff_fetches", "Fetches of KV from other servers that began.", "path"),
    "handoff_bytes": ("kv_handoff_bytes", "Bytes of KV that moved between servers.", "direction"),
}
# Histogram name or kind -> (family without prefix, help, labels beside rank).
HISTOGRAMS: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "comm": (
        "comm_latency_seconds",
        "Duration of one part of one operation between ranks.",
        ("op", "mode", "part"),
    ),
    "step": ("step_seconds", "Duration of one phase of one step.", ("phase",)),
    "request/queue": ("request_queue_seconds", "From arrival at the rank to a request's first step.", ()),
}


def _with(field: str, ranks: Iterable[RankStatistics]) -> Iterator[RankStatistics]:
    """The ranks that a field of RankLoad says something about."""
    if field in OF_HOST_TIER:
        return (rank for rank in ranks if rank.load.host_blocks_total)
    if field == "kv_blocks_held":
        return (rank for rank in ranks if HOLD_TIME in rank.counters)
    return iter(ranks)


@dataclass(frozen=True, eq=False, slots=True)
class RankLoads(Collector):
    """Those of a RankCollector's families that endpoint pickers ask for, many times a second."""

    ranks: RankCollector

    def collect(self) -> Iterator[Metric]:
        """One pass over all ranks."""
        return self.ranks.loads()


class RankCollector(Collector):
    """The latest report of every rank, as metrics. Reports come from one thread, scrapes from any."""

    def __init__(self, prefix: str = "epserver_", *, summary: bool = False) -> None:
        """summary: one histogram and one wait per peer for all ranks together, under rank="all"."""
        self._prefix = prefix
        self._summary = summary
        self._lock = threading.Lock()
        self._up: dict[int, bool] = {}
        self._latest: dict[int, RankStatistics] = {}
        self._intervals: dict[int, Interval] = {}
        self.queues: Callable[[], Sequence[RankQueue]] = tuple  # newer than the reports, once ranks are warm

    def set_up(self, rank: int, up: bool | None) -> None:
        """A rank is ready and counts from 0 again, or was lost; None: it is absent and has no numbers."""
        with self._lock:
            if up is not False:
                self._latest.pop(rank, None)
                self._intervals.pop(rank, None)
            self._up.pop(rank, None)
            if up is not None:
                self._up[rank] = up

    def update(self, statistics: RankStatistics) -> None:
        """Replaces a rank's numbers. A report without a new step keeps the interval of the last one."""
        with self._lock:
            last = self._latest.get(statistics.rank, RankStatistics(statistics.rank))
            if statistics.load.steps > last.load.steps:
                self._intervals[statistics.rank] = Interval(last, statistics)
            self._latest[statistics.rank] = statistics

    def latest(self) -> tuple[dict[int, bool], dict[int, RankStatistics]]:
        """(up, last report) by rank; copies."""
        with self._lock:
            return dict(self._up), dict(self._latest)

    def loads(self) -> Iterator[Metric]:
        """The queue and the KV cache of every rank alone."""
        _, latest = self.latest()
        ranks = [latest[rank] for rank in sorted(latest)]
        yield from self._queues(ranks)
        yield self._load_gauge("kv_blocks_total", ranks)
        yield self._usage(ranks)

    def collect(self) -> Iterator[Metric]:
        """One pass over all ranks."""
        with self._lock:
            up = dict(self._up)
            ranks = [self._latest[rank] for rank in sorted(self._latest)]
            intervals = [self._intervals[rank] for rank in sorted(self._intervals)]
        measured = [added(ranks)] if self._summary and ranks else ranks
        families = (  # each is made after the previous one was written: none takes long
            [self._ups(up)],
            self._loads(ranks),
            self._counters(ranks),
            self._histograms(measured),
            (make(given) for make, given in ((self._peer_waits, measured), (self._expert_tokens, ranks))),
            self._interval_gauges(intervals),
        )
        yield from (family for family in chain(*families) if family.samples)

    def _ups(self, up: Mapping[int, bool]) -> Metric:
        family = GaugeMetricFamily(
            f"{self._prefix}ep_rank_up", "1 while the rank belongs to the group.", labels=["rank"]
        )
        for rank in sorted(up):
            family.add_metric([str(rank)], float(up[rank]))
        return family

    def _loads(self, ranks: Iterable[RankStatistics]) -> Iterator[Metric]:
        yield from self._queues(ranks)
        for field in LOAD_GAUGES:
            yield self._load_gauge(field, ranks)
        yield self._usage(ranks)
        for field, (name, help) in LOAD_COUNTERS.items():
            counter = CounterMetricFamily(self._prefix + name, help, labels=["rank"])
            for rank in _with(field, ranks):
                counter.add_metric([str(rank.rank)], getattr(rank.load, field))
            yield counter

    def _load_gauge(self, field: str, ranks: Iterable[RankStatistics]) -> Metric:
        name, help = LOAD_GAUGES[field]
        gauge = GaugeMetricFamily(self._prefix + name, help, labels=["rank"])
        for rank in _with(field, ranks):
            gauge.add_metric([str(rank.rank)], getattr(rank.load, field))
        return gauge

    def _usage(self, ranks: Iterable[RankStatistics]) -> Metric:
        usage = GaugeMetricFamily(
            f"{self._prefix}kv_cache_usage_ratio",
            "Share of a rank's KV blocks that sequences use; without kv_blocks_held.",
            labels=["rank"],
        )
        for rank in ranks:
            usage.add_metric([str(rank.rank)], _usage(rank.load))
        return usage

    def _queues(self, ranks: Iterable[RankStatistics]) -> Iterator[Metric]:
        running = GaugeMetricFamily(
            f"{self._prefix}rank_running", "Sequences in prefill or decode on this rank.", labels=["rank"]
        )
        queued = GaugeMetricFamily(
            f"{self._prefix}queue_depth", "Requests in the queue of this rank.", labels=["rank"]
        )
        reported = {rank.rank: RankQueue(rank.load.running, rank.load.waiting) for rank in ranks}
        for number, queue in sorted((reported | dict(enumerate(self.queues()))).items()):
            running.add_metric([str(number)], queue.running)
            queued.add_metric([str(number)], queue.queued)
        yield from (running, queued)

    def _counters(self, ranks: Iterable[RankStatistics]) -> Iterator[Metric]:
        for key, (name, help) in COUNTERS.items():
            counter = CounterMetricFamily(self._prefix + name, help, labels=["rank"])
            for rank in ranks:
                if key in rank.counters:
                    value = rank.counters[key] * (NANO if key.endswith("_ns") else 1)
                    counter.add_metric([str(rank.rank)], value)
            yield counter
        labelled = {
            kind: CounterMetricFamily(
                self._prefix + name, help, labels=["rank", label, *(["mode"] if label == "op" else ())]
            )
            for kind, (name, help, label) in LABELLED.items()
        }
        for rank in ranks:
            for key, value in sorted(rank.counters.items()):
                kind, _, label = key.partition("/")
                if label and value and kind in labelled:
                    labels = op_and_mode(label) if LABELLED[kind][2] == "op" else (label,)
                    labelled[kind].add_metric([str(rank.rank), *labels], value)
        yield from labelled.values()

    def _histograms(self, ranks: Iterable[RankStatistics]) -> Iterator[Metric]:
        families = {
            key: HistogramMetricFamily(self._prefix + name, help, labels=["rank", *labels])
            for key, (name, help, labels) in HISTOGRAMS.items()
        }
        for rank in ranks:
            for name, buckets in sorted(rank.histograms.items()):
                op, _, part = name.partition("/")
                if name in families:
                    family, labels = families[name], []
                elif op == "step":
                    family, labels = families["step"], [part]
                else:
                    family, labels = families["comm"], [*op_and_mode(op), part]
                if any(buckets):
                    total = rank.sums.get(name, 0) * NANO
                    family.add_metric([label(rank), *labels], prometheus_buckets(buckets), total)
        yield from families.values()

    def _peer_waits(self, ranks: Iterable[RankStatistics]) -> Metric:
        family = CounterMetricFamily(
            f"{self._prefix}comm_peer_wait_seconds",
            "Time that rank waited for peer.",
            labels=["rank", "peer", "op", "mode"],
        )
        for rank in ranks:
            for (op, peer), waited in sorted(rank.peer_wait_ns.items()):
                if waited and peer != rank.rank:
                    family.add_metric([label(rank), str(peer), *op_and_mode(op)], waited * NANO)
        return family

    def _expert_tokens(self, ranks: list[RankStatistics]) -> Metric:
        family = CounterMetricFamily(
            f"{self._prefix}expert_tokens",
            'Tokens that an expert received. expert="all" beyond 512 experts and in summaries.',
            labels=["rank", "expert"],
        )
        most = 0 if self._summary else MAX_EXPERT_SERIES
        single = sum(len(rank.expert_tokens) for rank in ranks) <= most
        for rank in ranks:
            counted = rank.expert_tokens if single else {"all": sum(rank.expert_tokens.values())}
            for expert, number in counted.items():
                family.add_metric([str(rank.rank), str(expert)], number)
        return family

    def _interval_gauges(self, intervals: list[Interval]) -> Iterator[Metric]:
        even = GaugeMetricFamily(
            f"{self._prefix}expert_balancedness",
            "Tokens received in the last report interval: mean over maximum. 1 is even.",
            labels=["scope"],
        )
        if (balances := expert_balance(intervals)) is not None:
            for scope, value in zip(("rank", "expert"), balances, strict=True):
                even.add_metric([scope], value)
        yield even
        yield GaugeMetricFamily(
            f"{self._prefix}step_skew_seconds",
            "How much longer the earliest rank waits in the vote than the latest, per step, last interval.",
            value=step_skew(intervals),
        )
        overlap = GaugeMetricFamily(
            f"{self._prefix}overlap_ratio",
            "Share of the time of dispatch and combine in which the rank did not wait, last interval.",
            labels=["rank"],
        )
        for interval in intervals:
            if (ratio := overlap_ratio(interval)) is not None:
                overlap.add_metric([str(interval.now.rank)], ratio)
        yield overlap


ALL_RANKS = -1
WAY_SECONDS = 0.0002


def give_way() -> None:
    """Lets the event loop run. Otherwise a scrape would hold the interpreter for 5 ms at a time."""
    time.sleep(WAY_SECONDS)


def label(rank: RankStatistics) -> str:
    """The value of the label `rank`."""
    return "all" if rank.rank == ALL_RANKS else str(rank.rank)


def added(ranks: Sequence[RankStatistics]) -> RankStatistics:
    """Histograms, their sums and waits of all ranks together; a rank does not wait for itself."""
    histograms: dict[str, tuple[int, ...]] = {}
    sums: Counter[str] = Counter()
    waits: Counter[tuple[str, int]] = Counter()
    for rank in ranks:
        give_way()
        for name, counts in rank.histograms.items():
            both = zip_longest(histograms.get(name, ()), counts, fillvalue=0)
            histograms[name] = tuple(before + more for before, more in both)
        sums.update(rank.sums)
        waits.update({key: ns for key, ns in rank.peer_wait_ns.items() if key[1] != rank.rank})
    return RankStatistics(ALL_RANKS, histograms=histograms, sums=dict(sums), peer_wait_ns=dict(waits))


def prometheus_buckets(buckets: Sequence[int]) -> list[tuple[str, float]]:
    """Log2 nanosecond buckets as cumulative (upper edge in seconds, count), ending with +Inf.

    A duration equal to an edge counts in the bucket above it. Edges are 1 us and more, so that is negligible.
    """
    edges, total = [], 0
    for exponent, count in enumerate(buckets):
        total += count
        if FIRST_EDGE <= exponent + 1 <= LAST_EDGE:
            edges.append((_edge(exponent + 1), float(total)))
    edges.extend(
        (_edge(edge), float(total)) for edge in range(max(FIRST_EDGE, len(buckets) + 1), LAST_EDGE + 1)
    )
    return [*edges, ("+Inf", float(total))]


def _edge(exponent: int) -> str:
    return repr(2**exponent / 1e9)


def _usage(load: RankLoad) -> float:
    used = load.kv_blocks_used - load.kv_blocks_held
    return used / load.kv_blocks_total if load.kv_blocks_total else 0.0
