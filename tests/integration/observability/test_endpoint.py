"""What the front sees, over real HTTP: names, formats, ports, ends."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from urllib.request import Request, urlopen

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, make_wsgi_app
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from ep_server.config import MetricsConfig
from ep_server.engine.observer import EngineObserver, RequestSummary
from ep_server.errors import ConfigError, StartupError
from ep_server.frontend.health import Health
from ep_server.observability import metrics_endpoint
from ep_server.observability.metrics import ServerMetrics
from ep_server.observability.metrics_endpoint import MetricsEndpoint, Probes
from ep_server.records import FinishReason, LossCause, RankReady
from tests.support.observability.reports import Series, report, series, value
from tests.support.ports import free_port


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> ServerMetrics:
    return ServerMetrics(registry, model="demo", version="1.2.3", max_queue=9)


@pytest.fixture
def endpoint(registry: CollectorRegistry, metrics: ServerMetrics) -> Iterator[MetricsEndpoint]:
    endpoint = MetricsEndpoint(MetricsConfig(port=0), registry)
    yield endpoint
    endpoint.close()


def get(endpoint: MetricsEndpoint, path: str = "/metrics", accept: str = "") -> tuple[int, str, str]:
    """(status, content type, body)"""
    connection = http.client.HTTPConnection("127.0.0.1", endpoint.port, timeout=10)
    try:
        connection.request("GET", path, headers={"Accept": accept} if accept else {})
        answer = connection.getresponse()
        return answer.status, answer.headers["Content-Type"], answer.read().decode()
    finally:
        connection.close()


def page(endpoint: MetricsEndpoint) -> Series:
    return series(get(endpoint)[2])


def drive(observer: EngineObserver) -> None:
    """One request that ends well, one that is cancelled, one that is refused, on two ranks."""
    for rank in range(2):
        observer.on_rank_ready(RankReady(rank, 100 + rank, 40, 16, 1, 1, 1, 0.1))
        observer.on_statistics(report(rank, 20))
    observer.on_admitted(7)
    observer.on_admitted(5)
    observer.on_load(0, 2, 0)
    observer.on_first_token(0.02)
    for _ in range(3):
        observer.on_token_gap(0.004)
    observer.on_load(1, 1, 3)
    observer.on_unread_ended()
    observer.on_finished(RequestSummary("OK", FinishReason.EOS, 0.5, 7, 0, 4, 0.02, 0.005))
    observer.on_finished(RequestSummary("CANCELLED", "", 0.1, 5, 0, 0))
    observer.on_freed(0.003)
    observer.on_refused("RESOURCE_EXHAUSTED")
    observer.on_accept_wait(0.2)


def test_a_page_holds_what_was_observed(metrics: ServerMetrics, endpoint: MetricsEndpoint) -> None:
    drive(metrics)
    found = page(endpoint)
    assert value(found, "epserver_requests_admitted_total") == 2
    assert value(found, "epserver_requests_total", status="OK", finish_reason="eos") == 1
    assert value(found, "epserver_requests_total", status="CANCELLED", finish_reason="") == 1
    assert value(found, "epserver_requests_total", status="RESOURCE_EXHAUSTED", finish_reason="") == 1
    assert value(found, "epserver_prompt_tokens_total") == 12
    assert value(found, "epserver_generated_tokens_total") == 4
    assert value(found, "epserver_time_to_first_token_seconds_count") == 1
    assert value(found, "epserver_time_to_first_token_seconds_bucket", le="0.025") == 1
    assert value(found, "epserver_inter_token_latency_seconds_count") == 3
    assert value(found, "epserver_inter_token_latency_seconds_sum") == pytest.approx(0.012)
    assert value(found, "epserver_request_seconds_count") == 2
    assert value(found, "epserver_request_prefill_seconds_count") == 1  # the cancelled one never began
    assert value(found, "epserver_request_prefill_seconds_sum") == pytest.approx(0.015)
    assert value(found, "epserver_request_decode_seconds_sum") == pytest.approx(0.48)
    assert value(found, "epserver_queue_limit") == 9 and value(found, "epserver_kv_block_size") == 16
    assert value(found, "epserver_requests_total", status="INTERNAL", finish_reason="") == 0
    assert value(found, "epserver_cancel_to_free_seconds_count") == 1
    assert value(found, "epserver_requests_running") == value(found, "epserver_requests_waiting") == 1
    assert value(found, "epserver_requests_unread") == 3 and value(found, "epserver_unread_ended_total") == 1
    info = [dict(labels) for name, labels in found if name == "epserver_build_info"]
    assert [(each["version"], each["model"]) for each in info] == [("1.2.3", "demo")]
    assert value(found, "epserver_ep_rank_up", rank="1") == 1
    metrics.on_rank_lost(1, LossCause.HANG)
    found = page(endpoint)
    assert value(found, "epserver_ep_rank_up", rank="1") == 0
    cells = [(rank, cause) for rank in ("0", "1") for cause in LossCause]
    losses = {(r, c): value(found, "epserver_rank_losses_total", rank=r, cause=c) for r, c in cells}
    assert losses == {cell: float(cell == ("1", LossCause.HANG)) for cell in cells}
    assert value(found, "epserver_generation") == 1
    metrics.on_recovered(0.5, 7)
    found = page(endpoint)
    assert value(found, "epserver_generation") == 2
    assert value(found, "epserver_requests_recovered_total") == 7
    now = metrics.look()
    assert (now.generation, now.losses, now.recovered) == (2, {"hang": 1}, 7)


def test_names_and_labels_keep_to_the_conventions(metrics: ServerMetrics, endpoint: MetricsEndpoint) -> None:
    drive(metrics)
    of_ranks = {"rank", "peer", "op", "part", "phase", "scope", "expert", "cause", "mode"}
    bounded = of_ranks | {
        "status",
        "finish_reason",
        "le",
        "version",
        "model",
        "python",
        "node",
        "nodes",
        "role",
    }
    for name, labels in page(endpoint):
        if not name.startswith(("process_", "python_")):
            assert re.fullmatch(r"epserver_[a-z0-9_]+", name)
            assert {key for key, _ in labels} <= bounded, name
        assert not name.endswith(("_ms", "_us", "_ns"))


def test_openmetrics_is_given_to_who_asks_for_it(metrics: ServerMetrics, endpoint: MetricsEndpoint) -> None:
    drive(metrics)
    status, kind, text = get(endpoint, accept="application/openmetrics-text; version=1.0.0")
    assert status == 200 and kind.startswith("application/openmetrics-text")
    families = {family.name: family.type for family in parse_openmetrics(text)}
    assert families["epserver_comm_latency_seconds"] == "histogram"
    assert families["epserver_comm_peer_wait_seconds"] == "counter"
    assert families["epserver_overlap_ratio"] == "gauge"
    assert get(endpoint)[1].startswith("text/plain")


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])
@pytest.mark.parametrize("query", ["", "?name[]=many_total&name[]=few"])
@pytest.mark.parametrize("zipped", [False, True])
def test_pieces_are_the_page_of_the_library(accept: str, query: str, zipped: bool) -> None:
    registry = CollectorRegistry()
    Gauge("few", "A gauge\nof two lines.", registry=registry).set(1)
    many = Counter("many", "More samples than fit in a piece.", ("label",), registry=registry)
    for number in range(3 * metrics_endpoint.PIECE + 1):
        many.labels(f'"{number}"\n# not a comment').inc(number)
    disable_created_metrics()
    headers: list[tuple[str, str]] = []
    environ = {
        "REQUEST_METHOD": "GET",
        "PATH_INFO": "/metrics",
        "QUERY_STRING": query[1:],
        "HTTP_ACCEPT": accept,
    }
    wanted = b"".join(make_wsgi_app(registry)(environ, lambda _status, given: headers.extend(given)))
    endpoint = MetricsEndpoint(MetricsConfig(port=0), registry)
    try:
        asked = Request(endpoint.url + query, headers={"Accept": accept})
        if zipped:
            asked.add_header("Accept-Encoding", "gzip")
        with urlopen(asked, timeout=10) as answer:
            body = answer.read()
            assert answer.headers["Content-Type"] == dict(headers)["Content-Type"]
    finally:
        endpoint.close()
    assert (gzip.decompress(body) if zipped else body) == wanted


def test_other_paths_are_not_found(endpoint: MetricsEndpoint) -> None:
    assert get(endpoint, "/")[0] == get(endpoint, "/metrics/x")[0] == 404


def test_the_address_is_told(endpoint: MetricsEndpoint) -> None:
    assert endpoint.url == f"http://127.0.0.1:{endpoint.port}/metrics"


def test_a_port_in_use_is_one_line(endpoint: MetricsEndpoint, registry: CollectorRegistry) -> None:
    with pytest.raises(StartupError) as raised:
        MetricsEndpoint(MetricsConfig(port=endpoint.port), registry)
    message = str(raised.value)
    assert f"metrics.port = {endpoint.port}" in message and "in use" in message and "\n" not in message


@pytest.mark.parametrize("host", ["203.0.113.7", "no such host"])
def test_a_host_that_is_not_ours_is_one_line(host: str, registry: CollectorRegistry) -> None:
    with pytest.raises(ConfigError, match=r"metrics\.host") as raised:
        MetricsEndpoint(MetricsConfig(host=host, port=0), registry)
    assert "\n" not in str(raised.value)


def test_closing_frees_the_port_and_may_be_repeated(registry: CollectorRegistry) -> None:
    port = free_port()
    endpoint = MetricsEndpoint(MetricsConfig(port=port), registry)
    idle = socket.create_connection(("127.0.0.1", port), timeout=10)  # a scraper that says nothing
    endpoint.close()
    endpoint.close()
    idle.close()
    again = MetricsEndpoint(MetricsConfig(port=port), registry)
    assert get(again)[0] == 200
    again.close()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    return caplog


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_slow_connections_end_with_one_log_line(
    endpoint: MetricsEndpoint,
    log: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics_endpoint, "CONNECTION_SECONDS", 3.0)  # time to open them all
    slow = []
    for _ in range(2 * metrics_endpoint.MAX_CONNECTIONS):
        slow.append(socket.create_connection(("127.0.0.1", endpoint.port), timeout=30))
        slow[-1].send(b"GET /met")
    until(lambda: log.records)
    assert threading.active_count() < metrics_endpoint.MAX_CONNECTIONS + 20
    for connection in slow:
        with suppress(ConnectionResetError):
            assert connection.recv(1) == b""
        connection.close()
    assert get(endpoint)[0] == 200
    (record,) = log.records
    assert "connections were closed because 64 were open" in record.getMessage() and record.exc_info is None
    assert capfd.readouterr().err == ""


def test_a_connection_that_trickles_ends_too(
    endpoint: MetricsEndpoint,
    log: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics_endpoint, "CONNECTION_SECONDS", 0.5)
    with socket.create_connection(("127.0.0.1", endpoint.port), timeout=30) as slow:
        slow.send(b"GET /metrics HTTP/1.0\r\n")

        def ended() -> bool:
            try:
                slow.send(b"X")
            except OSError:
                return True
            return False

        until(ended)
    until(lambda: log.records)
    assert "1 because they took more than 0.5 s" in log.text and capfd.readouterr().err == ""


def test_scrapers_that_leave_are_not_logged(
    registry: CollectorRegistry, log: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    Gauge("big", "Text longer than a socket takes. " * 2**18, registry=registry)
    endpoint = MetricsEndpoint(MetricsConfig(port=0), registry)
    before = threading.active_count()
    for _ in range(9):
        with socket.create_connection(("127.0.0.1", endpoint.port), timeout=30) as leaves:
            leaves.send(b"GET /metrics HTTP/1.0\r\n\r\n")
            leaves.recv(1)
            leaves.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    until(lambda: threading.active_count() <= before)
    endpoint.close()
    assert not log.records and capfd.readouterr().err == ""


def test_a_page_that_fails_is_one_record(
    registry: CollectorRegistry, log: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    class Broken:
        def respond(self, start_response: object) -> list[bytes]:
            raise ValueError("broken")

    endpoint = MetricsEndpoint(MetricsConfig(port=0), registry, Broken())
    assert get(endpoint, "/")[0] == 500
    endpoint.close()
    (record,) = log.records
    assert record.getMessage() == "metrics: a request failed" and "ValueError: broken" in log.text
    assert capfd.readouterr().err == ""


def test_two_servers_in_one_process_do_not_mix() -> None:
    one, two = CollectorRegistry(), CollectorRegistry()
    ServerMetrics(one, model="a", version="1", max_queue=9).on_admitted(3)
    ServerMetrics(two, model="b", version="1", max_queue=9)
    assert one.get_sample_value("epserver_requests_admitted_total") == 1
    assert two.get_sample_value("epserver_requests_admitted_total") == 0


async def test_probes_say_what_health_says(registry: CollectorRegistry) -> None:
    health = Health(("a.Service",))
    probes = Probes(lambda: health.live, lambda: health.serving)
    endpoint = MetricsEndpoint(MetricsConfig(port=0), registry, probes=probes)

    async def asked() -> list[int]:
        return [(await asyncio.to_thread(get, endpoint, path))[0] for path in ("/livez", "/readyz")]

    try:
        assert await asked() == [200, 503]  # it loads
        health.set(serving=True)
        assert await asked() == [200, 200]
        health.set(serving=False)
        assert await asked() == [200, 503]  # it drains
        health.fail()
        assert await asked() == [503, 503]
    finally:
        endpoint.close()


async def test_a_hung_event_loop_is_not_live(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_endpoint, "PROBE_SECONDS", 0.1)
    endpoint = MetricsEndpoint(MetricsConfig(port=0), registry, probes=Probes(lambda: True, lambda: True))
    try:
        assert get(endpoint, "/livez")[0] == 503  # this thread waits: the loop runs nothing
    finally:
        endpoint.close()
