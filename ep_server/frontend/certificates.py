"""The server's TLS files: read at the start, and again by the next handshake after they changed.

So certificates are rotated by replacing files; connections that are open stay as they are. A certificate and
key that do not fit each other, as in the middle of a rotation, are not taken: the ones in use stay, with a
line in the log. Without a readable bundle of client authorities no caller is let in: removing it revokes.
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
# An authority whose key was thrown away: it has signed nobody's certificate.
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
    """grpc.tls_cert, tls_key and tls_client_ca. Handshakes call from threads of gRPC."""

    def __init__(self, config: GrpcConfig) -> None:
        """Reads the files. Raises: ConfigError (grpc.tls_*)."""
        self._config = config
        self._taken = self._stamp()
        self._pair = self._read_pair()
        self._authorities = self._read_authorities()

    def credentials(self) -> grpc.ServerCredentials:
        """For one listening port."""
        mutual = bool(self._config.tls_client_ca)
        renewed: Any = self._renewed  # its None is "as before", which the stubs do not know
        return grpc.dynamic_ssl_server_credentials(self._configuration(), renewed, mutual)

    def _renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """For a handshake: the files if they changed since the last look, else None. Never raises."""
        stamp = self._stamp()
        if stamp == self._taken:
            return None
        self._taken = stamp
        try:
            self._pair = self._read_pair()
            log.info("TLS files changed: new connections get %s", self._config.tls_cert)
        except ConfigError as error:
            log.warning("TLS files changed and are not taken, the old ones stay in use: %s", error)
        try:
            self._authorities = self._read_authorities()
        except ConfigError as error:
            self._authorities = NOBODY
            log.error("%s; every new connection is refused until then", error)
        return self._configuration()

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([self._pair], self._authorities)

    def _stamp(self) -> Stamp:
        """Differs when a file was written or replaced, also behind a link."""
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


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
