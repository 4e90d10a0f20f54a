"""Metrics and status page of a follower: its process, and the calls that it relays.

Node 0 counts requests, tokens and ranks, once for all nodes. There is no build_info here: that counts
servers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics
from prometheus_client.process_collector import ProcessCollector

from ep_server.observability.metrics import FAULTS, PREFIX, export_node
from ep_server.observability.status_page import in_page, respond


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Node `node` of `nodes`. ranks: global numbers of the ranks here. leader: node 0's host:port."""

    node: int
    nodes: int
    ranks: range
    leader: str
    model: str
    version: str


class NodeMetrics:
    """Implements nodes.relay.RelayObserver. Called in the event loop; scrapes run in other threads."""

    def __init__(self, registry: CollectorRegistry, facts: NodeFacts) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # as ServerMetrics
        ProcessCollector(registry=registry)
        export_node(registry, facts.node, facts.nodes, facts.version)
        open_help = "Open Generate calls that this node passes on to node 0."
        self._open = Gauge(PREFIX + "relayed_streams", open_help, registry=registry)
        ended_help = "Generate calls that this node passed on or refused, by gRPC status."
        self._ended = Counter(PREFIX + "relayed_requests", ended_help, ("status",), registry=registry)
        for status in ("OK", *FAULTS):
            self._ended.labels(status)

    def on_relay_began(self) -> None:
        """A stream was accepted."""
        self._open.inc()

    def on_relay_ended(self, status: str) -> None:
        """A stream ended."""
        self._open.dec()
        self._ended.labels(status).inc()

    def on_relay_refused(self, status: str) -> None:
        """A stream was refused here."""
        self._ended.labels(status).inc()

    def look(self) -> tuple[float, dict[str, float]]:
        """(streams open now, streams ended by status). Any thread may call it."""
        (now,), (ended,) = self._open.collect(), self._ended.collect()
        counts = {s.labels["status"]: s.value for s in ended.samples if s.name.endswith("_total")}
        return now.samples[0].value, counts


class NodePage:
    """The page at / of a follower: its own state, and a link to the rest of the server."""

    def __init__(self, facts: NodeFacts, metrics: NodeMetrics, serving: Callable[[], bool]) -> None:
        """serving: whether the server accepts requests, according to node 0. Any thread may call it."""
        self._facts, self._metrics, self._serving = facts, metrics, serving

    def html(self) -> str:
        """The whole page."""
        facts = self._facts
        state, text = ("good", "serving") if self._serving() else ("wait", "not serving")
        now, ended = self._metrics.look()
        ranks = f"{facts.ranks.start} – {facts.ranks.stop - 1}" if len(facts.ranks) > 1 else facts.ranks.start
        tiles = {
            "node": f"{facts.node} of {facts.nodes}",
            "ranks here": ranks,
            "streams passed on": f"{now:,.0f}",
            "ended well": f"{ended.get('OK', 0):,.0f}",
            "ended otherwise": f"{sum(ended.values()) - ended.get('OK', 0):,.0f}",
        }
        shown = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in tiles.items())
        main = (
            f"<header><div><h1>{escape(facts.model)}</h1><p>ep_server {escape(facts.version)}</p></div>"
            f'<strong class="state {state}">{text}</strong></header>\n<dl class="tiles">{shown}</dl>\n'
            f"<section><h2>Node 0 leads</h2><p>It is at {escape(facts.leader)}; its status page shows "
            f'requests, tokens and all ranks.</p></section>\n<footer><a href="metrics">metrics</a></footer>'
        )
        return in_page(f"{facts.model}, node {facts.node}", main)

    def respond(self, start_response: Callable[..., Any]) -> list[bytes]:
        """Answers a WSGI request."""
        return respond(start_response, self.html())
