"""Opens the exchange of one rank: over the memory of one host, or between hosts. Knows what Start says."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from ep_server.config import Config
from ep_server.exchange.api import ExchangeSpec
from ep_server.exchange.fabric.device_memory import DeviceMemory, open_end
from ep_server.exchange.fabric.exchange import EndpointAddress, FabricExchange
from ep_server.exchange.fabric.host_share import HostShare
from ep_server.exchange.shm import ShmExchange
from ep_server.exchange.tensors import CPU
from ep_server.exchange.waiting import Waiting
from ep_server.ranks.fabric_options import fabric_options
from ep_server.ranks.group import hosts_of, local_ranks, spin_budget, usable_cores
from ep_server.v1 import rank_pb2 as pb

Meet = Callable[[pb.Introduction, float], pb.Connect]


@dataclass(frozen=True, slots=True)
class Opening:
    """Who takes part when an exchange is opened.

    on_open: gets the exchange before it waits for anybody.
    meet: gives the introductions of all ranks for that of this one; waits as many seconds.
    """

    on_open: Callable[[ShmExchange], None]
    meet: Meet


def open_exchange(
    start: pb.Start, config: Config, spec: ExchangeSpec, opening: Opening, device: torch.device = CPU
) -> ShmExchange:
    """Collective between hosts: returns once all ranks are connected.

    Args:
        device: on which rows are, as far as that may matter between hosts.
    Raises: StartupError and its children; ExchangeError if a peer fails.
    """
    local = local_ranks(config)
    spin_us = spin_budget(config.exchange.spin_us, len(local) * start.threads, usable_cores())
    if config.cluster.nodes == 1:
        exchange = ShmExchange(spec, fd=start.exchange_fd, spin_us=spin_us)
        os.close(start.exchange_fd)
        opening.on_open(exchange)
        return exchange
    share = HostShare(hosts_of(config), start.exchange_fd, tuple(start.bells))
    options = fabric_options(config.fabric, local.index(spec.rank), len(local))
    options = replace(options, connect_seconds=config.cluster.connect_seconds)
    waiting, wanted = Waiting(spin_us), DeviceMemory(config.exchange.device_memory)
    through_host = partial(FabricExchange, spec, options, waiting, share)
    fabric = open_end(
        spec, device, wanted if device != CPU else DeviceMemory.HOST, options, waiting, through_host
    )
    share.close()
    opening.on_open(fabric)
    answer = opening.meet(_introduction(fabric.address), config.cluster.connect_seconds)
    fabric.connect([_address(one) for one in answer.ranks], answer.session)
    fabric.barrier()
    return fabric


def _introduction(address: EndpointAddress) -> pb.Introduction:
    name, base, key, size, device_base, device_key, device_size = address
    return pb.Introduction(
        address=name,
        base=base,
        key=key,
        size=size,
        device_base=device_base,
        device_key=device_key,
        device_size=device_size,
    )


def _address(wire: pb.Introduction) -> EndpointAddress:
    host = wire.address, wire.base, wire.key, wire.size
    return *host, wire.device_base, wire.device_key, wire.device_size
