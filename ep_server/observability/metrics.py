"""Prometheus metrics of the server.

`ServerMetrics` is an EngineObserver and counts the engine's events; measurements of the ranks arrive
through `RankCollector`. Every name begins with `epserver_`, durations are seconds, and labels are bounded
(never a request id). Each server gets its own registry, so several servers in one process do not mix.
"""

from __future__ import annotations

import platform
import time
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
)
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.samples import Sample

from ep_server.engine.observer import RankQueue, RecoveryPhase, RequestSummary
from ep_server.observability.network_metrics import Cluster, NetworkCollector
from ep_server.observability.rank_metrics import RankCollector, RankLoads
from ep_server.observability.status_history import Snapshot
from ep_server.records import LossCause, RankReady, RankStatistics

PREFIX = "epserver_"
# Edges of the request histograms, seconds; those of dispatch and combine double from 1 us (rank_metrics).
REQUEST_EDGES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKEN_EDGES = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)
LENGTH_EDGES = tuple(float(1 << power) for power in range(0, 18))
# Statuses that are the server's fault. Their series start at 0: if a series starts with its first error,
# Prometheus does not count that error.
FAULTS = ("DEADLINE_EXCEEDED", "INTERNAL", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "UNKNOWN")


class _BalanceMetrics:
    """Of the balance of experts. The arguments make a metric from name, help and labels."""

    def __init__(self, gauge: Callable[..., Gauge], counter: Callable[..., Counter]) -> None:
        self.imbalance = gauge(
            "expert_imbalance",
            "Rows of the most loaded rank over the mean, in the last period of the balance. layers: all, or "
            "the worst one.",
            ("layers",),
        )
        self.placements = counter("expert_placements", "Changes of the placement of experts, for balance.")
        self.moves = counter(
            "expert_moves", "Experts of a layer that ranks loaded into other slots, for balance."
        )


class ServerMetrics:
    """Implements observer.EngineObserver. Called in the event loop; scrapes run in other threads."""

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        model: str,
        version: str,
        max_queue: int,
        nodes: int = 1,
        ranks_per_node: int = 1,
        summary: bool = False,
    ) -> None:
        """model, version: of build_info. max_queue: SchedulerConfig.max_queue.

        nodes, ranks_per_node: of this server. summary: as in RankCollector.
        """
        disable_created_metrics()  # type: ignore[no-untyped-call]  # process-wide; no query reads these series
        self._ranks = RankCollector(PREFIX, summary=summary)
        registry.register(self._ranks)
        if nodes > 1:
            cluster = Cluster(nodes, ranks_per_node)
            registry.register(NetworkCollector(PREFIX, cluster, lambda: self._ranks.latest()[1]))
        ProcessCollector(registry=registry)
        export_node(registry, 0, nodes, version)

        def counter(name: str, help: str, labels: Iterable[str] = ()) -> Counter:
            return Counter(PREFIX + name, help, labels, registry=registry)

        def gauge(name: str, help: str, labels: Iterable[str] = ()) -> Gauge:
            return Gauge(PREFIX + name, help, labels, registry=registry)

        def histogram(name: str, help: str, edges: tuple[float, ...] = REQUEST_EDGES) -> Histogram:
            return Histogram(PREFIX + name, help, buckets=edges, registry=registry)

        build = gauge("build_info", "Always 1. The labels say what runs.", ("version", "model", "python"))
        build.labels(version, model, platform.python_version()).set(1)
        gauge("queue_limit", "Requests that may wait before new ones are refused.").set(max_queue)
        self._block_size = gauge("kv_block_size", "Tokens in one KV block.")
        self.loads = CollectorRegistry()  # what of `registry` endpoint pickers read
        self.loads.register(RankLoads(self._ranks))
        self.loads.register(self._block_size)
        self._running = gauge("requests_running", "Requests that have at least one token.")
        self._waiting = gauge("requests_waiting", "Requests without a token yet.")
        self._unread = gauge("requests_unread", "Ended sequences whose caller has not read them to the end.")
        self._unread_ended = counter(
            "unread_ended",
            "Ended sequences dropped unread, by grpc.unread_seconds or Abort.",
        )
        self._admitted = counter("requests_admitted", "Requests assigned to a rank.")
        self._requests = counter(
            "requests",
            "Requests ended or refused, by gRPC status and, if that is OK, by finish reason. "
            "slow_reader: the caller read too slowly.",
            ("status", "finish_reason"),
        )
        for status in FAULTS:
            self._requests.labels(status, "")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of admitted requests.")
        self._generated_tokens = counter("generated_tokens", "Tokens generated for requests.")
        self._accept_wait = histogram(
            "accept_wait_seconds",
            "From the arrival of a Generate call to its acceptance, measured by probes.",
        )
        self._first_token = histogram("time_to_first_token_seconds", "From admission to the first token.")
        self._token_gap = histogram(
            "inter_token_latency_seconds", "Time between two tokens of one request.", TOKEN_EDGES
        )
        self._end_to_end = histogram("request_seconds", "From admission to the end, with any status.")
        self._prefill = histogram("request_prefill_seconds", "From the first step to the first token.")
        self._decode = histogram("request_decode_seconds", "From the first token to the end.")
        self._inference = histogram("request_inference_seconds", "From the first step to the end.")
        self._token_time = histogram(
            "request_token_seconds", "Mean time of a request's tokens after the first.", TOKEN_EDGES
        )
        self._recovery = histogram(
            "recovery_seconds", "From the loss of a rank until its requests are at new ranks."
        )
        self._recovery_phase = Histogram(
            PREFIX + "recovery_phase_seconds",
            "Parts of a recovery; all but detect overlap. detect: from the first sign of a loss until it is "
            "reported. regroup: until all ranks serve again. load: the slowest new "
            "process. first_token: until a request continues. prefill: from regroup until all continue.",
            ("phase",),
            buckets=REQUEST_EDGES,
            registry=registry,
        )
        for phase in RecoveryPhase:
            self._recovery_phase.labels(phase)
        self._losses = counter(
            "rank_losses",
            "Losses of a rank. cause: signal, exit (a code, no message), exception, cuda, hang or node.",
            ("rank", "cause"),
        )
        self._generation = gauge("generation", "Starts at 1; each recovery adds 1.")
        self._generation.set(1)
        self._live = gauge("live_ranks", "Ranks that serve, if they can go on without a lost one; else 0.")
        self._lacking = gauge(
            "rank_loss_lacking_bytes",
            "Memory that CPU ranks lack for spare expert slots, to go on without any one of them. "
            "0: any one rank may be lost now.",
        )
        self._balance = _BalanceMetrics(gauge, counter)
        self._recovered = counter("requests_recovered", "Requests that continued after the loss of a rank.")
        self._freed = histogram("cancel_to_free_seconds", "From a cancel until the KV blocks are free.")
        self._prompt_length = histogram("request_prompt_tokens", "Length of prompts.", LENGTH_EDGES)
        self._output_length = histogram(
            "request_output_tokens", "Length of outputs at their end.", LENGTH_EDGES
        )

    def look(self) -> Snapshot:
        """The data of the status page. Any thread may call it."""
        up, ranks = self._ranks.latest()
        gaps = [(s.labels["le"], s.value) for s in _samples(self._token_gap) if s.name.endswith("_bucket")]
        return Snapshot(
            at=time.monotonic(),
            generated=_samples(self._generated_tokens)[0].value,
            running=_samples(self._running)[0].value,
            waiting=_samples(self._waiting)[0].value,
            token_gaps=tuple((float(edge), count) for edge, count in gaps),
            up=up,
            ranks=ranks,
            generation=_samples(self._generation)[0].value,
            recovered=_samples(self._recovered)[0].value,
            losses=self._by_cause(),
        )

    def _by_cause(self) -> dict[str, float]:
        """Losses of all ranks; causes that there were none of are left out."""
        found = Counts[str]()
        for sample in _samples(self._losses):
            found[sample.labels["cause"]] += int(sample.value)
        return {cause: count for cause, count in found.items() if count}

    def on_rank_ready(self, ready: RankReady) -> None:
        """A rank is warm."""
        self._ranks.set_up(ready.rank, True)
        for cause in LossCause:
            self._losses.labels(str(ready.rank), cause)
        self._block_size.set(ready.block_size)

    def on_rank_out(self, rank: int) -> None:
        """A rank is absent."""
        self._ranks.set_up(rank, None)

    def on_queues(self, queues: Callable[[], Sequence[RankQueue]]) -> None:
        """The ranks are warm."""
        self._ranks.queues = queues

    def on_recovered(self, seconds: float, requests: int) -> None:
        """A new group of ranks serves."""
        self._recovery.observe(seconds)
        self._recovered.inc(requests)
        self._generation.inc()

    def on_group(self, live: int, lacking_bytes: int) -> None:
        """Another generation of the ranks serves."""
        self._live.set(live)
        self._lacking.set(lacking_bytes)

    def on_imbalance(self, mean: float, worst: float) -> None:
        """Rows of ranks were counted."""
        self._balance.imbalance.labels("all").set(mean)
        self._balance.imbalance.labels("worst").set(worst)

    def on_experts_moved(self, loads: int) -> None:
        """Another placement is in force."""
        self._balance.placements.inc()
        self._balance.moves.inc(loads)

    def on_recovery_phase(self, phase: RecoveryPhase, seconds: float) -> None:
        """A phase of a recovery ended."""
        self._recovery_phase.labels(phase).observe(seconds)

    def on_rank_lost(self, rank: int, cause: LossCause) -> None:
        """A rank is lost."""
        self._ranks.set_up(rank, False)
        self._losses.labels(str(rank), cause).inc()

    def on_statistics(self, statistics: RankStatistics) -> None:
        """A rank's cumulative measurements."""
        self._ranks.update(statistics)

    def on_admitted(self, prompt_tokens: int) -> None:
        """A request was assigned to a rank."""
        self._admitted.inc()
        self._prompt_tokens.inc(prompt_tokens)
        self._prompt_length.observe(prompt_tokens)

    def on_refused(self, status: str) -> None:
        """A request was refused before it reached a rank."""
        self._requests.labels(status, "").inc()

    def on_accept_wait(self, seconds: float) -> None:
        """How long a call waited to be accepted."""
        self._accept_wait.observe(seconds)

    def on_first_token(self, seconds: float) -> None:
        """The first token of a request, `seconds` after admission."""
        self._first_token.observe(seconds)
        self._generated_tokens.inc()

    def on_token_gap(self, seconds: float) -> None:
        """A further token of a request, `seconds` after the one before."""
        self._token_gap.observe(seconds)
        self._generated_tokens.inc()

    def on_finished(self, summary: RequestSummary) -> None:
        """A request ended, with or without an error."""
        self._requests.labels(summary.status, summary.reason).inc()
        self._end_to_end.observe(summary.seconds)
        self._output_length.observe(summary.output_tokens)
        if summary.first_token_seconds is not None:
            self._prefill.observe(summary.first_token_seconds - summary.queued_seconds)
            self._decode.observe(summary.seconds - summary.first_token_seconds)
            self._inference.observe(summary.seconds - summary.queued_seconds)
            if summary.output_tokens > 1:
                decode = summary.seconds - summary.first_token_seconds
                self._token_time.observe(decode / (summary.output_tokens - 1))

    def on_freed(self, seconds: float) -> None:
        """The KV blocks of a cancelled request are free."""
        self._freed.observe(seconds)

    def on_unread_ended(self) -> None:
        """An ended request was dropped unread."""
        self._unread_ended.inc()

    def on_load(self, running: int, waiting: int, unread: int) -> None:
        """Requests in flight with and without a first token, and ended but not read."""
        self._running.set(running)
        self._waiting.set(waiting)
        self._unread.set(unread)


def export_node(registry: CollectorRegistry, node: int, nodes: int, version: str) -> None:
    """node_info of this process, which runs node `node` of `nodes`; 0 leads."""
    help = "Always 1. The labels say which node of the server this is."
    info = Gauge(PREFIX + "node_info", help, ("node", "nodes", "role", "version"), registry=registry)
    info.labels(str(node), str(nodes), "follower" if node else "leader", version).set(1)


def _samples(metric: Counter | Gauge | Histogram) -> list[Sample]:
    (family,) = metric.collect()
    return family.samples
