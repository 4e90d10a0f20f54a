"""What a node that does not lead exports: its own calls, and nothing that node 0 counts too."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

from ep_server.config import MetricsConfig
from ep_server.observability.metrics import ServerMetrics
from ep_server.observability.metrics_endpoint import MetricsEndpoint
from ep_server.observability.node_metrics import NodeFacts, NodeMetrics, NodePage

FACTS = NodeFacts(1, 3, range(2, 4), "moe-0.moe:50061", "model & co", "1.2.3")


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> NodeMetrics:
    return NodeMetrics(registry, FACTS)


def test_streams_are_counted_while_open_and_by_their_end(
    registry: CollectorRegistry, metrics: NodeMetrics
) -> None:
    for _ in range(3):
        metrics.on_relay_began()
    metrics.on_relay_ended("OK")
    metrics.on_relay_ended("CANCELLED")
    metrics.on_relay_refused("RESOURCE_EXHAUSTED")
    assert registry.get_sample_value("epserver_relayed_streams") == 1
    counts = {
        status: registry.get_sample_value("epserver_relayed_requests_total", {"status": status})
        for status in ("OK", "CANCELLED", "RESOURCE_EXHAUSTED", "UNAVAILABLE")
    }
    assert counts == {"OK": 1, "CANCELLED": 1, "RESOURCE_EXHAUSTED": 1, "UNAVAILABLE": 0}
    assert metrics.look()[0] == 1 and sum(metrics.look()[1].values()) == 3


def test_leader_and_worker_nodes_share_only_process_metrics() -> None:
    leader, follower = CollectorRegistry(), CollectorRegistry()
    ServerMetrics(leader, model="m", version="1", max_queue=9, nodes=3)
    NodeMetrics(follower, FACTS)
    names = [{family.name for family in registry.collect()} for registry in (leader, follower)]
    ours = {name for name in names[0] & names[1] if name.startswith("epserver_")}
    assert ours == {"epserver_node_info"}
    told = [
        next(
            sample.labels
            for family in registry.collect()
            for sample in family.samples
            if "node" in sample.labels
        )
        for registry in (leader, follower)
    ]
    assert [(one["node"], one["nodes"], one["role"]) for one in told] == [
        ("0", "3", "leader"),
        ("1", "3", "follower"),
    ]


@pytest.fixture
def state() -> dict[str, bool]:
    return {"serving": False}


@pytest.fixture
def endpoint(
    registry: CollectorRegistry, metrics: NodeMetrics, state: dict[str, bool]
) -> Iterator[MetricsEndpoint]:
    page = NodePage(FACTS, metrics, lambda: state["serving"])
    endpoint = MetricsEndpoint(MetricsConfig(port=0), registry, page)
    yield endpoint
    endpoint.close()


def test_the_page_says_where_the_leader_is(
    endpoint: MetricsEndpoint, metrics: NodeMetrics, state: dict[str, bool]
) -> None:
    def page() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/", timeout=10) as answer:
            assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
            return str(answer.read().decode())

    assert ">not serving<" in page()
    state["serving"] = True
    metrics.on_relay_began()
    text = page()
    for part in ("moe-0.moe:50061", "<dd>1 of 3</dd>", "<dd>2 – 3</dd>", "model &amp; co", ">serving<"):
        assert part in text
    assert "<dt>streams passed on</dt><dd>1</dd>" in text
