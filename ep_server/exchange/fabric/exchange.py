"""The exchange between hosts: the Protocol of exchange.py over libfabric, on CPU tensors.

Phases, layout and errors are those of shm.py; here is the end of a connection. The network's settings are
in settings.py, how ranks find one another is in bootstrap.py.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ep_server import _C
from ep_server.errors import ConfigError, StartupError
from ep_server.exchange.api import ExchangeSpec
from ep_server.exchange.fabric.device_rows import DeviceRows
from ep_server.exchange.fabric.settings import EndpointAddress, FabricOptions
from ep_server.exchange.geometry import check_segment, geometry_of
from ep_server.exchange.segment import HostShare, check_hosts
from ep_server.exchange.shm import ShmExchange
from ep_server.exchange.waiting import Waiting

__all__ = ["EndpointAddress", "FabricExchange", "FabricOptions", "Provider", "providers"]

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Provider:
    """A way to the network that libfabric knows. missing: why it cannot be used here, or ""."""

    name: str
    fabric: str
    domain: str
    missing: str


def providers(options: FabricOptions) -> list[Provider]:
    """All that match the options, in the order of preference. Raises StartupError."""
    return [Provider(*found) for found in _C.fabric_providers(options.native())]


def chosen(options: FabricOptions, *, device_memory: bool = False) -> str:
    """What an exchange would be opened on, in one line.

    Args:
        device_memory: it must reach the memory of devices.
    Raises: StartupError naming every provider and what it lacks.
    """
    return _C.fabric_chosen(options.native(device_memory=device_memory))


class FabricExchange(ShmExchange):
    """One rank's end of a group over several hosts. Satisfies exchange.Exchange, and what shm.py adds.

    Opens the endpoint; `connect` makes it part of a group. A peer that is gone becomes PeerTimeout on the
    rank that waited for it, and PeerLost on the others.

    Args:
        spec: this rank's; all other fields are the same on all ranks.
        share: what the ranks of this host share; None = every rank is a host of its own. Its descriptors stay
          the caller's, who may close them.
        rows: where rows lie on a device; see gpu_direct.py.
    Raises: ConfigError; StartupError naming the provider and what it lacks.
    """

    def __init__(
        self,
        spec: ExchangeSpec,
        options: FabricOptions | None = None,
        waiting: Waiting | None = None,
        share: HostShare | None = None,
        rows: DeviceRows | None = None,
    ) -> None:
        waiting, self.options = waiting or Waiting(), options or FabricOptions()
        self.options.check_depth(spec.max_tokens)
        share = share or HostShare(tuple(range(spec.num_ranks)), -1, ())
        self.hosts = share.hosts
        self._port: _C.FabricPort | None = _open_port(spec, self.options, waiting, share, rows)
        self.description = self._port.description
        LOG.info("%s", self.description)
        self._attach(spec, self._port.exchange, waiting, None if rows is None else rows.dispatched)

    @property
    def address(self) -> EndpointAddress:
        """Where this rank is, for the other ranks' connect()."""
        return self._opened().address

    def connect(self, addresses: list[EndpointAddress], session: int) -> None:
        """Opens the connections to all peers. Collective; returns before the others are ready to send.

        Args:
            addresses: of all ranks, in rank order. session: any number that is this group's alone.
        Raises: StartupError naming the ranks that did not answer.
        """
        if len(addresses) != self.spec.num_ranks:
            raise ConfigError("addresses", len(addresses), f"one per rank: {self.spec.num_ranks}")
        self._opened().connect(addresses, session, int(self.options.connect_seconds * 1e9))

    @property
    def writes(self) -> int:
        """RDMA writes posted so far."""
        return self._opened().writes

    def close(self) -> None:
        """As the Protocol says. Waits a little for peers that close too: nothing on its way is lost."""
        port, self._port = self._port, None
        if port is not None:
            port.close(int(self.options.linger_seconds * 1e9))
        super().close()

    def _opened(self) -> _C.FabricPort:
        if self._port is None:
            self._open()  # raises: it was closed
            raise StartupError("the exchange is not open")
        return self._port


def _open_port(
    spec: ExchangeSpec, options: FabricOptions, waiting: Waiting, share: HostShare, rows: DeviceRows | None
) -> _C.FabricPort:
    native, geometry = options.native(device_memory=rows is not None), geometry_of(spec)
    check_hosts(share.hosts, spec)
    try:
        if share.fd >= 0:
            check_segment(spec, _C.Segment(share.fd).geometry)
        return _C.FabricPort(
            geometry=geometry,
            rank=spec.rank,
            placement=list(spec.placement),
            options=native,
            hosts=list(share.hosts),
            segment=share.fd,
            bells=list(share.bells),
            device=None if rows is None else rows.native(),
            **waiting.native(spec, ranks_here=share.hosts.count(share.hosts[spec.rank])),
        )
    except (OSError, ValueError) as error:
        raise StartupError(f"rank {spec.rank} cannot use what its host shares: {error}") from error
