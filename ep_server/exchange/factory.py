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

from ep_server.exchange.api import Abortable, Exchange, ExchangeSpec, Payload, control_spec
from ep_server.exchange.fabric.settings import EndpointAddress, FabricOptions
from ep_server.exchange.waiting import Waiting

if TYPE_CHECKING:
    import torch

    from ep_server.exchange.fabric.device import FabricDeviceExchange
    from ep_server.exchange.shm import ShmExchange


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


def needs_cuda_build(topology: Topology, spec: ExchangeSpec) -> bool:
    """Whether this package must have been built with CUDA."""
    return transport_of(topology, spec) in (Transport.NVLINK, Transport.HIERARCHICAL)


Connect = Callable[[EndpointAddress, float], tuple[list[EndpointAddress], int]]


@dataclass(frozen=True, slots=True)
class Opening:
    """What this rank opens its end with.

    segment, bells: descriptors that the ranks of this host share; open_exchange closes them.
    on_open: gets what can abort the group, before this rank waits for another one.
    connect: gives the endpoint addresses of all ranks and a session number for that of this rank. It waits
      for at most as many seconds.
    device_memory: how rows of a device reach the network; one of fabric.device_memory.DeviceMemory.
    """

    segment: int
    on_open: Callable[[Abortable], None]
    connect: Connect
    bells: tuple[int, ...] = ()
    waiting: Waiting = field(default_factory=Waiting)
    options: FabricOptions = field(default_factory=FabricOptions)
    device_memory: str = "auto"


def open_exchange(topology: Topology, spec: ExchangeSpec, device: torch.device, opening: Opening) -> Exchange:
    """This rank's end of the exchange. Collective: returns once the ranks of all hosts are connected.

    Args:
        device: of the tensors of this rank.
    Raises: ConfigError; StartupError; ExchangeError where another rank failed.
    """
    transport = transport_of(topology, spec)
    if transport is Transport.NVLINK:
        from ep_server.exchange.nvlink.exchange import NvlinkExchange

        control = _open_shm(control_spec(spec), opening, Waiting())
        return NvlinkExchange(spec, control=control, device=device.index)
    inner = (
        _open_shm(spec, opening, opening.waiting)
        if topology.one_host
        else _open_fabric(topology, spec, device, opening)
    )
    if transport in (Transport.SHM, Transport.FABRIC):
        return inner
    from ep_server.exchange.fabric.device_memory import on_device

    staged: FabricDeviceExchange = on_device(inner, device)
    if transport is Transport.FABRIC_DEVICE:
        return staged
    from ep_server.exchange.hierarchical.bootstrap import on_gpus

    return on_gpus(staged, topology.hosts, opening.on_open)


def _open_shm(spec: ExchangeSpec, opening: Opening, waiting: Waiting) -> ShmExchange:
    from ep_server.exchange.shm import ShmExchange

    exchange = ShmExchange(spec, fd=opening.segment, spin_us=waiting.spin_us)
    os.close(opening.segment)
    opening.on_open(exchange)
    return exchange


def _open_fabric(
    topology: Topology, spec: ExchangeSpec, device: torch.device, opening: Opening
) -> ShmExchange:
    from ep_server.exchange.fabric.device_memory import DeviceMemory, open_end
    from ep_server.exchange.fabric.exchange import FabricExchange
    from ep_server.exchange.segment import HostShare

    share = HostShare(topology.hosts, opening.segment, opening.bells)
    options, waiting = opening.options, opening.waiting
    wanted = DeviceMemory(opening.device_memory) if topology.gpus else DeviceMemory.HOST
    fabric = open_end(
        spec, device, wanted, options, waiting, lambda: FabricExchange(spec, options, waiting, share)
    )
    share.close()
    opening.on_open(fabric)
    addresses, session = opening.connect(fabric.address, options.connect_seconds)
    fabric.connect(addresses, session)
    fabric.barrier()
    return fabric
