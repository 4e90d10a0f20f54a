"""HierarchicalExchanges on the CPU: inside a host shared memory in place of NVLink, staging as for a GPU."""

from __future__ import annotations

import torch.distributed as dist

from ep_server.exchange import bootstrap
from ep_server.exchange.api import ExchangeSpec
from ep_server.exchange.fabric.device import FabricDeviceExchange
from ep_server.exchange.fabric.exchange import FabricOptions
from ep_server.exchange.hierarchical.bootstrap import compose
from ep_server.exchange.hierarchical.exchange import HierarchicalExchange
from ep_server.exchange.shm import ShmExchange
from tests.support.fabric import mixed_ends


def same(spec: ExchangeSpec) -> ExchangeSpec:
    return spec


def in_memory(spec: ExchangeSpec, fd: int) -> ShmExchange:
    return ShmExchange(spec, fd=fd)


def beside(inter: FabricDeviceExchange, hosts: tuple[int, ...]) -> HierarchicalExchange:
    """Collective."""
    return compose(inter, hosts, same, in_memory, validate=True)


def over_network(
    options: FabricOptions, hosts: tuple[int, ...], spec: ExchangeSpec, group: dist.ProcessGroup
) -> HierarchicalExchange:
    """Between hosts libfabric."""
    return beside(
        FabricDeviceExchange(mixed_ends.from_process_group(options, hosts, spec, group), "cpu"), hosts
    )


def on_one_host(hosts: tuple[int, ...], spec: ExchangeSpec, group: dist.ProcessGroup) -> HierarchicalExchange:
    """Between what counts as hosts shared memory too."""
    return beside(FabricDeviceExchange(bootstrap.from_process_group(group, spec), "cpu"), hosts)
