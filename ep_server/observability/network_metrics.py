"""Bytes, waits and retries between nodes, per pair of nodes and per NIC, read when Prometheus scrapes.

A NIC is what libfabric calls a domain: "mlx5_0", or "eth0" of the TCP provider. Several ranks of a node may
use one. The counters come from the ranks' reports, under the names of `parse`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from operator import add
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from ep_server.observability.quantiles import NANO
from ep_server.observability.rank_metrics import give_way
from ep_server.records import RankStatistics

KINDS = ("bytes", "retries", "wait")
# Directions of a rank's numbers, at its own NIC and at the peer's: it sends bytes, and waits to receive.
FROM = {"bytes": "send", "retries": "send", "wait": "receive"}
TO = {"bytes": "receive", "retries": "receive", "wait": "send"}
RANKS_AT_ONCE = 8  # that a scrape adds before it lets the event loop run
MAX_PAIR_SERIES = 512  # with more pairs of nodes, one series per node counts all its peers


class Nic(NamedTuple):
    """A domain of a node."""

    node: int
    domain: str


class Link(NamedTuple):
    """From a rank to `peer`, by the NIC `domain`. kind: bytes or retries."""

    kind: str
    peer: int
    domain: str


@lru_cache(maxsize=1 << 16)
def parse(counter: str) -> Link | None:
    """What a counter of RankStatistics counts: "network_bytes/3/mlx5_0"; None = nothing of the network."""
    kind, _, rest = counter.partition("/")
    if not kind.startswith("network_"):
        return None
    peer, _, domain = rest.partition("/")
    return Link(kind.removeprefix("network_"), int(peer), domain)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Node n has the ranks from n * ranks_per_node on."""

    nodes: int
    ranks_per_node: int

    def node_of(self, rank: int) -> int:
        """The node that a rank runs on."""
        return rank // self.ranks_per_node

    def ranks_of(self, node: int) -> slice:
        """The ranks of a node, in a list of all ranks."""
        return slice(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)

    @property
    def ranks(self) -> int:
        """Of all nodes."""
        return self.nodes * self.ranks_per_node


class Row:
    """What one rank has by peer: bytes and retries of its NIC, and its waits in ns. 0 for itself."""

    def __init__(self, rank: RankStatistics, ranks: int) -> None:
        self.domain: str | None = None
        self.values = {kind: [0] * ranks for kind in KINDS}
        for counter, number in rank.counters.items():
            if (link := parse(counter)) is not None:
                self.domain = link.domain
                self.values[link.kind][link.peer] = number
        waits = self.values["wait"]
        for (_, peer), ns in rank.peer_wait_ns.items():
            waits[peer] += ns
        waits[rank.rank] = 0


class Traffic:
    """Sums over ranks that have a NIC.

    pairs: by (kind, node, peer node). nics: by (kind, direction, same, NIC). same: peers are on that node.
    """

    def __init__(self, cluster: Cluster, reports: Mapping[int, RankStatistics]) -> None:
        self._cluster = cluster
        self.pairs: Counter[tuple[str, int, int]] = Counter()
        self.nics: Counter[tuple[str, str, bool, Nic]] = Counter()
        self.nic_of: dict[int, Nic] = {}
        # By (kind, same): what others have for each rank.
        columns = {(kind, same): [0] * cluster.ranks for kind in KINDS for same in (True, False)}
        for rank, report in reports.items():
            row = Row(report, cluster.ranks)
            if row.domain is not None:
                self.nic_of[rank] = Nic(cluster.node_of(rank), row.domain)
                for kind, values in row.values.items():
                    self._add(kind, self.nic_of[rank], values, columns)
            if rank % RANKS_AT_ONCE == 0:
                give_way()
        for (kind, same), column in columns.items():
            for rank, nic in self.nic_of.items():
                self.nics[kind, TO[kind], same, nic] += column[rank]

    def of_nic(self, kind: str, direction: str, nic: Nic) -> int:
        """All peers together."""
        return sum(self.nics[kind, direction, same, nic] for same in (True, False))

    def _add(
        self, kind: str, nic: Nic, values: list[int], columns: dict[tuple[str, bool], list[int]]
    ) -> None:
        here = self._cluster.ranks_of(nic.node)
        for node in range(self._cluster.nodes):
            self.pairs[kind, nic.node, node] += sum(values[self._cluster.ranks_of(node)])
        near = sum(values[here])
        self.nics[kind, FROM[kind], True, nic] += near
        self.nics[kind, FROM[kind], False, nic] += sum(values) - near
        own = columns[kind, True]
        own[here] = map(add, own[here], values[here])
        others = [*values]
        others[here] = [0] * self._cluster.ranks_per_node
        columns[kind, False][:] = map(add, columns[kind, False], others)


@dataclass(frozen=True, eq=False, slots=True)
class NetworkCollector(Collector):
    """Of a server of several nodes. latest: the last report of each rank; any thread may call it."""

    prefix: str
    cluster: Cluster
    latest: Callable[[], Mapping[int, RankStatistics]]

    def collect(self) -> Iterator[Metric]:
        """One pass over all ranks; nothing until they have used a network."""
        traffic = Traffic(self.cluster, self.latest())
        if traffic.nic_of:
            yield from self._pairs(traffic)
            yield from self._nics(traffic)
            yield self._waits(traffic)

    def _pairs(self, traffic: Traffic) -> Iterator[Metric]:
        nodes = self.cluster.nodes
        one = nodes * (nodes - 1) <= MAX_PAIR_SERIES
        for kind, name, help, unit in (
            ("bytes", "network_bytes", "Bytes that ranks of node wrote to ranks of peer_node.", 1),
            (
                "wait",
                "network_wait_seconds",
                "Time that ranks of node waited for ranks of peer_node, added up over pairs of ranks.",
                NANO,
            ),
            ("retries", "network_retries", "Writes that waited because the NIC had no room for them.", 1),
        ):
            found: Counter[tuple[str, str]] = Counter()
            for (of, node, peer), number in traffic.pairs.items():
                if of == kind and (node != peer or number):
                    found[str(node), str(peer) if one else "all"] += number
            family = CounterMetricFamily(self.prefix + name, help, labels=["node", "peer_node"])
            yield _filled(family, ((labels, number * unit) for labels, number in found.items()))

    def _nics(self, traffic: Traffic) -> Iterator[Metric]:
        sent = CounterMetricFamily(
            f"{self.prefix}nic_bytes",
            "Bytes that the ranks at a NIC wrote through it (send), or that were written to them (receive).",
            labels=["node", "domain", "direction"],
        )
        retries = CounterMetricFamily(
            f"{self.prefix}nic_retries",
            "Writes that waited because this NIC had no room for them.",
            labels=["node", "domain"],
        )
        for nic in sorted(set(traffic.nic_of.values())):
            at = [str(nic.node), nic.domain]
            for direction in ("send", "receive"):
                sent.add_metric([*at, direction], traffic.of_nic("bytes", direction, nic))
            retries.add_metric(at, traffic.of_nic("retries", "send", nic))
        yield sent
        yield retries

    def _waits(self, traffic: Traffic) -> Metric:
        """Means over pairs, so that NICs compare and each is a share of the time."""
        ranks_at = Counter(traffic.nic_of.values())
        there = {True: self.cluster.ranks_per_node - 1}
        there[False] = self.cluster.ranks_per_node * (self.cluster.nodes - 1)
        family = CounterMetricFamily(
            f"{self.prefix}nic_wait_seconds",
            "Time that peers waited for a rank at this NIC (send), or such a rank for its peers (receive). "
            "Mean over pairs of ranks.",
            labels=["node", "domain", "direction", "peers"],
        )
        means = (
            (
                (str(nic.node), nic.domain, direction, "same_node" if same else "other_nodes"),
                ns * NANO / (ranks_at[nic] * there[same]),
            )
            for (kind, direction, same, nic), ns in traffic.nics.items()
            if kind == "wait" and there[same]
        )
        return _filled(family, means)


def _filled(
    family: CounterMetricFamily, samples: Iterable[tuple[tuple[str, ...], float]]
) -> CounterMetricFamily:
    for labels, value in sorted(samples):
        family.add_metric(labels, value)
    return family
