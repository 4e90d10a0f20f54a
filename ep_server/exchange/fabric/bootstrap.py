"""How the ranks of a group over several hosts find one another and agree before the network carries anything.

One gather of what each rank is and where: over a torch.distributed group, or over a c10d store, which one
rank serves on a host and port. Durations in seconds.
"""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from ep_server import __version__
from ep_server.errors import ConfigError, EpServerError, StartupError
from ep_server.exchange.api import ExchangeSpec, Payload, Reduction
from ep_server.exchange.fabric.exchange import EndpointAddress, FabricExchange, FabricOptions
from ep_server.exchange.segment import HostShare
from ep_server.exchange.waiting import Waiting

SESSION_BITS = 17  # as many as a greeting carries
Gather = Callable[["Introduction"], list["Introduction"]]
Make = Callable[[], FabricExchange]


@dataclass(frozen=True, slots=True)
class Introduction:
    """What a rank tells all others. error: why it has no address, or ""."""

    version: str
    spec: ExchangeSpec
    hosts: tuple[int, ...]
    address: EndpointAddress | None
    session: int
    error: str = ""

    def encode(self) -> str:
        """As JSON: what a rank reads from a socket runs no code."""
        values = asdict(self)
        if self.address is not None:
            values["address"] = (base64.b64encode(self.address[0]).decode(), *self.address[1:])
        return json.dumps(values)

    @classmethod
    def decode(cls, data: str | bytes) -> Introduction:
        """Raises StartupError where it is not one."""
        try:
            values = json.loads(data)
            spec = values["spec"]
            spec["placement"] = tuple(spec["placement"])
            spec["payload"], spec["reduction"] = Payload(spec["payload"]), Reduction(spec["reduction"])
            values["spec"] = ExchangeSpec(**spec)
            values["hosts"] = tuple(map(int, values["hosts"]))
            if values["address"] is not None:
                name, *numbers = values["address"]
                values["address"] = (base64.b64decode(name), *map(int, numbers))
            return cls(**values)
        except (ValueError, KeyError, TypeError) as error:
            raise StartupError(
                f"an introduction at the rendezvous is not of this version: {error}"
            ) from error


def from_process_group(
    group: Any,
    spec: ExchangeSpec,
    options: FabricOptions | None = None,
    waiting: Waiting | None = None,
    share: HostShare | None = None,
    make: Make | None = None,
) -> FabricExchange:
    """An exchange for the ranks of a torch.distributed group with object collectives. Collective.

    Args:
        options, waiting, share: as FabricExchange has them.
        make: opens this rank's end in place of FabricExchange; all ranks choose alike.
    Raises: ConfigError; StartupError, on every rank if it is one rank's.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if (spec.rank, spec.num_ranks) != (rank, size):
        raise ConfigError("rank, num_ranks", (spec.rank, spec.num_ranks), f"{(rank, size)}, as in the group")

    def gather(mine: Introduction) -> list[Introduction]:
        everyone: list[Any] = [None] * size
        dist.all_gather_object(everyone, mine, group=group)
        return everyone

    return join(gather, spec, options, waiting, share, make)


def from_store(
    store: Store,
    name: str,
    spec: ExchangeSpec,
    options: FabricOptions | None = None,
    waiting: Waiting | None = None,
    share: HostShare | None = None,
    make: Make | None = None,
) -> FabricExchange:
    """The same over a c10d store. Collective. TCPStore: one rank serves it, all know its host and port.

    Args:
        name: of the group within the store; used once.
    """
    seconds = timedelta(seconds=(options or FabricOptions()).connect_seconds)

    def gather(mine: Introduction) -> list[Introduction]:
        store.set(f"{name}/{spec.rank}", mine.encode())
        everyone = []
        for rank in range(spec.num_ranks):
            try:
                store.wait([f"{name}/{rank}"], seconds)
            except RuntimeError as error:
                raise StartupError(f"rank {rank} has not come to the rendezvous: {error}") from error
            everyone.append(Introduction.decode(store.get(f"{name}/{rank}")))
        return everyone

    return join(gather, spec, options, waiting, share, make)


def join(
    gather: Gather,
    spec: ExchangeSpec,
    options: FabricOptions | None = None,
    waiting: Waiting | None = None,
    share: HostShare | None = None,
    make: Make | None = None,
) -> FabricExchange:
    """Opens an endpoint, introduces it, connects to all others. Returns once every rank has come so far."""
    exchange, error = None, ""
    try:
        exchange = make() if make is not None else FabricExchange(spec, options, waiting, share)
    except EpServerError as failed:  # the others wait for this rank's introduction
        error = str(failed)
    hosts = tuple(range(spec.num_ranks)) if share is None else share.hosts
    address = None if exchange is None else exchange.address
    everyone = gather(Introduction(__version__, spec, hosts, address, secrets.randbits(SESSION_BITS), error))
    try:
        addresses = agreed(everyone, spec)
        if exchange is None:
            raise StartupError(error)
        exchange.connect(addresses, everyone[0].session)
        exchange.barrier()
    except EpServerError:
        if exchange is not None:
            exchange.close()
        raise
    return exchange


def agreed(everyone: list[Introduction], spec: ExchangeSpec) -> list[EndpointAddress]:
    """The addresses of all ranks, if nothing speaks against the group. Raises StartupError, ConfigError."""
    failed = [f"rank {rank}: {one.error}" for rank, one in enumerate(everyone) if one.error]
    if failed:
        raise StartupError("; ".join(failed))
    for rank, one in enumerate(everyone):
        if one.version != __version__:
            raise ConfigError(f"version of rank {rank}", one.version, f"{__version__}, as rank {spec.rank}'s")
        for field in fields(spec):
            ours, theirs = getattr(replace(spec, rank=rank), field.name), getattr(one.spec, field.name)
            if ours != theirs:
                raise ConfigError(f"{field.name} of rank {rank}", theirs, f"{ours}, as rank {spec.rank}'s")
        if one.hosts != everyone[spec.rank].hosts:
            ours = everyone[spec.rank].hosts
            raise ConfigError(f"hosts of rank {rank}", one.hosts, f"{ours}, as rank {spec.rank}'s")
    return [one.address for one in everyone if one.address is not None]
