"""How nodes authenticate: mutual TLS or a token on the port that node 0 opens for followers.

The port is a GrpcConfig made from cluster.*; errors name the cluster.* option.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc

from ep_server.config import ClusterConfig, Config, GrpcConfig
from ep_server.errors import ConfigError, Unavailable
from ep_server.frontend.interceptors import tokens_in

log = logging.getLogger(__name__)

LEAST_MESSAGE_BYTES = 64 << 20  # nodes' own messages must pass whatever callers may send
_NAMES = {
    "grpc.host": "cluster.rendezvous",
    "grpc.port": "cluster.rendezvous",
    "grpc.token_file": "cluster.token_file",
    "grpc.tls_cert": "cluster.tls_cert",
    "grpc.tls_key": "cluster.tls_key",
    "grpc.tls_client_ca": "cluster.tls_ca",
}


def rendezvous_port(config: Config, host: str, port: int) -> GrpcConfig:
    """The port that node 0 opens for followers."""
    cluster = config.cluster
    return GrpcConfig(
        host=bind_address(host),
        port=port,
        max_message_bytes=max(config.grpc.max_message_bytes, LEAST_MESSAGE_BYTES),
        tls_cert=cluster.tls_cert,
        tls_key=cluster.tls_key,
        tls_client_ca=cluster.tls_ca,
        token_file=cluster.token_file,
    )


@contextmanager
def cluster_names() -> Iterator[None]:
    """Errors about the port inside name the options of cluster.*."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(_NAMES.get(error.field, error.field), error.value, error.allowed) from error


def bind_address(host: str) -> str:
    """Where node 0 listens: the rendezvous if that is a local address, else all addresses of this host.

    A name may resolve to other addresses later, or to none before this node is ready.
    """
    if host == "localhost" or _is_loopback(host):
        return host
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
            ipaddress.ip_address(host)
            probe.bind((host, 0))
    except (OSError, ValueError):
        return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
    return host


def warn_if_open(cluster: ClusterConfig, host: str) -> None:
    """Logs a warning for each way in which strangers could join or eavesdrop."""
    if host == "localhost" or _is_loopback(host):
        return
    if not cluster.tls_cert:
        log.warning(
            "cluster.rendezvous without cluster.tls_cert: anyone on the network can read and change it"
        )
    if not cluster.token_file and not cluster.tls_cert:
        log.warning("cluster.rendezvous without cluster.token_file: anyone who reaches it can join and call")


def channel_credentials(cluster: ClusterConfig) -> grpc.ChannelCredentials | None:
    """A follower's credentials for node 0; None without TLS. Raises: ConfigError."""
    if not cluster.tls_cert:
        return None
    authority = _read("cluster.tls_ca", cluster.tls_ca)
    key, chain = _read("cluster.tls_key", cluster.tls_key), _read("cluster.tls_cert", cluster.tls_cert)
    return grpc.ssl_channel_credentials(authority, key, chain)


def token_metadata(cluster: ClusterConfig) -> Callable[[], tuple[tuple[str, str], ...]]:
    """Returns a function that gives the metadata for node 0: the file's first token, read at every call.

    Raises: ConfigError. The returned function raises Unavailable if the file no longer has a token.
    """
    if not cluster.token_file:
        return tuple
    first_token(cluster.token_file)  # reports a broken file at startup
    return _ShownToken(cluster.token_file)


class _ShownToken:
    """The metadata of a call to node 0."""

    def __init__(self, file: str) -> None:
        self._file, self._fault = file, ""

    def __call__(self) -> tuple[tuple[str, str], ...]:
        try:
            token = first_token(self._file)
        except ConfigError as error:
            if str(error) != self._fault:
                self._fault = str(error)
                log.error("%s; node 0 cannot be called until then", error)
            raise Unavailable("this node has no token for node 0") from None
        self._fault = ""
        return (("authorization", f"Bearer {token}"),)


def first_token(file: str) -> str:
    """Skips blank lines and lines that begin with #. Raises: ConfigError."""
    tokens = tokens_in(_read("cluster.token_file", file).decode("utf-8", "replace"))
    if not tokens:
        raise ConfigError("cluster.token_file", file, "a file with at least one token")
    return tokens[0]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _read(field: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(field, path, f"a readable file ({(error.strerror or '').lower()})") from error
