"""HTTP port for metrics and the status page."""

from __future__ import annotations

import errno
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, Protocol
from wsgiref.simple_server import ServerHandler, WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from ep_server.config import MetricsConfig
from ep_server.errors import ConfigError

log = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0  # for a scrape in progress when the server stops
MAX_CONNECTIONS = 64  # at once; others are closed unread
CONNECTION_SECONDS = 10.0  # for a whole request and its answer
REPORT_SECONDS = 60.0  # between two log lines about closed connections


class Page(Protocol):
    """Source of the page at /. Called from threads of the endpoint."""

    def respond(self, start_response: Callable[..., Any]) -> list[bytes]:
        """Answers a WSGI request."""
        ...


class MetricsEndpoint:
    """Serves a registry over HTTP at /metrics, Prometheus text or OpenMetrics as the scraper asks; at / the
    status page, where there is one.

    Threads of its own, so a scrape never waits for the event loop. `close` is idempotent.
    """

    def __init__(
        self, config: MetricsConfig, registry: CollectorRegistry, status: Page | None = None
    ) -> None:
        """Binds and starts. status: None where there is no page.

        Raises: ConfigError (a StartupError) naming metrics.host or metrics.port if it cannot bind.
        """
        self._server = _bind(config)
        self._server.set_app(_routes(make_wsgi_app(registry), status))
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port in use, also where the configuration said 0."""
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

    def __init__(self, address: tuple[str, int], family: socket.AddressFamily) -> None:
        self.address_family = family
        self._lock = threading.Lock()
        self._open: dict[socket.socket, float] = {}  # connection -> when it has to be over
        self._too_many = self._too_slow = 0  # since the last report
        self._next_report = 0.0
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts a thread for the connection, if one is left."""
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
        """The connection is over."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Every half second: ends connections whose time is over, which wakes their threads."""
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
        """Binds without looking up the host's full name, which HTTPServer would wait for."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()


class _Handler(WSGIRequestHandler):
    server: _Server

    def handle(self) -> None:
        """As the base class does, with errors in the log and not on standard error."""
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
        """Scrapes are not worth a log line."""


class _Answer(ServerHandler):
    request_handler: WSGIRequestHandler  # close() uses it

    def log_exception(self, exc_info: Any) -> None:
        """A scraper that leaves is not an error; anything else is."""
        if not isinstance(exc_info[1], OSError):
            log.error("metrics: a request failed", exc_info=exc_info)


def _routes(metrics: Callable[..., Any], status: Page | None) -> Callable[..., Any]:
    """The exporter answers on any path; this one answers 404 beside /metrics and the status page."""

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        path = environ["PATH_INFO"]
        if path == "/metrics":
            return metrics(environ, start_response)
        if path == "/" and status is not None:
            return status.respond(start_response)
        start_response("404 Not Found", [("Content-Type", "text/plain")])
        return [b"see /metrics\n"]

    return app


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
