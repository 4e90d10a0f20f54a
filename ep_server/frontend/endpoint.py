"""The listening end of gRPC: address, TLS, HTTP/2 options. Knows configuration, no service.

Whatever cannot be bound or read is a ConfigError that names the field.
"""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Iterable

from grpc import aio
from grpc_reflection.v1alpha import reflection

from ep_server.config import GrpcConfig
from ep_server.errors import ConfigError
from ep_server.frontend.certificates import Certificates

log = logging.getLogger(__name__)

ANY_MESSAGE_BYTES = 4 << 20  # largest message where grpc.max_message_bytes is 0 and no model is known
# gRPC holds calls until this process accepts them. Beyond these it would end them with CANCELLED, by
# default from 1000 calls or 30 s on. A call that waits takes about 16 KB.
MAX_WAITING_CALLS = 1 << 16
MAX_WAITING_SECONDS = 86_400
LEAST_PING_MS = 5_000  # between two pings of a client; who sends more is disconnected


def warn_if_open(config: GrpcConfig) -> None:
    """A line in the log for each way in which strangers may call or listen."""
    exposed = config.host not in ("localhost", "::1") and not config.host.startswith("127.")
    if exposed and not config.tls_cert:
        log.warning("grpc.host = %s without TLS: anyone on the way can read the calls", config.host)
    if exposed and not config.token_file and not config.tls_client_ca:
        log.warning("grpc.host = %s without grpc.token_file: anyone can call", config.host)


def message_limit(config: GrpcConfig) -> int:
    """Bytes of the largest message that is taken."""
    return config.max_message_bytes or ANY_MESSAGE_BYTES


def channel_options(config: GrpcConfig) -> list[tuple[str, int]]:
    """HTTP/2 options of the server."""
    return [
        # Twice what is taken: gRPC's own refusal looks like a caller that left, and could not be counted.
        ("grpc.max_receive_message_length", min(2 * message_limit(config), (1 << 31) - 1)),
        ("grpc.max_send_message_length", -1),
        ("grpc.server.max_pending_requests", MAX_WAITING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_WAITING_CALLS),
        ("grpc.server_max_unrequested_time_in_server", MAX_WAITING_SECONDS),
        ("grpc.http2.bdp_probe", 0),  # what nobody reads yet keeps to one small window
        ("grpc.so_reuseport", 0),  # a second server on the port is an error, not a silent half of the calls
        ("grpc.keepalive_time_ms", 30_000),  # a vanished client is noticed, its requests cancelled
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 10_000),  # of pings that gRPC sends beside, which hold others back
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", LEAST_PING_MS),  # clients ping during long prefills
    ]


def add_reflection(server: aio.Server, config: GrpcConfig, names: Iterable[str]) -> None:
    """Adds gRPC reflection of these services, unless it is switched off."""
    if config.reflection:
        reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), server)


def bind(server: aio.Server, config: GrpcConfig) -> str:
    """Binds the port, with TLS where a certificate is given. Returns: host:port.

    Raises: ConfigError (grpc.host, grpc.port, grpc.tls_*).
    """
    _check_free(config)
    host = f"[{config.host}]" if ":" in config.host else config.host
    address = f"{host}:{config.port}"
    try:
        if config.tls_cert:
            port = server.add_secure_port(address, Certificates(config).credentials())
        else:
            port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError("grpc.port", config.port, f"a port this process may bind ({error})") from error
    return f"{host}:{port}"


def _check_free(config: GrpcConfig) -> None:
    """Binds and frees the port, for an error of one line where gRPC would print a page."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError("grpc.host", config.host, f"an address of this host ({_reason(error)})") from error
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise ConfigError("grpc.host", config.host, "an address of this host") from error
            allowed = f"a port of {config.host} this process may bind ({_reason(error)})"
            raise ConfigError("grpc.port", config.port, allowed) from error


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
