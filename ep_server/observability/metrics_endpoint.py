"""HTTP port for metrics, the status page and the probes of an orchestrator."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, Protocol
from urllib.parse import parse_qs
from wsgiref.simple_server import ServerHandler, WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric

from ep_server.config import MetricsConfig
from ep_server.errors import ConfigError
from ep_server.observability.rank_metrics import give_way

log = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0  # for a scrape in progress when the server stops
MAX_CONNECTIONS = 64  # at once; others are closed unread
CONNECTION_SECONDS = 10.0  # for a whole request and its answer
PIECE = 100  # samples encoded at once: about 0.5 ms
GZIP = 31  # of zlib: a gzip header, the largest window
PROBE_SECONDS = 3.0  # for the event loop to answer a probe
REPORT_SECONDS = 60.0  # between two log lines about closed connections


class Page(Protocol):
    """Source of the page at /. Called from threads of the endpoint."""

    def respond(self, start_response: Callable[..., Any]) -> list[bytes]:
        """Answers a WSGI request."""
        ...


class Probes:
    """The answers of /livez and /readyz. The event loop computes them, so a hanging loop is not live.

    Create it in the event loop. Threads of the endpoint call it.
    """

    def __init__(self, live: Callable[[], bool], ready: Callable[[], bool]) -> None:
        """live: False once only a restart helps. ready: requests are accepted."""
        self._loop = asyncio.get_running_loop()
        self._questions = {"/livez": live, "/readyz": ready}

    def respond(self, path: str, start_response: Callable[..., Any]) -> list[bytes] | None:
        """200 for yes, 503 for no; None if the path is no probe."""
        question = self._questions.get(path)
        if question is None:
            return None
        yes = self._asked(question)
        status = "200 OK" if yes else "503 Service Unavailable"
        start_response(status, [("Content-Type", "text/plain"), ("Cache-Control", "no-store")])
        return [b"yes\n" if yes else b"no\n"]

    def _asked(self, question: Callable[[], bool]) -> bool:
        async def ask() -> bool:
            return question()

        try:
            return asyncio.run_coroutine_threadsafe(ask(), self._loop).result(PROBE_SECONDS)
        except TimeoutError:
            return False


class MetricsEndpoint:
    """Serves over HTTP:

        /metrics           a registry, as Prometheus text or OpenMetrics, whichever the scraper asks for
        /                  the status page, if there is one
        /livez, /readyz    probes, if there are any

    It has its own threads, so a scrape never waits for the event loop. `close` is idempotent.
    """

    def __init__(
        self,
        config: MetricsConfig,
        registry: CollectorRegistry,
        status: Page | None = None,
        probes: Probes | None = None,
        pickers: CollectorRegistry | None = None,
    ) -> None:
        """Binds and starts. status, probes: None if there are none. pickers: served at /metrics/picker.

        Raises: ConfigError (a StartupError) naming metrics.host or metrics.port if it cannot bind.
        """
        self._server = _bind(config)
        self._server.set_app(_routes(registry, status, probes, pickers))
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port in use, also if the configured one is 0."""
        return self._server.server_port

    @property
    def url(self) -> str:
        """Where to read the metrics."""
        host = str(self._server.server_address[0])
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/metrics"

    def close(self) -> None:
        """Stops serving and frees the port."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join(CLOSE_SECONDS)
        self._server.server_close()


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each of a limited number of connections, for a limited time.

    Logs that others are refused, at most once a minute.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = MAX_CONNECTIONS  # with 5, the default, some of a burst wait a second or longer

    def __init__(self, address: tuple[str, int], family: socket.AddressFamily) -> None:
        self.address_family = family
        self._lock = threading.Lock()
        self._open: dict[socket.socket, float] = {}  # connection -> its deadline
        self._too_many = self._too_slow = 0  # since the last report
        self._next_report = 0.0
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts a thread for the connection, unless all are in use."""
        with self._lock:
            room = len(self._open) < MAX_CONNECTIONS
            if room:
                self._open[request] = time.monotonic() + CONNECTION_SECONDS
            else:
                self._too_many += 1
        if room:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        """Ends a connection."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Runs every half second: ends connections past their deadline, which wakes their threads."""
        now = time.monotonic()
        with self._lock:
            late = [request for request, until in self._open.items() if until < now]
            for request in late:
                self._open[request] += CONNECTION_SECONDS
                with suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)
            self._too_slow += len(late)
            too_many, too_slow = self._too_many, self._too_slow
            if not too_many + too_slow or now < self._next_report:
                return
            self._too_many = self._too_slow = 0
        self._next_report = now + REPORT_SECONDS
        log.warning(
            "metrics: %d connections were closed because %d were open, %d because they took more than %g s",
            too_many,
            MAX_CONNECTIONS,
            too_slow,
            CONNECTION_SECONDS,
        )

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A scraper that leaves is not an error; anything else is."""
        if not isinstance(sys.exc_info()[1], OSError):
            log.exception("metrics: a request failed")

    def server_bind(self) -> None:
        """Binds without looking up the host's full name, as HTTPServer would do and wait for."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()


class _Handler(WSGIRequestHandler):
    server: _Server

    def handle(self) -> None:
        """Does the same as the base class, but writes errors to the log, not to standard error."""
        self.raw_requestline = self.rfile.readline(65537)
        if len(self.raw_requestline) > 65536:
            self.requestline = self.request_version = self.command = ""
            self.send_error(414)
        elif self.parse_request():
            rfile: Any = self.rfile
            wfile: Any = self.wfile
            app: Any = self.server.get_app()
            answer = _Answer(rfile, wfile, self.get_stderr(), self.get_environ(), multithread=False)
            answer.request_handler = self
            answer.run(app)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: there are too many scrapes."""


class _Answer(ServerHandler):
    request_handler: WSGIRequestHandler  # close() uses it

    def log_exception(self, exc_info: Any) -> None:
        """A scraper that leaves is not an error; anything else is."""
        if not isinstance(exc_info[1], OSError):
            log.error("metrics: a request failed", exc_info=exc_info)


def _routes(
    registry: CollectorRegistry,
    status: Page | None,
    probes: Probes | None,
    pickers: CollectorRegistry | None,
) -> Callable[..., Any]:
    """A WSGI application that answers 404 for unknown paths."""

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        path = environ["PATH_INFO"]
        if path == "/metrics":
            return _metrics(registry, environ, start_response)
        if path == "/metrics/picker" and pickers is not None:
            return _metrics(pickers, environ, start_response)
        if path == "/" and status is not None:
            return status.respond(start_response)
        answer = probes.respond(path, start_response) if probes is not None else None
        if answer is not None:
            return answer
        start_response("404 Not Found", [("Content-Type", "text/plain")])
        return [b"see /metrics\n"]

    return app


def _metrics(registry: Any, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterator[bytes]:
    """The same exposition as from Prometheus' own WSGI application, but in pieces.

    The event loop runs between two pieces. It would have to wait for one long page.
    """
    encode, content_type = choose_encoder(environ.get("HTTP_ACCEPT", ""))
    names = parse_qs(environ.get("QUERY_STRING", "")).get("name[]")
    if names:
        registry = registry.restricted_registry(names)
    headers = [("Content-Type", content_type)]
    zipped = "gzip" in environ.get("HTTP_ACCEPT_ENCODING", "")
    if zipped:
        headers.append(("Content-Encoding", "gzip"))
    start_response("200 OK", headers)
    pack = zlib.compressobj(1, wbits=GZIP) if zipped else None
    for piece in _pieces(registry, encode):
        yield piece if pack is None else pack.compress(piece)
    if pack is not None:
        yield pack.flush()


def _pieces(registry: Any, encode: Callable[[Any], bytes]) -> Iterator[bytes]:
    """The result of encode(registry), in pieces of at most PIECE samples."""
    end = encode(CollectorRegistry())  # of OpenMetrics: "# EOF"
    for family in registry.collect():
        for start in range(0, len(family.samples), PIECE) or (0,):
            part = Metric(family.name, family.documentation, family.type, family.unit)
            part.samples = family.samples[start : start + PIECE]
            text = encode(_Families([part])).removesuffix(end)
            yield text if start == 0 else _without_comments(text)
            give_way()
    yield end


class _Families:
    """The part of a registry that an encoder uses."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Sequence[Metric]:
        return self._families


def _without_comments(text: bytes) -> bytes:
    return b"".join(line for line in text.splitlines(keepends=True) if not line.startswith(b"#"))


def _bind(config: MetricsConfig) -> _Server:
    try:
        family, _, _, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(
            "metrics.host", config.host, f"an address of this host ({_reason(error)})"
        ) from error
    try:
        return _Server((str(address[0]), config.port), family)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError("metrics.host", config.host, "an address of this host") from error
        raise ConfigError(
            "metrics.port", config.port, f"a port this process may bind ({_reason(error)})"
        ) from error


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
