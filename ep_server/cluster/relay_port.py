"""[1] The public port of a node that does not lead, and its channel to node 0."""

from __future__ import annotations

import grpc
from grpc import aio

from ep_server.cluster.relay import Relay
from ep_server.config import GrpcConfig
from ep_server.frontend import control, health
from ep_server.frontend.control import public_names, refuse_control
from ep_server.frontend.endpoint import add_reflection, message_limit
from ep_server.frontend.health import Health
from ep_server.frontend.port import Port

_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_retries", 0),  # the caller decides
    ("grpc.use_local_subchannel_pool", 1),  # a connection of its own, beside the link's
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]


def open_channel(address: str, credentials: grpc.ChannelCredentials | None = None) -> aio.Channel:
    """A channel to node 0's host:port for relayed calls; it connects with the first one."""
    if credentials is None:
        return aio.insecure_channel(address, options=_OPTIONS)
    return aio.secure_channel(address, credentials, options=_OPTIONS)


def relay_port(config: GrpcConfig, relay: Relay, status: Health) -> Port:
    """The public port of a node that does not lead, not open yet: as node 0's, but by way of it.

    Raises: ConfigError (grpc.token_file).
    """
    port = Port(config, frozenset({health.SERVICE_NAME}), relay.door(message_limit(config)))
    add_public(port.server, config, relay, status)
    return port


def add_public(server: aio.Server, config: GrpcConfig, relay: Relay, status: Health) -> None:
    """Adds what callers may ask of such a node."""
    names = public_names(config)
    relay.add_to(server, names)
    if control.SERVICE_NAME not in names:
        refuse_control(server, config)
    health.add_HealthServicer_to_server(status, server)
    add_reflection(server, config, (*names, health.SERVICE_NAME))
