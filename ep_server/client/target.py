"""Where a server is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc

from ep_server.v1 import decode_pb2

SERVICE: str = decode_pb2.DESCRIPTOR.services_by_name["Decode"].full_name


RECONNECT_MS = 5000  # at most, between tries to connect; gRPC's own limit is two minutes


@dataclass(frozen=True, slots=True)
class Target:
    """Where a server is and how to reach it. TLS is used where tls_ca is given; paths are PEM files.

    keepalive_seconds: from the server's last byte to a ping, while calls are open; 0 = no pings. The server
        takes a ping every 5 s; proxies may take fewer.
    keepalive_timeout_seconds: for the answer to a ping; without it calls end with UNAVAILABLE.
    """

    address: str
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    token: str = ""
    keepalive_seconds: float = 10.0
    keepalive_timeout_seconds: float = 10.0

    @property
    def options(self) -> list[tuple[str, int]]:
        """Channel options."""
        unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        unlimited += [("grpc.max_reconnect_backoff_ms", RECONNECT_MS)]  # a restarted server is used soon
        if not self.keepalive_seconds:
            return unlimited
        timeout = round(1000 * self.keepalive_timeout_seconds)
        return [
            *unlimited,
            ("grpc.keepalive_time_ms", round(1000 * self.keepalive_seconds)),
            ("grpc.keepalive_timeout_ms", timeout),
            (
                "grpc.http2.ping_timeout_ms",
                timeout,
            ),  # of pings that gRPC sends itself, which delay others
            ("grpc.http2.max_pings_without_data", 0),  # a long prefill sends nothing; 0 = any number
        ]

    @property
    def metadata(self) -> list[tuple[str, str]]:
        """What every call carries."""
        return [("authorization", f"Bearer {self.token}")] if self.token else []

    @property
    def credentials(self) -> grpc.ChannelCredentials | None:
        """None for a plain connection. Raises: OSError for an unreadable file."""
        if not self.tls_ca:
            return None
        key, cert = (Path(path).read_bytes() if path else None for path in (self.tls_key, self.tls_cert))
        return grpc.ssl_channel_credentials(Path(self.tls_ca).read_bytes(), key, cert)
