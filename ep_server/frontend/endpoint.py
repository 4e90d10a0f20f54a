"""The listening end of gRPC: address, TLS files, HTTP/2 options.

An address or file that cannot be used is a ConfigError that names the field.

TLS files are read at startup, and again by the next handshake after they changed, so you rotate certificates
by replacing files; open connections keep theirs. A certificate and key that do not match, as in the middle of
a rotation, are ignored with a log line and the current pair stays in use. Without a readable CA bundle no
client is let in: removing the bundle revokes access.
"""

from __future__ import annotations

import errno
import logging
import socket
import ssl
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from grpc import aio

from ep_server.config import GrpcConfig
from ep_server.errors import ConfigError

log = logging.getLogger(__name__)

Stamp = tuple[tuple[int, int], ...]
# A CA whose key was discarded: it has signed no certificate.
NOBODY = b"""\
-----BEGIN CERTIFICATE-----
MIIBljCCATugAwIBAgIUaWK4bmLt+KyoqQ2IaLAlNmV3kAYwCgYIKoZIzj0EAwIw
HzEdMBsGA1UEAwwUZXBfc2VydmVyOiBubyBjYWxsZXIwIBcNMjYxMTIzMDk1MDU0
WhgPMjEyNjEwMzAwOTUwNTRaMB8xHTAbBgNVBAMMFGVwX3NlcnZlcjogbm8gY2Fs
bGVyMFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAE8GTy3W/kj2EKRT2dCvx1jBKk
G2DD2PEe8g0aW+0hOqqZ7hHENxqSA1OEd1LJaS5/GIw2wmGZjJVrtabwslBMsqNT
MFEwHQYDVR0OBBYEFF1ZeTsU/1msc+Lxj6+hQmz+uO8zMB8GA1UdIwQYMBaAFF1Z
eTsU/1msc+Lxj6+hQmz+uO8zMA8GA1UdEwEB/wQFMAMBAf8wCgYIKoZIzj0EAwID
SQAwRgIhAMDTU0dN9jLG/dK13YJKT6WOhZmf8Vl5cZBOrCQ/QKkyAiEAkcXQRhd6
jwd26FY3hnZEY8/fQmusJEhOgJNCjlK3fgY=
-----END CERTIFICATE-----
"""


class Certificates:
    """grpc.tls_cert, tls_key and tls_client_ca. Handshakes call from threads of gRPC.

    refused: changes of the files that could not be used.
    """

    def __init__(self, config: GrpcConfig) -> None:
        """Reads the files. Raises: ConfigError (grpc.tls_*)."""
        self.refused = 0
        self._config = config
        self._taken = self._stamp()
        self._pair = self._read_pair()
        self._authorities = self._read_authorities()

    def credentials(self) -> grpc.ServerCredentials:
        """For one listening port."""
        mutual = bool(self._config.tls_client_ca)
        renewed: Any = self._renewed  # returns None for "unchanged", which grpc's stubs do not allow
        return grpc.dynamic_ssl_server_credentials(self._configuration(), renewed, mutual)

    def expiry(self) -> dict[str, float]:
        """Unix time at which the certificates in use end, by file; of several in a file the first to end."""
        files = {self._config.tls_cert: self._pair[1]}
        if self._authorities is not None:
            files[self._config.tls_client_ca] = self._authorities
        found = {file: x509.load_pem_x509_certificates(text) for file, text in files.items()}
        return {
            file: min(one.not_valid_after_utc.timestamp() for one in chain) for file, chain in found.items()
        }

    def _renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by a handshake: the files if they changed since the last call, else None. Never raises."""
        stamp = self._stamp()
        if stamp == self._taken:
            return None
        self._taken = stamp
        try:
            self._pair = self._read_pair()
            log.info("TLS files changed: new connections use %s", self._config.tls_cert)
        except ConfigError as error:
            self.refused += 1
            log.warning("TLS files changed but cannot be used; the old ones stay in use: %s", error)
        try:
            self._authorities = self._read_authorities()
        except ConfigError as error:
            self._authorities = NOBODY
            self.refused += 1
            log.error("%s; new connections are refused until it is readable", error)
        return self._configuration()

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([self._pair], self._authorities)

    def _stamp(self) -> Stamp:
        """Changes when a file is written or replaced, also behind a link."""
        files = (self._config.tls_cert, self._config.tls_key, self._config.tls_client_ca)
        return tuple(_stamp_of(Path(file)) for file in files if file)

    def _read_pair(self) -> tuple[bytes, bytes]:
        """Key and certificate chain."""
        config = self._config
        key, chain = _read("grpc.tls_key", config.tls_key), _read("grpc.tls_cert", config.tls_cert)
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.tls_cert, config.tls_key)
        except (ssl.SSLError, OSError) as error:
            allowed = f"a PEM certificate chain that fits grpc.tls_key ({_reason(error)})"
            raise ConfigError("grpc.tls_cert", config.tls_cert, allowed) from error
        return key, chain

    def _read_authorities(self) -> bytes | None:
        """None where callers show no certificate."""
        file = self._config.tls_client_ca
        if not file:
            return None
        bundle = _read("grpc.tls_client_ca", file)
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(file)
        except (ssl.SSLError, OSError) as error:
            allowed = f"a PEM bundle of certificates ({_reason(error)})"
            raise ConfigError("grpc.tls_client_ca", file, allowed) from error
        return bundle


def _stamp_of(file: Path) -> tuple[int, int]:
    try:
        found = file.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_ino


def _read(field: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(field, path, f"a readable file ({_reason(error)})") from error


ANY_MESSAGE_BYTES = 4 << 20  # largest message where grpc.max_message_bytes is 0 and no model is known
# gRPC holds calls until this process accepts them. Beyond these it would end them with CANCELLED, by
# default from 1000 calls or 30 s on. A call that waits takes about 16 KB.
MAX_WAITING_CALLS = 1 << 16
MAX_WAITING_SECONDS = 86_400
LEAST_PING_MS = 5_000  # between two pings of a client; faster clients are disconnected


def warn_if_open(config: GrpcConfig) -> None:
    """Logs a warning for each way in which strangers can call or listen."""
    exposed = config.host not in ("localhost", "::1") and not config.host.startswith("127.")
    if exposed and not config.tls_cert:
        log.warning("grpc.host = %s without TLS: anyone on the network path can read the calls", config.host)
    if exposed and not config.token_file and not config.tls_client_ca:
        log.warning("grpc.host = %s without grpc.token_file: anyone can call", config.host)


def message_limit(config: GrpcConfig) -> int:
    """Bytes of the largest message that is accepted."""
    return config.max_message_bytes or ANY_MESSAGE_BYTES


def channel_options(config: GrpcConfig) -> list[tuple[str, int]]:
    """HTTP/2 options of the server."""
    age, grace = config.max_connection_age_seconds, config.max_connection_age_grace_seconds
    ages = [("grpc.max_connection_age_ms", int(age * 1000))] if age else []
    graces = [("grpc.max_connection_age_grace_ms", int(grace * 1000))] if grace else []
    return [
        *ages,
        *graces,
        # Twice our limit: gRPC's own refusal looks like a caller that left and could not be counted.
        ("grpc.max_receive_message_length", min(2 * message_limit(config), (1 << 31) - 1)),
        ("grpc.max_send_message_length", -1),
        ("grpc.server.max_pending_requests", MAX_WAITING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_WAITING_CALLS),
        ("grpc.server_max_unrequested_time_in_server", MAX_WAITING_SECONDS),
        ("grpc.http2.bdp_probe", 0),  # unread messages fill one small window at most
        (
            "grpc.so_reuseport",
            0,
        ),  # a second server on the port is an error; otherwise it would silently get half of the calls
        ("grpc.enable_channelz", int(config.channelz)),
        ("grpc.keepalive_time_ms", 30_000),  # a vanished client is noticed, its requests cancelled
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 10_000),  # of pings that gRPC sends itself, which delay others
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", LEAST_PING_MS),  # clients ping during long prefills
    ]


def bind(server: aio.Server, config: GrpcConfig, certificates: Certificates | None) -> str:
    """Binds the port, with TLS where there are certificates. Returns: host:port.

    Raises: ConfigError (grpc.host, grpc.port, grpc.tls_*).
    """
    _check_free(config)
    host = f"[{config.host}]" if ":" in config.host else config.host
    address = f"{host}:{config.port}"
    try:
        if certificates is not None:
            port = server.add_secure_port(address, certificates.credentials())
        else:
            port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError("grpc.port", config.port, f"a port this process may bind ({error})") from error
    return f"{host}:{port}"


def _check_free(config: GrpcConfig) -> None:
    """Binds and frees the port: its error is one line, gRPC's would be a page."""
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
