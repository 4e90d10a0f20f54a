"""Chooses the transport of a group and opens this rank's end of it. No other module decides which one it is.

The choice itself needs no torch, so the frontend can create a group's memory before its ranks start. A
transport is imported when it is opened, because each needs libraries that not every machine has.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from ep_server.errors import ConfigError
from ep_server.exchange.api import Abortable, Exchange
from ep_server.exchange.fabric.settings import EndpointAddress, FabricOptions
from ep_server.exchange.spec import (
    DeviceMemory,
    ExchangeSpec,
    Payload,
    Waiting,
    control_spec,
    ranks_of_host,
    spec_of_host,
)

if TYPE_CHECKING:
    import torch

    from ep_server.exchange.bulk import BulkExchange
    from ep_server.exchange.fabric.device_rows import DeviceRows
    from ep_server.exchange.host import HostExchange, HostGroup


class Transport(Enum):
    """How rows travel."""

    SHM = auto()  # the memory of one host
    NVLINK = auto()  # between the GPUs of one host
    FABRIC = auto()  # host memory, over the network
    FABRIC_DEVICE = auto()  # tensors of a device, over the network or the memory of one host
    HIERARCHICAL = auto()  # NVLINK inside a host, FABRIC_DEVICE between hosts


@dataclass(frozen=True, slots=True)
class Topology:
    """Where the ranks of a group are.

    hosts: [R] number of each rank's host. gpus: whether the tensors of every rank are on a GPU of its own.
    hierarchical: where there are several hosts, rows stay on NVLink inside each of them.
    """

    hosts: tuple[int, ...]
    gpus: bool
    hierarchical: bool = False

    @property
    def one_host(self) -> bool:
        """Whether all ranks share memory."""
        return len(set(self.hosts)) == 1


def transport_of(topology: Topology, spec: ExchangeSpec) -> Transport:
    """The transport of a group. Rows of float32 do not travel over NVLink."""
    if not topology.gpus:
        return Transport.SHM if topology.one_host else Transport.FABRIC
    if spec.payload == Payload.FP32:
        return Transport.FABRIC_DEVICE
    if topology.one_host:
        return Transport.NVLINK
    return Transport.HIERARCHICAL if topology.hierarchical else Transport.FABRIC_DEVICE


def segment_spec(topology: Topology, spec: ExchangeSpec) -> ExchangeSpec:
    """What the memory that the ranks of one host inherit is for: rows, or votes alone."""
    return control_spec(spec) if transport_of(topology, spec) is Transport.NVLINK else spec


def replaces_ranks(topology: Topology, spec: ExchangeSpec) -> bool:
    """Whether a new process can take the place of one that has ended, while the others keep theirs."""
    return transport_of(topology, spec) in (Transport.SHM, Transport.NVLINK) and spec.num_ranks > 1


def needs_cuda_build(topology: Topology, spec: ExchangeSpec) -> bool:
    """Whether this package must have been built with CUDA."""
    return transport_of(topology, spec) in (Transport.NVLINK, Transport.HIERARCHICAL)


def device_memory(topology: Topology, spec: ExchangeSpec, *, many: bool) -> DeviceMemory | None:
    """Memory that the exchange takes of a rank's GPU; None where that is not known before it is open.

    many: see Opening. Raises: ConfigError.
    """
    transport = transport_of(topology, spec)
    if transport not in (Transport.NVLINK, Transport.HIERARCHICAL):
        return None
    from ep_server.exchange.nvlink.sizes import device_memory

    if transport is Transport.HIERARCHICAL:
        spec = spec_of_host(spec, ranks_of_host(topology.hosts, spec))
    return device_memory(spec, many=many)


Connect = Callable[[EndpointAddress, float], tuple[list[EndpointAddress], int]]


@dataclass(frozen=True, slots=True)
class Opening:
    """What this rank opens its end with.

    segment, bells: descriptors that the ranks of this host share; open_exchange closes them. segment -1 =
      every rank is a host of its own.
    on_open: gets what can abort the group, before this rank waits for another one.
    connect: exchanges this rank's endpoint address for those of all ranks and a session number. It waits for
      at most as many seconds.
    device_memory: how rows of a device reach the network; see gpu_direct.rows_on_device.
    num_sms: multiprocessors of a GPU that a kernel may fill; 0 = all.
    joins: this rank takes the place of one that was lost; the others meet it in their next reset().
    absent: ranks that take no part yet. Only where replaces_ranks().
    many: GPUs get memory for Exchange.normal inside their host too; the same on all ranks.
    """

    segment: int
    on_open: Callable[[Abortable], None] = lambda group: None
    connect: Connect | None = None
    bells: tuple[int, ...] = ()
    waiting: Waiting = field(default_factory=Waiting)
    options: FabricOptions = field(default_factory=FabricOptions)
    device_memory: str = "auto"
    num_sms: int = 0
    joins: bool = False
    absent: frozenset[int] = frozenset()
    many: bool = False


def open_exchange(topology: Topology, spec: ExchangeSpec, device: torch.device, opening: Opening) -> Exchange:
    """This rank's end of the exchange. Collective: returns once the ranks of all hosts are connected.

    Args:
        device: of the tensors of this rank.
    Raises: ConfigError; StartupError; ExchangeError where another rank failed.
    """
    transport = transport_of(topology, spec)
    if transport is Transport.NVLINK:
        return _open_nvlink(spec, opening.segment, device, opening, owned=True)
    if transport is Transport.SHM:
        return _open_shm(spec, opening)
    rows = None
    if transport is not Transport.FABRIC and not topology.one_host:
        from ep_server.exchange.fabric.gpu_direct import rows_on_device

        rows = rows_on_device(opening.device_memory, spec, device, opening.options)
    inner = _open_shm(spec, opening) if topology.one_host else _open_fabric(topology, spec, opening, rows)
    if transport is Transport.FABRIC:
        return inner
    from ep_server.exchange.fabric.device import FabricDeviceExchange

    staged = FabricDeviceExchange(inner, device, rows)
    if transport is Transport.FABRIC_DEVICE:
        return staged
    from ep_server.exchange.hierarchical.exchange import open_hierarchical

    def open_intra(of_host: ExchangeSpec, segment: int) -> Exchange:
        return _open_nvlink(of_host, segment, device, opening, owned=False)

    return open_hierarchical(staged, topology.hosts, control_spec, open_intra)


def open_bulk(spec: ExchangeSpec, device: torch.device, segment: int, heap_bytes: int) -> BulkExchange:
    """This rank's end of the exchange of many rows between the GPUs of one host. Collective.

    Args:
        spec: its rank, number of ranks and deadline count.
        segment: of control_spec(spec); closed.
        heap_bytes: memory of the GPU for received rows.
    Raises: ConfigError; StartupError.
    """
    from ep_server.exchange.nvlink.bulk import NvlinkBulk, bulk_spec

    sized = bulk_spec(spec.rank, spec.num_ranks, spec.timeout_ns)
    control = _open_group(control_spec(sized), segment, Opening(segment), Waiting(), owned=True)
    return NvlinkBulk(sized, control=control, device=device, heap_bytes=heap_bytes)


def _open_shm(spec: ExchangeSpec, opening: Opening) -> HostExchange:
    from ep_server.exchange.host import HostExchange

    return HostExchange(_open_group(spec, opening.segment, opening, opening.waiting, owned=True))


def _open_nvlink(
    spec: ExchangeSpec, segment: int, device: torch.device, opening: Opening, *, owned: bool
) -> Exchange:
    from ep_server.exchange.nvlink.exchange import NvlinkExchange

    control = _open_group(control_spec(spec), segment, opening, Waiting(), owned=owned)
    return NvlinkExchange(
        spec,
        control=control,
        device=device.index,
        on_timeout=opening.waiting.on_timeout,
        num_sms=opening.num_sms,
        joins=opening.joins,
        many=opening.many,
    )


def _open_group(
    spec: ExchangeSpec, segment: int, opening: Opening, waiting: Waiting, *, owned: bool
) -> HostGroup:
    from ep_server.exchange.host import open_group

    try:
        group = open_group(spec, segment, waiting)
    finally:
        if owned:
            os.close(segment)
    group.mask(opening.absent)
    opening.on_open(group)
    return group


def _open_fabric(
    topology: Topology, spec: ExchangeSpec, opening: Opening, rows: DeviceRows | None
) -> HostExchange:
    from ep_server.exchange.fabric.link import FabricLink
    from ep_server.exchange.segment import HostShare

    if opening.connect is None:
        raise ConfigError("connect", None, "given for a group of several hosts")
    share = None if opening.segment < 0 else HostShare(topology.hosts, opening.segment, opening.bells)
    try:  # ranks do not share rows that the NIC writes to a device: each rank is then a host of its own
        link = FabricLink(spec, opening.options, opening.waiting, share if rows is None else None, rows)
    finally:
        if share is not None:
            share.close()
    exchange = link.exchange()
    opening.on_open(exchange.group)
    addresses, session = opening.connect(link.address, opening.options.connect_seconds)
    link.connect(addresses, session)
    exchange.barrier()
    return exchange
