"""HierarchicalExchanges on the CPU: inside a host shared memory in place of NVLink, staging as for a GPU."""

from __future__ import annotations

import torch.distributed as dist

from ep_server.compat.deep_ep.bootstrap import from_process_group
from ep_server.exchange.api import Exchange, ExchangeSpec
from ep_server.exchange.fabric.device import FabricDeviceExchange
from ep_server.exchange.fabric.settings import FabricOptions
from ep_server.exchange.hierarchical.exchange import HierarchicalExchange, open_hierarchical
from ep_server.exchange.host import HostExchange, open_group, open_shm
from ep_server.exchange.spec import control_spec
from tests.support.fabric import mixed_ends


def same(spec: ExchangeSpec) -> ExchangeSpec:
    return spec


def in_memory(spec: ExchangeSpec, fd: int) -> HostExchange:
    return open_shm(spec, fd)


def beside(inter: FabricDeviceExchange, hosts: tuple[int, ...]) -> HierarchicalExchange:
    """Collective."""
    return open_hierarchical(inter, hosts, same, in_memory, validate=True)


def on_gpus(
    inter: FabricDeviceExchange, hosts: tuple[int, ...], *, validate: bool = False
) -> HierarchicalExchange:
    """NVLink inside each host. Collective."""

    def open_intra(spec: ExchangeSpec, fd: int) -> Exchange:
        from ep_server.exchange.nvlink.exchange import NvlinkExchange  # there only where nvcc was

        control = open_group(control_spec(spec), fd)
        return NvlinkExchange(spec, control=control, device=inter.device.index, many=True)

    return open_hierarchical(inter, hosts, control_spec, open_intra, validate=validate)


def over_network(
    options: FabricOptions, hosts: tuple[int, ...], spec: ExchangeSpec, group: dist.ProcessGroup
) -> HierarchicalExchange:
    """Between hosts libfabric."""
    return beside(
        FabricDeviceExchange(mixed_ends.from_process_group(options, hosts, spec, group), "cpu"), hosts
    )


def on_one_host(hosts: tuple[int, ...], spec: ExchangeSpec, group: dist.ProcessGroup) -> HierarchicalExchange:
    """Between what counts as hosts shared memory too."""
    return beside(FabricDeviceExchange(from_process_group(group, spec), "cpu"), hosts)
