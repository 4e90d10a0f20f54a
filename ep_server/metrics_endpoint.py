"""The HTTP port that metrics and the status page are read from. Knows a registry, not what is in it."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, Protocol
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from ep_server.config import MetricsConfig
from ep_server.errors import ConfigError

CLOSE_SECONDS = 5.0  # for a scrape in progress when the server stops
SLOW_READER_SECONDS = 10  # a scrape that stalls longer is dropped


class Page(Protocol):
    """What is shown at /. Asked from threads of the endpoint."""

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
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], family: socket.AddressFamily) -> None:
        self.address_family = family
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Binds without looking up the host's full name, which HTTPServer would wait for."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()


class _Handler(WSGIRequestHandler):
    timeout = SLOW_READER_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not worth a log line."""


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
