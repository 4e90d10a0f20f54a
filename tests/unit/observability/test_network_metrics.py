"""What passed between nodes, as a scrape shows it: compared with sums over pairs of ranks."""

from __future__ import annotations

import itertools
import random

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from ep_server.observability.metrics import ServerMetrics
from ep_server.records import RankStatistics
from tests.support.observability.reports import Series, series, value

NODES, PER_NODE = 3, 4
RANKS = range(NODES * PER_NODE)


def node(rank: int) -> int:
    return rank // PER_NODE


def nic(rank: int) -> str:
    """Two ranks share one."""
    return f"mlx5_{rank % PER_NODE // 2}"


def drawn(seed: int) -> tuple[dict[int, RankStatistics], dict[str, dict[tuple[int, int], int]]]:
    """A report of each rank, and what is in them by (rank, peer)."""
    draw = random.Random(seed)
    pairs = [(rank, peer) for rank, peer in itertools.product(RANKS, RANKS) if rank != peer]
    far = [(rank, peer) for rank, peer in pairs if node(rank) != node(peer)]
    made = {kind: {pair: draw.randrange(1000) for pair in far} for kind in ("bytes", "retries")}
    waits = {op: {pair: draw.randrange(10**9) for pair in pairs} for op in ("dispatch", "combine")}
    reports = {
        rank: RankStatistics(
            rank,
            counters={
                f"network_{kind}/{peer}/{nic(rank)}": made[kind][rank, peer]
                for kind in made
                for peer in RANKS
                if (rank, peer) in made[kind]
            },
            peer_wait_ns={
                (op, peer): waits[op].get((rank, peer), 77) for op in waits for peer in RANKS
            },  # 77: for itself
        )
        for rank in RANKS
    }
    made["wait"] = {pair: sum(waits[op][pair] for op in waits) for pair in pairs}
    return reports, made


def scraped(reports: dict[int, RankStatistics], nodes: int = NODES, per_node: int = PER_NODE) -> Series:
    registry = CollectorRegistry()
    metrics = ServerMetrics(
        registry, model="m", version="1", max_queue=9, nodes=nodes, ranks_per_node=per_node, summary=True
    )
    for report in reports.values():
        metrics.on_statistics(report)
    return series(generate_latest(registry).decode())


def test_pairs_of_nodes_have_the_sums_of_their_ranks() -> None:
    reports, made = drawn(1)
    found = scraped(reports)
    for one, other in itertools.permutations(range(NODES), 2):
        labels = {"node": str(one), "peer_node": str(other)}
        for kind, name, scale in (
            ("bytes", "bytes_total", 1),
            ("retries", "retries_total", 1),
            ("wait", "wait_seconds_total", 1e-9),
        ):
            wanted = sum(
                n for (rank, peer), n in made[kind].items() if (node(rank), node(peer)) == (one, other)
            )
            assert value(found, f"epserver_network_{name}", **labels) == pytest.approx(wanted * scale)


def test_nics_have_bytes_retries_and_mean_waits_of_their_ranks() -> None:
    reports, made = drawn(2)
    found = scraped(reports)
    for one, domain in itertools.product(range(NODES), ("mlx5_0", "mlx5_1")):
        labels = {"node": str(one), "domain": domain}
        ranks = {rank for rank in RANKS if (node(rank), nic(rank)) == (one, domain)}
        retries = sum(n for (rank, _), n in made["retries"].items() if rank in ranks)
        assert value(found, "epserver_nic_retries_total", **labels) == retries
        for direction, at in (("send", 0), ("receive", 1)):
            number = sum(n for pair, n in made["bytes"].items() if pair[at] in ranks)
            assert value(found, "epserver_nic_bytes_total", direction=direction, **labels) == number
        for (direction, at), same in itertools.product((("receive", 0), ("send", 1)), (True, False)):
            waits = [
                ns
                for pair, ns in made["wait"].items()
                if pair[at] in ranks and (node(pair[0]) == node(pair[1])) == same
            ]
            labels["peers"] = "same_node" if same else "other_nodes"
            mean = value(found, "epserver_nic_wait_seconds_total", direction=direction, **labels)
            assert mean == pytest.approx(sum(waits) / len(waits) * 1e-9)
            del labels["peers"]


def test_many_pairs_of_nodes_become_one_per_node() -> None:
    reports = {
        rank: RankStatistics(
            rank, counters={f"network_bytes/{peer}/efa_0": 1 for peer in range(24) if peer != rank}
        )
        for rank in range(24)
    }
    found = scraped(reports, nodes=24, per_node=1)
    assert value(found, "epserver_network_bytes_total", node="5", peer_node="all") == 23
    assert len([name for name, _ in found if name == "epserver_network_bytes_total"]) == 24


def test_a_server_of_one_node_has_no_network() -> None:
    reports, _ = drawn(3)
    assert not [name for name, _ in scraped(reports, nodes=1) if "network" in name or "nic" in name]
