"""The server's TLS files: read at the start, and again by the next handshake after they changed.

So certificates are rotated by replacing files; connections that are open stay as they are. Files that do not
fit each other, as in the middle of a rotation, are not taken: the ones in use stay, with a line in the log.
"""

from __future__ import annotations

import logging
import ssl
from pathlib import Path
from typing import Any

import grpc

from ep_server.config import GrpcConfig
from ep_server.errors import ConfigError

log = logging.getLogger(__name__)

Stamp = tuple[tuple[int, int], ...]


class Certificates:
    """grpc.tls_cert, tls_key and tls_client_ca. Handshakes call from threads of gRPC."""

    def __init__(self, config: GrpcConfig) -> None:
        """Reads the files. Raises: ConfigError (grpc.tls_*)."""
        self._config = config
        self._taken = self._stamp()
        self._first = self._read()

    def credentials(self) -> grpc.ServerCredentials:
        """For one listening port."""
        mutual = bool(self._config.tls_client_ca)
        renewed: Any = self._renewed  # its None is "as before", which the stubs do not know
        return grpc.dynamic_ssl_server_credentials(self._first, renewed, mutual)

    def _renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """For a handshake: the files if they changed since the last look, else None. Never raises."""
        stamp = self._stamp()
        if stamp == self._taken:
            return None
        self._taken = stamp
        try:
            renewed = self._read()
        except ConfigError as error:
            log.warning("TLS files changed and are not taken, the old ones stay in use: %s", error)
            return None
        log.info("TLS files changed: new connections get %s", self._config.tls_cert)
        return renewed

    def _stamp(self) -> Stamp:
        """Differs when a file was written or replaced, also behind a link."""
        files = (self._config.tls_cert, self._config.tls_key, self._config.tls_client_ca)
        return tuple(_stamp_of(Path(file)) for file in files if file)

    def _read(self) -> grpc.ServerCertificateConfiguration:
        config, context = self._config, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        key = _read("grpc.tls_key", config.tls_key)
        chain = _read("grpc.tls_cert", config.tls_cert)
        try:
            context.load_cert_chain(config.tls_cert, config.tls_key)
        except (ssl.SSLError, OSError) as error:
            allowed = f"a PEM certificate chain that fits grpc.tls_key ({_reason(error)})"
            raise ConfigError("grpc.tls_cert", config.tls_cert, allowed) from error
        if not config.tls_client_ca:
            return grpc.ssl_server_certificate_configuration([(key, chain)])
        bundle = _read("grpc.tls_client_ca", config.tls_client_ca)
        try:
            context.load_verify_locations(config.tls_client_ca)
        except (ssl.SSLError, OSError) as error:
            allowed = f"a PEM bundle of certificates ({_reason(error)})"
            raise ConfigError("grpc.tls_client_ca", config.tls_client_ca, allowed) from error
        return grpc.ssl_server_certificate_configuration([(key, chain)], bundle)


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


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
