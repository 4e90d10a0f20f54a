"""What the configuration says of the network, for one rank of a node. Needs no torch."""

from __future__ import annotations

from ep_server.config import FabricConfig
from ep_server.errors import ConfigError
from ep_server.exchange.fabric.settings import FabricOptions, traffic_class


def fabric_options(config: FabricConfig, local_rank: int, local_ranks: int) -> FabricOptions:
    """The settings of one rank.

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
    """One name is every rank's; of several with commas, each rank has its own."""
    names = [name.strip() for name in text.split(",")]
    if len(names) == 1:
        return names[0]
    if len(names) != local_ranks or not all(names):
        raise ConfigError(field, text, f"one name, or one for each of the {local_ranks} ranks of this node")
    return names[local_rank]
