"""Opens the exchange of one rank, as given by its Start message and the configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ep_server.config import Config, FabricConfig
from ep_server.errors import ConfigError
from ep_server.exchange import factory
from ep_server.exchange.api import Abortable, Exchange, ExchangeSpec
from ep_server.exchange.fabric.settings import EndpointAddress, FabricOptions, traffic_class
from ep_server.exchange.spec import Waiting
from ep_server.exchange.validate import CPU
from ep_server.ranks.group import (
    local_ranks,
    many_rows,
    spin_budget,
    topology_of,
    usable_cores,
)
from ep_server.v1 import rank_pb2 as pb

Meet = Callable[[pb.Introduction, float], pb.Connect]


@dataclass(frozen=True, slots=True)
class Opening:
    """Callbacks while an exchange is opened.

    on_open: gets what can abort the group, before this rank waits for another one.
    meet: takes this rank's introduction and returns those of all ranks; waits at most so many seconds.
    """

    on_open: Callable[[Abortable], None]
    meet: Meet


def open_exchange(
    start: pb.Start, config: Config, spec: ExchangeSpec, opening: Opening, device: torch.device = CPU
) -> Exchange:
    """Opens the exchange of this rank on tensors of `device`. Collective between hosts.

    Raises: StartupError and its children; ExchangeError if a peer fails.
    """
    local = local_ranks(config)
    live = frozenset(start.live) or frozenset(range(spec.num_ranks))
    spin_us = spin_budget(config.exchange.spin_us, len(local) * start.threads, usable_cores())
    options = fabric_options(config.fabric, spec.rank - local.start, len(local))

    def connect(address: EndpointAddress, seconds: float) -> tuple[list[EndpointAddress], int]:
        answer = opening.meet(_introduction(address), seconds)
        return [_address(one) for one in answer.ranks], answer.session

    resources = factory.Opening(
        segment=start.exchange_fd,
        bells=tuple(start.bells),
        on_open=opening.on_open,
        connect=connect,
        waiting=Waiting(spin_us),
        options=replace(options, connect_seconds=config.cluster.connect_seconds),
        device_memory=config.exchange.device_memory,
        joins=start.joins,
        absent=frozenset(range(spec.num_ranks)) - live,
        many=many_rows(config),
    )
    topology = replace(topology_of(config, spec), gpus=device.type == "cuda")
    return factory.open_exchange(topology, spec, device, resources)


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


def fabric_options(config: FabricConfig, local_rank: int, local_ranks: int) -> FabricOptions:
    """The network settings of one rank.

    Args:
        local_rank: 0 to local_ranks - 1, on this node.
    Raises: ConfigError naming the field of the section, its value and what is allowed.
    """
    return FabricOptions(
        library=config.library,
        provider=config.provider,
        domain=_of_rank("fabric.domain", config.domain, local_rank, local_ranks),
        address=config.address,
        interface=_of_rank("fabric.interface", config.interface, local_rank, local_ranks),
        traffic_class=traffic_class("fabric.traffic_class", config.traffic_class),
        gid_index=config.gid_index,
        queue_depth=config.queue_depth,
        adaptive_routing=config.adaptive_routing,
    )


def _of_rank(field: str, text: str, local_rank: int, local_ranks: int) -> str:
    """A single name applies to every rank. In a comma-separated list, each rank has its own."""
    names = [name.strip() for name in text.split(",")]
    if len(names) == 1:
        return names[0]
    if len(names) != local_ranks or not all(names):
        raise ConfigError(field, text, f"one name, or one for each of the {local_ranks} ranks of this node")
    return names[local_rank]
