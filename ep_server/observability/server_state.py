"""State, capacity, memory and certificates of a server, read when Prometheus scrapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ep_server.engine.engine import Engine, EngineState, live_nodes
from ep_server.observability.metrics import PREFIX

# As operators call them.
STATES: Mapping[EngineState, str] = {
    EngineState.STARTING: "loading",
    EngineState.SERVING: "serving",
    EngineState.DRAINING: "draining",
    EngineState.RECOVERING: "degraded",
    EngineState.LOST: "lost",
    EngineState.STOPPED: "stopped",
}
MEMORY = {  # kind -> field of RankReady
    "weights": "weight_bytes",
    "kv": "kv_bytes",
    "kv_host": "kv_host_bytes",
    "exchange": "exchange_bytes",
}


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """expiry: Unix time by file. refused: changes that could not be used."""

    expiry: Mapping[str, float]
    refused: int


@dataclass(frozen=True, eq=False, slots=True)
class ServerState(Collector):
    """Called from threads of scrapes. tls: of the public port; None without TLS or before it is open.

    nodes, ranks_per_node: as configured.
    """

    engine: Engine
    max_running: int  # of one rank
    tls: Callable[[], TlsFiles | None]
    nodes: int = 1
    ranks_per_node: int = 0

    def collect(self) -> Iterator[Metric]:
        """One pass."""
        yield self._state()
        yield from self._capacity()
        yield self._memory()
        if self.nodes > 1:
            ready = list(self.engine.ready)
            out = self.nodes - live_nodes(ready, self.ranks_per_node) if ready else 0
            help = "Nodes that the server goes on without: lost, or stopped in order."
            yield GaugeMetricFamily(f"{PREFIX}nodes_out", help, value=out)
        version = self.engine.weights.version
        help = "Version of the weights in force: 0 at the start, one more after each Control.UpdateWeights."
        yield GaugeMetricFamily(f"{PREFIX}weights_version", help, value=version)
        files = self.tls()
        if files is not None:
            yield from _certificates(files)

    def _state(self) -> Metric:
        help = (
            "1 for the state of the server. degraded: a rank was lost and is replaced. lost: the server ends."
        )
        family = GaugeMetricFamily(f"{PREFIX}state", help, labels=["state"])
        now = self.engine.state
        for state, name in STATES.items():
            family.add_metric([name], float(state is now))
        return family

    def _capacity(self) -> Iterator[Metric]:
        limit = self.max_running * (len(self.engine.ready) or self.engine.num_ranks)
        counts = self.engine.statistics()
        help = "Sequences that the ranks run at once: ranks x scheduler.max_running."
        yield GaugeMetricFamily(f"{PREFIX}running_limit", help, value=limit)
        left = max(limit - counts.running - counts.waiting, 0) if counts.state is EngineState.SERVING else 0
        help = "Sequences that would run without waiting, if their KV blocks fit. 0 unless the server serves."
        yield GaugeMetricFamily(f"{PREFIX}capacity_left", help, value=left)

    def _memory(self) -> Metric:
        help = "Memory of a rank, by what it holds."
        family = GaugeMetricFamily(f"{PREFIX}rank_memory_bytes", help, labels=["rank", "kind"])
        for ready in list(self.engine.ready):
            for kind, field in MEMORY.items():
                if kind == "kv_host" and not ready.kv_host_bytes:
                    continue
                family.add_metric([str(ready.rank), kind], getattr(ready, field))
        return family


def _certificates(files: TlsFiles) -> Iterator[Metric]:
    help = "Unix time at which the certificates in use expire: of each file, the first of them."
    expiry = GaugeMetricFamily(f"{PREFIX}tls_expiry_timestamp_seconds", help, labels=["file"])
    for file, seconds in files.expiry.items():
        expiry.add_metric([file], seconds)
    yield expiry
    help = "Changes of TLS files that could not be used; the certificates before stay in use."
    yield CounterMetricFamily(f"{PREFIX}tls_rotations_refused", help, value=files.refused)
