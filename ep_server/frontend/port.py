"""One gRPC port: guarded while it is open, and closed so that callers can retry elsewhere.

A gRPC server that stops ends every call with CANCELLED that it has not handed over or that outlasts its
grace period, and retry policies do not retry CANCELLED. So this module closes the sockets first: calls on
their way then end with UNAVAILABLE, reported by the caller's own gRPC.

gRPC sends GOAWAY only when a server stops, and then accepts no connection. Probes need new connections
during a drain, so a second server takes over the port before the first one stops.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from grpc import aio

from ep_server.config import GrpcConfig
from ep_server.errors import ConfigError
from ep_server.frontend.accept_queue import AcceptQueue
from ep_server.frontend.endpoint import Certificates, bind, channel_options
from ep_server.frontend.interceptors import AuthInterceptor, CallCounter, ErrorInterceptor, TokenFile
from ep_server.frontend.messages import CallLimits, MessageReader

log = logging.getLogger(__name__)

GRACE_SECONDS = 0.5  # for calls that never end by themselves, such as Health.Watch
# gRPC cancels calls that it has not handed over. So new calls are held until a lull: callers who wait for an
# answer send no more meanwhile.
HOLD_SECONDS = 0.2
LULL_SECONDS, LULL_TRIES = 0.003, 100
DAY_SECONDS = 86400.0  # the longest drain allowed; close() ends it earlier
# A balancer may send callers back for a while, so connections made during a drain soon get GOAWAY too.
_DRAINING_OPTIONS = [("grpc.max_connection_age_ms", 1000)]


class Port:
    """A server without services; it maps errors to statuses and checks tokens if a token file is configured.

    Add services to `server` before open(). Used in one event loop.
    """

    def __init__(
        self,
        config: GrpcConfig,
        open_services: frozenset[str],
        limits: CallLimits | None = None,
        options: Sequence[tuple[str, int]] = (),
    ) -> None:
        """open_services: full names of those that need no token. options: of gRPC, before those of `config`.

        Raises: ConfigError (grpc.token_file).
        """
        limits = limits or CallLimits()
        self.address = ""  # host:port while it is open
        self.certificates: Certificates | None = None  # once it is open, with TLS
        self._place: Place | None = None
        self._config = config
        self._options = options
        self._calls = CallCounter(limits.on_refused)
        self._queue = AcceptQueue(limits.measured, limits.on_accept_wait)
        self._interceptors: list[aio.ServerInterceptor] = [self._queue, ErrorInterceptor(), self._calls]  # type: ignore[type-arg, unused-ignore]
        if config.token_file:
            self._interceptors.append(AuthInterceptor(TokenFile(config.token_file), open_services))
        self._interceptors.append(MessageReader(limits, self._calls.entered))
        self.server = self._make_server([])
        self._servers = [self.server]
        self._draining: asyncio.Task[None] | None = None

    async def open(self) -> str:
        """Accepts calls from now on. Returns: host:port. Raises: ConfigError (grpc.host, port, tls_*)."""
        self.certificates = Certificates(self._config) if self._config.tls_cert else None
        self.address = bind(self.server, self._config, self.certificates)
        self._place = place_of(self.address)
        self._queue.listen(self.server)
        await self.server.start()
        self._queue.start()
        return self.address

    def drain(self, add_services: Callable[[aio.Server], None]) -> None:
        """Soon sends GOAWAY on every connection: open calls continue, others reconnect. Idempotent.

        add_services: adds what new connections may call.
        """
        if self._place is not None and self._draining is None:
            self._draining = asyncio.create_task(self._hand_over(self._place, add_services))

    async def close(self, seconds: float = GRACE_SECONDS) -> None:
        """New calls end with UNAVAILABLE, as do those that are open after `seconds`. Idempotent."""
        place, self._place, self.address = self._place, None, ""
        if place is not None:
            self._calls.refuse()
            await self._calls.ended(seconds)
            _hang_up(place)
        if self._draining is not None:
            self._draining.cancel()
            await asyncio.wait((self._draining,))
        await asyncio.to_thread(self._queue.close)
        if place is not None and self._queue.path:  # else gRPC may log that the probes' channel got GOAWAY
            _hang_up(LocalPlace(self._queue.path))
        for server in self._servers:
            await server.stop(None)

    async def _hand_over(self, place: Place, add_services: Callable[[aio.Server], None]) -> None:
        """Opens the port again with a second server, then stops the first one, which sends GOAWAY."""
        new = self._make_server(_DRAINING_OPTIONS)
        add_services(new)
        with self._calls.held():
            await asyncio.sleep(HOLD_SECONDS)
            try:
                stop_listening(place)
                bind(new, replace(self._config, port=place.number), self.certificates)
                self._servers.append(new)
                await new.start()
                await self._calls.lull(LULL_SECONDS, LULL_TRIES)
            except (OSError, ConfigError) as error:
                log.warning("the draining port cannot take new connections or probes: %s", error)
            stopping = asyncio.create_task(self.server.stop(DAY_SECONDS))
            await asyncio.sleep(0)  # it has sent GOAWAY then
        await stopping

    def _make_server(self, options: list[tuple[str, int]]) -> aio.Server:
        chosen = dict([*channel_options(self._config), *self._options, *options])
        return aio.server(interceptors=self._interceptors, options=list(chosen.items()))


@dataclass(frozen=True, slots=True)
class Place:
    """Where a port listens. addresses: empty = all of this host."""

    number: int
    addresses: frozenset[IPv4Address | IPv6Address]

    def has(self, found: socket.socket) -> bool:
        """Whether a socket is bound here. UDP ports are separate and may have the same number."""
        if found.family not in (socket.AF_INET, socket.AF_INET6) or found.type != socket.SOCK_STREAM:
            return False
        host, number, *_ = found.getsockname()
        return number == self.number and (not self.addresses or _ip(host) in self.addresses)


@dataclass(frozen=True, slots=True)
class LocalPlace:
    """A Unix socket that a port listens on too."""

    path: str

    def has(self, found: socket.socket) -> bool:
        """Whether a socket is bound here."""
        return found.family == socket.AF_UNIX and found.getsockname() == self.path


def place_of(address: str) -> Place:
    """The place of host:port. Raises: OSError where the host has no address."""
    host, _, number = address.rpartition(":")
    ends = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    found = {_ip(str(end[0])) for *_, end in ends}
    return Place(int(number), frozenset() if any(ip.is_unspecified for ip in found) else frozenset(found))


def _ip(host: str) -> IPv4Address | IPv6Address:
    """The IPv4 address of an IPv4-mapped IPv6 address."""
    found = ip_address(host.partition("%")[0])
    return getattr(found, "ipv4_mapped", None) or found


def _hang_up(place: Place | LocalPlace) -> None:
    try:
        hang_up(place)
    except OSError as error:  # for example no descriptor is left; the server stops anyway
        log.warning("sockets not closed, calls may end with CANCELLED: %s", error)


def hang_up(place: Place | LocalPlace) -> None:
    """Refuses new connections and closes all open ones; gRPC has a call for neither.

    For a port of a server in this process, which stops next. Other threads may open and close descriptors
    meanwhile. Raises: OSError.
    """
    stop_listening(place)
    for _, connection in _sockets_at(place, listening=False):
        with suppress(OSError):  # the caller was faster
            connection.shutdown(socket.SHUT_RDWR)


def stop_listening(place: Place | LocalPlace) -> None:
    """Refuses new connections; see hang_up()."""
    for number, listener in _sockets_at(place, listening=True):
        # Another socket takes its place: if it ended under gRPC, that would log an error.
        with socket.socket(listener.family) as idle:
            os.dup2(idle.fileno(), number, inheritable=False)


def _sockets_at(place: Place | LocalPlace, *, listening: bool) -> Iterator[tuple[int, socket.socket]]:
    """Sockets of this process at `place`: descriptors, and copies that are closed at once."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        # Only sockets: closing a copy of a file would drop this process's locks on it.
        with suppress(OSError):
            if entry.readlink().name.startswith("socket:"):
                with _copy_of(int(entry.name)) as found:
                    if place.has(found) and _listens(found) == listening:
                        yield int(entry.name), found


@contextmanager
def _copy_of(number: int) -> Iterator[socket.socket]:
    """Raises: OSError where the descriptor is no socket, or gone."""
    copy = os.dup(number)
    try:
        found = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with found:
        yield found


def _listens(connection: socket.socket) -> bool:
    return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
