"""The link of ranks between hosts: one libfabric endpoint of a rank, and the native exchange over it.

settings.py has the network's settings.
"""

from __future__ import annotations

import logging

from ep_server import _C
from ep_server.errors import ConfigError, InvalidArgument, StartupError
from ep_server.exchange.fabric.device_rows import DeviceRows
from ep_server.exchange.fabric.settings import EndpointAddress, FabricOptions
from ep_server.exchange.host import HostExchange, HostGroup
from ep_server.exchange.segment import HostShare
from ep_server.exchange.spec import ExchangeSpec, Waiting, check_hosts, check_segment, geometry_of

LOG = logging.getLogger(__name__)


class FabricLink:
    """One rank's endpoint. Opened, then connected to all peers; closed by its group.

    A lost peer becomes PeerTimeout on the rank that waited for it, and PeerLost on the others.

    Args:
        spec: this rank's; all other fields are the same on all ranks.
        share: what the ranks of this host share; None = every rank is a host of its own. Its descriptors stay
          the caller's, who may close them.
        rows: where rows are on a device; registered until close(). See gpu_direct.py.
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
        self.spec, self.options, self._waiting = spec, options or FabricOptions(), waiting or Waiting()
        self.options.check_depth(spec.max_tokens)
        share = share or HostShare(tuple(range(spec.num_ranks)), -1, ())
        self.hosts = share.hosts
        self._port: _C.FabricPort | None = _open_port(spec, self.options, self._waiting, share, rows)
        self.rows = rows  # after the port: if never closed, it is freed after its registration
        self.description = self._port.description
        LOG.info("%s", self.description)

    @property
    def address(self) -> EndpointAddress:
        """Of this rank, for the other ranks' connect()."""
        return self._opened().address

    def connect(self, addresses: list[EndpointAddress], session: int) -> None:
        """Opens the connections to all peers. Collective; returns before the others are ready to send.

        Args:
            addresses: of all ranks, in rank order. session: a number of this group alone.
        Raises: StartupError naming the ranks that did not answer.
        """
        if len(addresses) != self.spec.num_ranks:
            raise ConfigError("addresses", len(addresses), f"one per rank: {self.spec.num_ranks}")
        self._opened().connect(addresses, session, int(self.options.connect_seconds * 1e9))

    def exchange(self) -> HostExchange:
        """The exchange over this link, which owns it from now on."""
        group = HostGroup(self.spec, self._opened().exchange, self._waiting.on_timeout, self)
        return HostExchange(group, None if self.rows is None else self.rows.dispatched)

    @property
    def writes(self) -> int:
        """RDMA writes posted so far."""
        return self._opened().writes

    def close(self) -> None:
        """Waits a little for peers that close too, so that nothing on its way is lost. Idempotent."""
        port, self._port = self._port, None
        if port is not None:
            port.close(int(self.options.linger_seconds * 1e9))

    def _opened(self) -> _C.FabricPort:
        if self._port is None:
            raise InvalidArgument("exchange", "closed", "open")
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
